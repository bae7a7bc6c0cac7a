"""Cases that run as two gloo processes on CPU, under any engine.

A case is a module-level function `case(rank, *args)` of a test module; `on_two(case, engine, *args)` gives what each
rank returned. Workers are forked from a server that has the slow imports behind it, so a case takes about a second.
"""

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hf_posttrain.methods import METHODS

ENGINES = ("ddp", "fsdp2", "zero2", "zero3")
PRELOADED = [
    "torch", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict", "transformers", "datasets", "peft",
    "accelerate.utils.fsdp_utils", "deepspeed", *(method.module for method in METHODS.values()),
    "training_for_tests", "models_for_tests",
]  # fmt: skip


def engine_arguments(engine: str, layer: str | None = "Qwen3DecoderLayer", **fsdp: Any) -> dict[str, Any]:
    """The arguments of a method's Config that ask for this engine. layer: FSDP2's units; None: those of the model."""
    if engine == "fsdp2":
        wrap = {"version": 2, "state_dict_type": "FULL_STATE_DICT"}
        wrap |= {"transformer_layer_cls_to_wrap": [layer]} if layer else {}
        return {"fsdp": True, "fsdp_config": wrap | fsdp}
    if engine.startswith("zero"):
        stage = {"stage": int(engine[-1])}
        if engine == "zero3":  # small weights would stay whole otherwise, as those of a real model do not
            stage["stage3_param_persistence_threshold"] = 0
        return {"deepspeed": {
            "zero_optimization": stage, "zero_allow_untested_optimizer": True,
            "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
        }}  # fmt: skip
    return {}


def on_two(case: Callable[..., Any], engine: str, *args: Any, world: int = 2, timeout: float = 240) -> list[Any]:
    """[what rank 0 returned, what rank 1 returned]; a rank's error is raised here with its traceback."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = start(case, engine, folder, *args, world=world, timeout=timeout)
        for process in ranks:
            process.join(timeout)  # a rank that is stuck writes where just before
        stuck = [process for process in ranks if process.is_alive()]
        for process in stuck:
            process.kill()
            process.join()
        files = [Path(folder) / str(rank) for rank in range(world)]
        logs = [(file.with_suffix(".log")).read_text(errors="replace")[-3000:] for file in files]
        results = [torch.load(file, weights_only=False) if file.exists() else ("lost", None) for file in files]
    errors = [f"rank {rank}: {value}" for rank, (state, value) in enumerate(results) if state == "error"]
    lost = [rank for rank, (state, _) in enumerate(results) if state == "lost"]
    ends = [process.exitcode for process in ranks]
    assert not errors, "\n".join([*errors, f"exit codes {ends}", *(logs[rank] for rank in lost)])
    assert not stuck, f"ranks {lost} did not end within {timeout} s\n" + "\n".join(logs)
    assert not lost, f"ranks {lost} ended without a result: {ends}"
    return [value for _, value in results]


def free_port() -> int:
    """One below those that a system gives to whoever asks for any: it stays free until a process listens there."""
    draw = random.SystemRandom()
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port := draw.randrange(10_000, 32_000)))
            return port


def start(
    case: Callable[..., Any], engine: str, folder: str, *args: Any, world: int = 2, timeout: float = 240
) -> list[Any]:
    """The processes of `on_two`, running; what they return and write is left in `folder`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port = free_port()
    ranks = [
        context.Process(target=_rank, args=(case, engine, rank, world, port, folder, timeout, args))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    return ranks


def _rank(
    case: Callable, engine: str, rank: int, world: int, port: int, folder: str, timeout: float, args: tuple
) -> None:
    """One worker: set up the engine, run the case, leave its result in a file, and end without Python's exit."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    torch.set_num_threads(1)
    gc.freeze()  # what the server has imported is not searched by the collections of each trainer, 0.7 s each
    log = Path(folder) / f"{rank}.log"
    with log.open("w") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    faulthandler.dump_traceback_later(0.9 * timeout)
    try:
        _set_up(engine)
        result = ("done", case(rank, *args))
    except BaseException:
        sys.stderr.flush()
        result = ("error", traceback.format_exc() + "\n" + log.read_text(errors="replace")[-3000:])
    torch.save(result, Path(folder) / f"{rank}.part")
    os.rename(Path(folder) / f"{rank}.part", Path(folder) / str(rank))
    if torch.distributed.is_initialized():
        with contextlib.suppress(Exception):
            torch.distributed.destroy_process_group()
    os._exit(0)  # gloo may abort at the interpreter's exit


def _set_up(engine: str) -> None:
    """What each engine wants on CPU before anything else."""
    if engine == "fsdp2":
        _fsdp_on_cpu()
    if engine.startswith("zero"):
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it would take half a minute
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)


def _fsdp_on_cpu() -> None:
    """accelerate reads an FSDP plugin on accelerators alone and trains DDP on CPU without a word: let it read it."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not AcceleratorState._shared_state:
            PartialState(cpu=True)
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        original(self, *args, **kwargs)

    AcceleratorState.__init__ = init
