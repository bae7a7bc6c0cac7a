"""Versions of other packages with which the tests have run. constraints.txt has the same versions."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

TESTED = {
    "accelerate": "1.15.0",
    "datasets": "5.2.0",
    "peft": "0.21.2",
    "tokenizers": "0.23.3",
    "torch": "2.13.0",
    "transformers": "5.24.0",
}


@cache
def newer_than_tested() -> str:
    """Return a line with the installed packages that are newer than the tested ones, or an empty string."""
    newer = []
    for name, tested in TESTED.items():
        try:
            installed = version(name)
        except PackageNotFoundError:  # a build from source without metadata
            continue
        if Version(installed).release > Version(tested).release:
            newer.append(f"{name} {installed} ({tested})")
    return f"newer than the tested versions: {', '.join(newer)}" if newer else ""
