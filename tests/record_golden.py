"""Write tests/golden.json: `python -m tests.record_golden`. Several minutes."""

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
    cases = {}
    with Serving(tiny_model(seed=5)) as server:
        for name, case in CASES.items():
            with pytest.MonkeyPatch.context() as patch:
                if not case.sampled:
                    fix_rollouts(patch)
                cases[name] = record(case, server.url)
    lines = [f"  {json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in cases.items()]
    head = f'{{\n"machine": {json.dumps(machine())},\n"cases": {{\n'
    (Path(__file__).parent / "golden.json").write_text(head + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main()
