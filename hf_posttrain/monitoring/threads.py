"""Hint for a run on CPU that has more threads than free cores."""

import os

from ..errors import count_noun


def oversubscription_hint(threads: int, processes: int) -> str:
    """Return a line that states that threads wait for each other, or an empty string if there are enough cores.

    Args:
        threads: Number of threads of each process.
        processes: Number of processes of the run on this machine.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    total = threads * processes
    # the load of the last minute includes this run, with at most all of its threads
    other_load = os.getloadavg()[0] - total if hasattr(os, "getloadavg") else 0.0
    run = f"{count_noun(processes, 'process', 'es')} of {count_noun(threads, 'thread')}"
    better = max(1, cores // (2 * processes) if other_load > cores / 2 else cores // processes)
    if better >= threads:
        return ""
    setting = f"OMP_NUM_THREADS={better}"
    if total > cores and threads > 1:
        return f"{run} share {cores} cores, so that they wait for each other. Set {setting}"
    if other_load > cores / 2 and threads > 1:
        return (
            f"other programs use about {min(other_load, cores):.0f} of the {cores} cores, so that the threads of this "
            f"run wait for each other. Set {setting}, which may be several times as fast"
        )
    return ""
