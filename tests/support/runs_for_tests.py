"""Folders as runs leave them, written by hand so that every number on a page is known; and a reader of the pages.

leave_run(folder, ...)  -> the folder, with trainer_state.json and whatever else is given
log_of(...)             a log_history: training at every step, evaluation at every tenth
Page(text)              the tables, links and text of an HTML page
"""

import json
from html.parser import HTMLParser

from hf_posttrain.recipe.yaml_tree import write_tree

HOSTILE = '<script>alert("x")</script> & </pre> "quoted" | `ticks` {{ 7*7 }}'
RECIPE = {
    "method": "dpo",
    "model": {"name_or_path": "Qwen/Qwen3-0.6B", "lora": None},
    "teacher": None,
    "data": {
        "train": {"path": "trl-lib/ultrafeedback_binarized", "split": "train", "limit": None},
        "eval": {"path": "rows/heldout.jsonl", "split": "train", "limit": 500},
    },
    "train": {"output_dir": "outputs/dpo", "max_steps": 20, "learning_rate": 5e-7, "beta": 0.1},
}
LENGTHS = {"min": 3, "p50": 40, "p95": 90, "p99": 120, "max": 200, "mean": 44.25}
AUDIT = {
    "data": {
        "train": {
            "name": "train", "rows_read": 1000, "examples": 990,
            "dropped": [{"reason": "empty completion", "count": 10, "first_rows": [17, 301]}],
            "truncated": [{"reason": "prompt trimmed", "count": 131, "first_rows": [3, 9, 12, 40, 41]}],
            "lengths": {"prompt": LENGTHS, "completion": LENGTHS, "total": LENGTHS},
            "duplicates": {"count": 12, "first_rows": [5]}, "classes": None,
            "identical": {"count": 4, "first_rows": [6]}, "overlap": None,
        },
        "eval": None,
    },
    "warnings": ["train: 4 rows have chosen equal to rejected"],
}  # fmt: skip
SAMPLES = [{"prompt": "1 + 1 =", "before": "3", "after": "2", "expected": "2"}]


def log_of(steps=20, loss=lambda step: 2.0 / step, **more):
    """loss, learning rate and margins at every step, eval_loss at every tenth; `more`: {key: function of the step}."""
    log = []
    for step in range(1, steps + 1):
        entry = {"loss": loss(step), "learning_rate": 1e-6 * step, "rewards/margins": 0.125 * step}
        log.append(entry | {key: value(step) for key, value in more.items()} | {"epoch": step / 10, "step": step})
        if step % 10 == 0:
            log.append({"eval_loss": loss(step) + 0.5, "eval_runtime": 1.5, "epoch": step / 10, "step": step})
    return log


def leave_run(folder, log=None, taken=20, planned=20, recipe=RECIPE, **files):
    """Write a run's folder. files: name without .json -> content, such as samples=[...]."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {"global_step": taken, "max_steps": planned, "epoch": 2.0, "log_history": log_of() if log is None else log}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    if recipe:
        (folder / "recipe.yaml").write_text(write_tree(recipe))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


class Page(HTMLParser):
    """tables: {caption: rows of cells, the head first}; links and loads: addresses; words: all text."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.links, self.loads, self.words, self.tags = {}, [], [], "", []
        self.into, self.rows, self.caption = None, [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        self.links += [given["href"]] if tag == "a" else []
        self.loads += [given[name] for name in ("src", "srcset", "data", "action") if name in given]
        self.loads += [given["href"]] if tag == "link" else []
        if tag == "table":
            self.rows = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        if tag in ("td", "th", "caption"):
            self.into = tag
            self.caption = "" if tag == "caption" else self.caption

    def handle_endtag(self, tag):
        if tag == self.into:
            self.into = None
        if tag == "table":
            self.tables[self.caption] = self.rows

    def handle_data(self, data):
        self.words += data
        if self.into == "caption":
            self.caption += data
        elif self.into:
            self.rows[-1][-1] += data

    def table(self, beginning):
        """The rows below the head of the table with this caption, or the only one whose caption begins so."""
        found = [rows for caption, rows in self.tables.items() if caption.startswith(beginning)]
        [rows] = [self.tables[beginning]] if beginning in self.tables else found
        return rows[1:]
