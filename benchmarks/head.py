"""Time and memory of the head at the vocabularies of real models, on CPU.

    python -m benchmarks.head [--shapes smollm2-135m gemma-3-270m qwen3-0.6b] [--losses nll kd] [--against trl]
        [--tokens 1024] [--repeats 3] [--dtype float32] [--threads 2] [--out build/head.json]

Forward and backward of the loss of hidden states [N, H] through a tied head [V, H], whose gradient is added to an
existing one, as that of the embedding is. Three sides take turns, each in a process of its own:

full     logits [N, V] in one product, torch's cross-entropy or KL divergence, and autograd
ours     `scoring.head.score_tokens`
trl      the tiled functions of TRL, with the sizes of its trainers

Memory is the peak beyond weights, hidden states and that gradient. `estimate` is what `--check` expects of ours.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_posttrain.check.memory import head_bytes
from hf_posttrain.losses.divergence import forward_kl
from hf_posttrain.scoring.head import LinearHead, LogProb, score_tokens
from hf_posttrain.scoring.teacher_tiles import dense_divergence

from .run import ROOT
from .worker import memory, peak_memory

SHAPES = {"smollm2-135m": (49152, 576), "qwen3-0.6b": (151936, 1024), "gemma-3-270m": (262144, 640)}
"""Name of a model -> vocabulary V and hidden size H."""
LOSSES = ("nll", "kd")
"""Cross-entropy, and KL(teacher, student) to a teacher with a head of the same size."""
TRL_COLUMNS = 32768
"""Columns of a tile of TRL's log-probabilities: trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE."""
MIB = 2**20


def main() -> int:
    """Run what the command line asks for, print the table, and return the exit code."""
    given = arguments()
    sides = ["full", "ours", *(["trl"] if given.against == "trl" else [])]
    results: dict[str, dict[str, dict[str, float]]] = {}
    for shape in given.shapes:
        for loss in given.losses:
            runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
            for _ in range(given.repeats):
                for side in sides:
                    spec = {"side": side, "shape": shape, "loss": loss, **vars(given), "out": None}
                    with multiprocessing.get_context("spawn").Pool(1) as pool:
                        runs[side].append(pool.apply(measure, (spec,)))
            medians = {
                side: {key: statistics.median(run[key] for run in found) for key in found[0]}
                for side, found in runs.items()
            }
            results[f"{shape} {loss}"] = medians
            for side, found in medians.items():
                ratio = found["seconds"] / medians["ours"]["seconds"]
                line = f"{shape:13} {loss:4} {side:5} {found['seconds']:7.2f} s {ratio:5.2f} x ours"
                line += f"  +{found['bytes'] / MIB:6.0f} MiB  loss {found['loss']:.5f}"
                print(line + (f"  estimate {estimate(spec) / MIB:.0f} MiB" if side == "ours" else ""), flush=True)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"written to {given.out}")
    return 0


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.head", description="Time and memory of the head.")
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=[*SHAPES], help="models")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=[*LOSSES], help="losses")
    parser.add_argument("--against", choices=["trl", "none"], default="trl", help="the third side")
    parser.add_argument("--tokens", type=int, default=1024, help="scored tokens N")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each side")
    parser.add_argument("--steps", type=int, default=3, help="steps of a process, of which the median is taken")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of all tensors")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "head.json", help="file of the results")
    return parser.parse_args()


def measure(spec: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of a step, the bytes that it adds, and the loss."""
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(0)
    vocabulary, width = SHAPES[spec["shape"]]
    dtype = getattr(torch, spec["dtype"])
    weight = torch.randn(vocabulary, width, dtype=dtype).mul_(0.02).requires_grad_()
    hidden = torch.randn(spec["tokens"], width, dtype=dtype).requires_grad_()
    weight.grad = torch.zeros_like(weight)
    hidden.grad = torch.zeros_like(hidden)
    targets = torch.randint(vocabulary, (spec["tokens"],))
    teacher: tuple[Tensor, ...] = ()
    if spec["loss"] == "kd":
        teacher = torch.randn(vocabulary, width, dtype=dtype).mul_(0.02), torch.randn_like(hidden)
    loss_of: Callable[..., Tensor] = {"full": full_loss, "ours": our_loss, "trl": trl_loss}[spec["side"]]
    small = slice(0, 8)
    small_teacher = (teacher[0], teacher[1][small]) if teacher else ()
    loss_of(hidden[small], weight, targets[small], *small_teacher).backward()  # imports

    before = memory("cpu")
    seconds = []
    for _ in range(spec["steps"]):
        start = time.perf_counter()
        loss = loss_of(hidden, weight, targets, *teacher)
        loss.backward()
        seconds.append(time.perf_counter() - start)
    added = peak_memory("cpu") - before
    return {"seconds": statistics.median(seconds), "bytes": added, "loss": loss.item()}


def full_loss(hidden: Tensor, weight: Tensor, targets: Tensor, *teacher: Tensor) -> Tensor:
    """Return the mean loss of logits [N, V]."""
    logits = (hidden @ weight.T).float()
    if not teacher:
        return functional.cross_entropy(logits, targets)
    student_logps = functional.log_softmax(logits, -1)
    with torch.no_grad():
        teacher_logps = functional.log_softmax((teacher[1] @ teacher[0].T).float(), -1)
    return functional.kl_div(student_logps, teacher_logps, reduction="batchmean", log_target=True)


class TeacherHead:
    """The logits of a teacher, as `teacher_tiles.TeacherLogits`."""

    def __init__(self, weight: Tensor, hidden: Tensor) -> None:
        self.head = LinearHead(weight, None)
        self.hidden = hidden

    def logits(self, rows: slice) -> Tensor:
        """Return logits [n, V]."""
        return self.head.logits(self.hidden[rows])


def our_loss(hidden: Tensor, weight: Tensor, targets: Tensor, *teacher: Tensor) -> Tensor:
    """Return the mean loss by `score_tokens`."""
    weights = hidden.new_full((len(hidden),), 1 / len(hidden), dtype=torch.float32)
    if not teacher:
        return -(score_tokens(LinearHead(weight, None), hidden, LogProb(targets), -weights)[0] * weights).sum()
    tile = dense_divergence(forward_kl, TeacherHead(*teacher), targets, 1.0, 0.0)
    return (score_tokens(LinearHead(weight, None), hidden, tile, weights)[0] * weights).sum()


def trl_loss(hidden: Tensor, weight: Tensor, targets: Tensor, *teacher: Tensor) -> Tensor:
    """Return the mean loss by the functions of TRL."""
    from trl.kernels import ChunkedLogProbFunction
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    if not teacher:
        values = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, TRL_COLUMNS, None, 1.0, ())
        return -values[0].mean()
    return ChunkedDivergenceFunction.apply(hidden, weight, None, teacher[1], teacher[0], None, 0.0)[0].mean()


def estimate(spec: dict[str, Any]) -> int:
    """Return the bytes of our head that `--check` expects, with the gradient of its weight."""
    vocabulary, width = SHAPES[spec["shape"]]
    return sum(head_bytes(spec["tokens"], vocabulary, width, spec["loss"] == "kd")) + 4 * vocabulary * width


if __name__ == "__main__":
    sys.exit(main())
