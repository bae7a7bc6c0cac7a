"""Run the parts of the GPU benchmarks: `python -m benchmarks.gpu --help`, or `bash benchmarks/gpu.sh` on a GPU machine.

The parts, with their limits in seconds:

    a   60  ceilings of the machine; layouts, attention, kernels and tiles compute what they should
    b  150  SFT, DPO, KTO, KD and OPD with a Qwen3 0.6B shape, in turns with TRL
    c   60  the LM head alone, against full logits, TRL and Liger
    d   90  LoRA on packed rows, Qwen3 0.6B to 8B
    f   60  generation by batch size, against transformers' generate
    e   60  torch.compile and Liger's layer kernels, on and off
    g   45  row lengths up to 65,536 tokens, and memory of a Gemma 3 1B shape at 8,192
    h   60  profile of one DPO and one OPD step

Each measurement checks its own result before it reports a time, and is written to OUT/records.jsonl at once. The last
lines of the output are a summary of at most 60 lines; `--summary FILE` prints that of an earlier run.
"""

import argparse
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from . import summary
from .supervisor import Case, Part, Records, run_parts

ORDER = "abcdfegh"
TOTAL_SECONDS = 560
"""Of all parts: a command on the GPU machine may run for 600 seconds."""
PEERS = ("trl", "liger_kernel", "flash_attn")


def main() -> int:
    """Run what the command line asks for. Returns 1 if a result is wrong or a measurement failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Benchmarks for one GPU.")
    default = os.environ.get("PARTS") or ORDER
    parser.add_argument("--parts", default=default, help="letters of parts in order, default: PARTS or %(default)s")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models: a rehearsal, also on CPU")
    parser.add_argument("--limit", type=float, default=TOTAL_SECONDS, help="seconds for all, default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"), help="folder of the results")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="print the summary of these records, and no more")
    given = parser.parse_args()
    if given.summary:
        print(summary.render(Records(given.summary).read()))
        return 0
    letters = given.parts.replace(" ", "").replace(",", "")
    if unknown := sorted({*letters} - {*ORDER}):
        parser.error(f"--parts: there is no part {', '.join(unknown)}; choose from {ORDER}")
    if given.device == "cpu" and not given.tiny:
        parser.error("--device cpu requires --tiny: the full sizes are for a GPU")
    given.out.mkdir(parents=True, exist_ok=True)
    records = Records(given.out / "records.jsonl")
    records.path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        parts = parts_of(letters, given.device, given.tiny, Path(folder))
        run_parts(parts, records, given.limit, given.device)
    page = summary.render(records.read())
    (given.out / "summary.txt").write_text(page + "\n", encoding="utf-8")
    print(f"\n{page}", flush=True)
    return int(any(summary.failed(record) for record in records.read()))


def parts_of(letters: str, device: str, tiny: bool, folder: Path) -> list[Part]:
    """Return the parts in order, after the one that writes their inputs."""
    # imported here: they need torch, and --help does not
    from functools import partial

    from . import correctness, generation, inputs, lengths, lm_head, profiling, training
    from .settings import Settings

    settings = Settings(device, tiny, folder, tuple(name for name in PEERS if find_spec(name)))
    known = {
        "a": ("ceilings and correctness", 60, correctness.cases),
        "b": ("methods against TRL", 150, training.compare_methods),
        "c": ("the LM head", 60, lm_head.cases),
        "d": ("LoRA by model size", 90, training.lora),
        "e": ("torch.compile and Liger", 60, training.acceleration),
        "f": ("generation", 60, generation.cases),
        "g": ("long rows", 45, lambda settings: training.long_rows(settings) + lengths.cases(settings)),
        "h": ("profiles", 60, profiling.cases),
    }
    prepare = Part("-", "inputs", 30, [Case("inputs", partial(inputs.write_inputs, settings))])
    return [prepare, *(Part(each, *known[each][:2], known[each][2](settings)) for each in letters)]


if __name__ == "__main__":
    sys.exit(main())
