"""What each causal LM of the installed transformers can do here, as a table: python -m tests.zoo [--only llama ...]

Each is built tiny from its config and examined as in tests/models/test_architectures.py: every layout against the
model's own forward (values and gradients), steps of SFT, DPO and OPD against their formulas, LoRA on all linear layers,
saved and loaded, greedy answers.
Writes the table and its counts into docs/reference/models.md, between the marks of the zoo; with --only it prints them.
"""

import argparse
import contextlib
import logging
import os
import sys
import tempfile
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from textwrap import shorten

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "support"))
PAGE, BEGIN, END = HERE.parent / "docs" / "reference" / "models.md", "<!-- zoo -->\n", "<!-- end of the zoo -->\n"
HEADER = "| model_type | layouts | head | LoRA all-linear | answers by | what is refused or goes wrong, and why |\n"
HEADER += "|---|---|---|---|---|---|\n"
STEPS = ("whole: loss of a step", "dpo: loss", "dpo: gradient", "opd: loss", "opd: gradient")
WAYS = {"decode": "decode", "batches": "generate", "alone": "generate, one by one", "": "no"}


def examined(name: str) -> tuple[str, dict]:
    """(name, what was found): `built` alone where it does not build."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    import torch
    from hunt_architectures import EQUAL, examine

    from hf_posttrain.errors import InputError

    torch.set_num_threads(1)
    facts: dict = {}
    with (
        tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere),
    ):  # fmt: skip
        found = examine(name, Path(folder), facts)
    if "built" in found:
        return name, {"built": found["built"]}
    right = {part: isinstance(value, float) and value < EQUAL for part, value in found.items()}
    told = {part: str(value) for part, value in found.items() if isinstance(value, InputError)}
    wrong = {part: str(value) for part, value in found.items() if not right[part] and part not in told}
    return name, facts | {"right": right, "told": told, "wrong": wrong}


def row(name: str, found: dict) -> str:
    """A line of the table."""
    right, told = found["right"], found["told"]
    layouts = [layout for layout in ("shared", "packed", "padded") if right.get(f"layouts: layout {layout}")]
    lora = "yes" if right.get("lora: saved") else "no"
    wrong = [f"{part}: {value}" for part, value in found["wrong"].items()]
    why = told.get("layouts") or "; ".join(dict.fromkeys([*told.values(), *wrong]))
    if not why and layouts == ["padded"]:
        why = found.get("why", "")
        if why.endswith("so a prompt is computed once"):  # its attention would
            why = "its scores in other layouts differ from its own forward"
    cells = [f"`{name}`", ", ".join(layouts) or "none", found.get("head", "none"), lora,
             WAYS[found.get("answers", "")], shorten(why.replace("|", "/"), 160, placeholder=" ...")]  # fmt: skip
    return "| " + " | ".join(cells) + " |\n"


def table(found: dict[str, dict]) -> str:
    """The counts, and a line for each that was built."""
    built = {name: one for name, one in found.items() if "built" not in one}
    rows = {name: row(name, one) for name, one in built.items()}
    counts = Counter(line.split(" | ")[1] for line in rows.values())
    refused = [one for one in built.values() if "layouts" in one["told"]]
    trained = [one for one in built.values() if all(one["right"].get(step) for step in STEPS)]
    whole = [one for one in trained if not one["told"] and not one["wrong"]]
    of_layouts = ", ".join(f"{names} {count}" for names, count in counts.most_common())
    lines = [
        f"{len(found)} architectures of AutoModelForCausalLM, {len(built)} of them built tiny; {len(refused)} refused ",
        f"before training; {len(trained)} trained by SFT, DPO and OPD as the formulas say, {len(whole)} right in all ",
        f"else too. Layouts: {of_layouts}.\n\n", HEADER,
        *(rows[name] for name in sorted(rows)),
        "\nNot built tiny: " + "; ".join(f"`{name}` ({one['built'][:80]})" for name, one in sorted(found.items())
                                          if "built" in one) + ".\n",
    ]  # fmt: skip
    return "".join(lines)


def main(words: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], help="names, as model_type in config.json")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args(words)
    from architectures import NAMES

    names = given.only or NAMES
    with ProcessPoolExecutor(given.processes, get_context("spawn")) as pool:
        found = {}
        for name, one in pool.map(examined, names):
            found[name] = one
            print(len(found), name, one.get("built") or one["wrong"] or one["told"] or "right", flush=True)
    made = table(found)
    if given.only:
        print(made)
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
