"""Versions of other packages that the tests have run with: constraints.txt has the same."""

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


def newer_than_tested() -> str:
    """Return which installed packages are newer than the tested ones, in a line; empty if there is none."""
    newer = []
    for name, tested in TESTED.items():
        try:
            installed = version(name)
        except PackageNotFoundError:  # a build from source without metadata
            continue
        if Version(installed).release > Version(tested).release:
            newer.append(f"{name} {installed} ({tested})")
    return f"newer than the tested versions: {', '.join(newer)}" if newer else ""
