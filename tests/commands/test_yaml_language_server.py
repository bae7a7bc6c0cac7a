"""A real yaml-language-server, as in VS Code and Neovim, completes a recipe and reports its errors by our schema."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
VERSION = "1.25.0"
pytestmark = pytest.mark.slow


class Server:
    """A language server that is spoken to over its standard input and output."""

    def __init__(self, command, root):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root)
        self.number = 0
        self.notices = []
        self.ask("initialize", {"processId": os.getpid(), "rootUri": root.as_uri(), "capabilities": {}})
        self.tell("initialized", {})
        settings = {"yaml": {"validate": True, "completion": True, "schemaStore": {"enable": False}}}
        self.tell("workspace/didChangeConfiguration", {"settings": settings})

    def send(self, **message):
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        self.process.stdin.flush()

    def tell(self, method, params):
        self.send(method=method, params=params)

    def receive(self):
        size = 0
        while line := self.process.stdout.readline().strip():
            if line.lower().startswith(b"content-length:"):
                size = int(line.split(b":")[1])
        message = json.loads(self.process.stdout.read(size))
        if "method" in message and "id" in message:  # a request of the server, such as for its settings
            self.send(id=message["id"], result=[None] * len(message.get("params", {}).get("items", [])) or None)
        return message

    def ask(self, method, params):
        self.number += 1
        self.send(id=self.number, method=method, params=params)
        while True:
            message = self.receive()
            if message.get("id") == self.number and "method" not in message:
                return message["result"]
            self.notices.append(message)

    def open(self, path, text):
        """Return the messages of the diagnostics of a file, by line."""
        path.write_text(text, encoding="utf-8")
        self.tell("textDocument/didOpen", {"textDocument": {
            "uri": path.as_uri(), "languageId": "yaml", "version": 1, "text": text}})  # fmt: skip
        while True:
            message = self.notices.pop(0) if self.notices else self.receive()
            if message.get("method") == "textDocument/publishDiagnostics" and message["params"]["uri"] == path.as_uri():
                found = message["params"]["diagnostics"]
                return [(each["range"]["start"]["line"] + 1, each["message"]) for each in found]

    def complete(self, path, line, character):
        """Return the labels that the server offers at a place, both counted from 0."""
        place = {"textDocument": {"uri": path.as_uri()}, "position": {"line": line, "character": character}}
        return {item["label"] for item in self.ask("textDocument/completion", place)["items"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    npm = shutil.which("npm")
    if not npm:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("server")
    install = [npm, "install", "--no-fund", "--no-audit", "--silent", f"yaml-language-server@{VERSION}"]
    if subprocess.run(install, cwd=folder, capture_output=True, check=False).returncode:
        pytest.skip("yaml-language-server cannot be installed")
    shutil.copy(REPOSITORY / "recipes" / "schema.json", folder)
    found = Server([str(folder / "node_modules" / ".bin" / "yaml-language-server"), "--stdio"], folder)
    found.folder = folder
    yield found
    found.process.kill()
    found.process.wait()


HEAD = "# yaml-language-server: $schema=schema.json\n"


def test_shipped_recipes_have_no_error(server):
    for path in sorted((REPOSITORY / "recipes").glob("*.yaml")):
        assert server.open(server.folder / path.name, path.read_text(encoding="utf-8")) == [], path.name


def test_errors_of_a_recipe_are_reported_at_their_lines(server):
    text = HEAD + (
        "method: dpo\nmodel: {name_or_path: org/model}\ndata:\n  train: {path: rows.jsonl}\n"
        "train:\n  output_dir: out\n  learning_rte: 1e-5\n  max_steps: many\n"
    )
    found = server.open(server.folder / "broken.yaml", text)
    assert dict(found) == {8: "Property learning_rte is not allowed.", 9: "must be an integer"}


def test_keys_are_completed(server):
    path = server.folder / "new.yaml"
    text = HEAD + "method: opd\nmodel:\n  name_or_path: org/model\n  \ntrain:\n  output_dir: out\n  \n"
    server.open(path, text)
    assert {"lora", "chat_template", "attn_implementation"} <= server.complete(path, 4, 2)
    assert {"max_completion_length", "loss_type", "learning_rate"} <= server.complete(path, 7, 2)
    assert "desirable_weight" not in server.complete(path, 7, 2)  # of KTO
