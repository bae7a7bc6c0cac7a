"""Write tests/long_tests.txt: `python -m tests.record_long_tests REPORT`.

REPORT is the output of pytest with `-vv --durations=0`, of all tests that are not marked `slow`:

    make test-ci PYTEST="-vv --durations=0" > REPORT
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

LIMIT = 1.0
"""Mean duration of the cases of a test function in seconds from which it is long."""
DURATION = re.compile(r"([0-9.]+)s (?:call|setup|teardown) +(tests/\S+::\w+)(.*)")


def main(report: Path) -> None:
    """Write the list of long tests."""
    durations: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in report.read_text(encoding="utf-8").splitlines():
        if found := DURATION.match(line):
            durations[found[2]][found[3]] += float(found[1])
    long = [name for name, cases in durations.items() if sum(cases.values()) >= LIMIT * len(cases)]
    file = Path(__file__).with_name("long_tests.txt")
    file.write_text("".join(f"{name}\n" for name in sorted(long)), encoding="utf-8")
    print(f"{len(long)} of {len(durations)} test functions are long: {file}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
