"""A hint where a run on CPU has more threads than cores that are free."""

import os


def oversubscription_hint(threads: int, processes: int) -> str:
    """Return in a line that threads wait for each other, empty if there are cores for all of them.

    threads: of each process. processes: of the run on this machine.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = threads * processes
    # the load of the last minute has what this run has taken itself, at most all of its threads
    others = os.getloadavg()[0] - wanted if hasattr(os, "getloadavg") else 0.0
    each = f"{processes} process{'es' * (processes > 1)} of {threads} thread{'s' * (threads > 1)}"
    better = max(1, cores // (2 * processes) if others > cores / 2 else cores // processes)
    if better >= threads:
        return ""
    mend = f"OMP_NUM_THREADS={better}"
    if wanted > cores and threads > 1:
        return f"{each} share {cores} cores, so that they wait for each other: set {mend}"
    if others > cores / 2 and threads > 1:
        busy = f"about {others:.0f} threads of other programs run on the {cores} cores"
        return f"{busy}, so that {each} wait for each other: {mend} may be several times as fast"
    return ""
