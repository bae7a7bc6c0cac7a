"""Benchmarks for one GPU. On a GPU machine, start them with `bash benchmarks/gpu.sh`.

The parts, in their default order, with their limits in seconds on a GPU (four times as long with `--tiny`, whose
rehearsals run on slow machines):

  a   60  ceilings of the machine; layouts, attention, kernels and tiles compute what they should
  b  150  SFT, DPO, KTO, KD and OPD with a Qwen3 0.6B shape, in turns with TRL
  c   30  the LM head alone, against full logits, TRL and Liger
  d  100  packed rows: LoRA with Qwen3 0.6B to 8B, all weights with 0.6B
  f   50  generation by batch size, against transformers' generate
  e  100  torch.compile and Liger's layer kernels, on and off
  g   60  row lengths up to 65,536 tokens, and memory of a Gemma 3 1B shape at 8,192
  h   60  profile of one step of DPO, OPD and LoRA

Every measurement appends its results to OUT/records.jsonl at once. The last lines of the output are a summary of at
most 60 lines. Exit codes: 0, 1 if a result is wrong or a measurement failed, 2 for wrong arguments, 130 and 143 after
Ctrl-C and SIGTERM.
"""

import argparse
import os
import re
import signal
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import summary, supervisor
from .supervisor import Case, Part, Records

ORDER = "abcdfegh"
LIMITS = {"a": 60, "b": 150, "c": 30, "d": 100, "e": 100, "f": 50, "g": 60, "h": 60}
"""Part -> seconds."""
TOTAL_SECONDS = 560
"""Of all parts: a command on the GPU machine may run for 600 seconds."""
REHEARSAL_FACTOR = 4
"""The limits of a rehearsal, in limits of a GPU."""
OPTIONAL = ("trl", "liger_kernel", "flash_attn")


def main() -> int:
    """Run what the command line asks for, and return the exit code."""
    given = arguments()
    if given.summary:
        print(summary.render([record for file in given.summary for record in Records(file).read()]))
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    records = Records(given.out / "records.jsonl")
    keep_earlier(records.path)
    code = 0
    signal.signal(signal.SIGTERM, stop)
    try:
        supervisor.start_server()  # it imports while this process does
        with tempfile.TemporaryDirectory() as folder:
            parts = parts_of(given.parts, given.device, given.tiny, Path(folder), given.out)
            parts = [part if part.letter == "-" else part.only(given.cases) for part in parts]
            if not any(part.cases for part in parts if part.letter != "-"):
                print(f"error: no measurement of parts {given.parts} has a name that matches {given.cases!r}")
                return 2
            supervisor.run_parts(parts, records, given.limit, given.device)
    except KeyboardInterrupt as stopped:
        code = stopped.args[0] if stopped.args else 130
    page = summary.render(records.read())
    (given.out / "summary.txt").write_text(page + "\n", encoding="utf-8")
    print(f"\n{page}", flush=True)
    return code or int(any(map(summary.failed, records.read())))


def arguments() -> argparse.Namespace:
    """Return the command line, checked before anything is imported or started."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = os.environ.get("PARTS") or ORDER
    parser.add_argument("--parts", default=default, help=f"letters of parts in order (default: PARTS, or {ORDER})")
    default = os.environ.get("CASES") or ""
    parser.add_argument("--cases", default=default, help="regular expression that the measurements' names match")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models: a rehearsal, also on CPU")
    parser.add_argument("--limit", type=float, help=f"seconds for all (default: {TOTAL_SECONDS}; more with --tiny)")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"), help="folder of the results (%(default)s)")
    parser.add_argument("--summary", type=Path, nargs="+", metavar="FILE", help="print the summary of records, no more")
    given = parser.parse_args()
    given.parts = given.parts.replace(" ", "").replace(",", "")
    if unknown := sorted({*given.parts} - {*ORDER}):
        parser.error(f"--parts: there is no part {', '.join(unknown)}; choose from {ORDER}")
    if not given.parts:
        parser.error(f"--parts is empty; choose from {ORDER}")
    try:
        re.compile(given.cases)
    except re.error as error:
        parser.error(f"--cases: {given.cases!r} is no regular expression: {error}")
    if given.limit is None:
        given.limit = TOTAL_SECONDS * (REHEARSAL_FACTOR if given.tiny else 1)
    if given.limit <= 0:
        parser.error(f"--limit must be positive, not {given.limit:g}: it leaves no time for a measurement")
    if given.device == "cpu" and not given.tiny:
        parser.error("--device cpu requires --tiny: the full sizes are for a GPU")
    for file in given.summary or ():
        if not file.is_file() or not Records(file).read():
            parser.error(f"--summary: {file} is no file of records")
    return given


def keep_earlier(path: Path) -> None:
    """Rename the records of an earlier run in the same folder, and say so."""
    if path.exists():
        number = next(n for n in range(1, 10_000) if not path.with_suffix(f".{n}.jsonl").exists())
        kept = path.rename(path.with_suffix(f".{number}.jsonl"))
        print(f"the records of an earlier run are kept as {kept}", flush=True)


def stop(*_: Any) -> None:
    """End the run as Ctrl-C does, with the exit code of SIGTERM."""
    raise KeyboardInterrupt(143)


def parts_of(letters: str, device: str, tiny: bool, folder: Path, out: Path | None = None) -> list[Part]:
    """Return the parts in order, after the one that writes their inputs."""
    # imported here: they need torch, and --help does not
    from . import correctness, generation, inputs, lengths, lm_head, profiling, training
    from .settings import Settings

    settings = Settings(device, tiny, folder, tuple(name for name in OPTIONAL if find_spec(name)), out)
    known = {
        "a": ("ceilings and correctness", correctness.cases),
        "b": ("methods against TRL", training.compare_methods),
        "c": ("the LM head", lm_head.cases),
        "d": ("LoRA by model size", training.lora),
        "e": ("torch.compile and Liger", training.acceleration),
        "f": ("generation", generation.cases),
        "g": ("long rows", lambda settings: lengths.cases(settings) + training.long_rows(settings)),
        "h": ("profiles", profiling.cases),
    }
    prepare = [
        Case("machine", partial(correctness.describe_machine, settings)),
        Case("inputs", partial(inputs.write_inputs, settings)),
    ]
    factor = REHEARSAL_FACTOR if tiny else 1
    parts = [Part(each, known[each][0], factor * LIMITS[each], known[each][1](settings)) for each in letters]
    return [Part("-", "machine and inputs", factor * 30, prepare), *parts]


if __name__ == "__main__":
    sys.exit(main())
