"""A stand-in for the Hub: it takes what huggingface_hub's client uploads, over HTTP on this machine.

HubServer      commits: repository -> {path: bytes}, created: the bodies of requests that create a repository
"""

import base64
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, body, code=200):
        payload = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def do_POST(self):
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size) if size else self.chunks()
        hub = self.server.hub
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            hub.created.append(asked)
            name = f"{asked.get('organization') or 'someone'}/{asked['name']}"
            self.answer({"url": f"{hub.url}/{name}", "id": name})
        elif parts == ["api", "validate-yaml"]:
            self.answer({"errors": [], "warnings": []})
        elif parts[4:5] == ["preupload"]:  # each file is sent within the commit
            files = json.loads(body)["files"]
            self.answer(
                {"files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in files]}
            )
        elif parts[4:5] == ["commit"]:
            name = "/".join(parts[2:4])
            for line in body.splitlines():
                item = json.loads(line)
                if item["key"] == "file":
                    content = base64.b64decode(item["value"]["content"])
                    hub.commits.setdefault(name, {})[item["value"]["path"]] = content
            self.answer({"commitUrl": f"{hub.url}/{name}/commit/1", "commitOid": "1" * 40, "pullRequestUrl": None})
        else:
            hub.unknown.append(self.path)
            self.answer({"error": self.path}, 404)

    def chunks(self):
        """The body of a request in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return b""
        body = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def do_GET(self):
        if self.path.startswith("/api/whoami"):
            return self.answer({"name": "someone", "type": "user", "auth": {"accessToken": {"role": "write"}}})
        self.server.hub.unknown.append(self.path)
        return self.answer({"error": self.path}, 404)


class HubServer:
    """A context: the server runs within it."""

    def __init__(self):
        self.commits = {}
        self.created = []
        self.unknown = []

    def __enter__(self):
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self.server.hub = self
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
