"""Write tests/golden.json: `python -m tests.record_golden [--missing]`. All cases take several minutes.

With --missing the cases that the file lacks are added, and those that are gone are removed. On another machine than
that of the other cases they are added without hashes, which depend on the machine.
"""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "support"))

import pytest
from golden_cases import CASES, machine, record
from models_for_tests import tiny_model
from training_for_tests import fix_rollouts
from vllm_for_tests import Serving


def main() -> None:
    file = Path(__file__).parent / "golden.json"
    before = json.loads(file.read_text())
    missing = "--missing" in sys.argv[1:]
    cases = before["cases"] if missing else {}
    recorder = before["machine"] if missing else machine()
    with Serving(tiny_model(seed=5)) as server:
        for name, case in CASES.items():
            if name in cases:
                continue
            with pytest.MonkeyPatch.context() as patch:
                if not case.sampled:
                    fix_rollouts(patch)
                cases[name] = record(case, server.url)
            if recorder != machine():
                del cases[name]["logs"], cases[name]["weights"]
    lines = [f"  {json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in ((n, cases[n]) for n in CASES)]
    head = f'{{\n"machine": {json.dumps(recorder)},\n"cases": {{\n'
    file.write_text(head + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main()
