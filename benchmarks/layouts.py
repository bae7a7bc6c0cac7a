"""Are the layouts equal on this device? Log-probabilities and gradients of shared, packed and padded rows.

    python -m benchmarks.layouts [--shape qwen3-0.6b --device cuda]

In float32, against padded rows with eager attention, for each attention that the machine has: `pieces` is what training
takes by itself, on a GPU in bf16 too. Exits 1 where two differ.
"""

import argparse
import sys
from typing import Any

import torch
from torch import Tensor
from transformers.utils import is_flash_attn_2_available

from hf_posttrain.scoring import forward
from hf_posttrain.scoring.attention import choose_attention, row_multiple
from hf_posttrain.scoring.forward import per_branch, targets
from hf_posttrain.scoring.head import LogProb

from .setting import BPE_VOCABULARY, SHAPES, check_device, configured, random_batch, random_model

LENGTHS = [[64, 103, 41], [20, 87, 118], [97, 22, 60], [113, 75, 33]]
"""Of four prompts and the two answers of each, in tokens."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Of log-probabilities and of a gradient's norm, relative."""


def main() -> int:
    """Print a line for each layout and attention; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layouts", description="Are the layouts equal?")
    parser.add_argument("--shape", choices=[*SHAPES], default="qwen3-0.6b")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    given = parser.parse_args()
    check_device(parser, given.device)
    expected = scored(given, "padded", "eager", torch.float32)
    wrong = 0
    for layout, attention, dtype in cases(given.device):
        found = scored(given, layout, attention, dtype)
        gaps = [((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]
        good = max(gaps) <= TOLERANCE[dtype]
        wrong += not good
        name = str(dtype).removeprefix("torch.")
        said = f"log-probabilities {gaps[0]:.1e}, gradient {gaps[1]:.1e}"
        print(f"{layout:7s} {attention:18s} {name:9s} {said} {'equal' if good else 'DIFFERENT'}", flush=True)
    return int(wrong > 0)


def cases(device: str) -> list[tuple[str, str, torch.dtype]]:
    """(layout, attention, dtype) that this machine can run."""
    found = [(layout, "sdpa", torch.float32) for layout in ("shared", "packed", "padded")]
    found += [(layout, "pieces", torch.float32) for layout in ("shared", "packed")]
    if device == "cuda":
        found += [(layout, "pieces", torch.bfloat16) for layout in ("shared", "packed")]
        found.append(("shared", "flex_attention", torch.float32))
        if is_flash_attn_2_available():
            found += [(layout, "flash_attention_2", torch.bfloat16) for layout in ("packed", "padded")]
    return found


def scored(given: Any, layout: str, attention: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(summed log-probabilities of each answer, gradient of the first layer's query projection), float32 on CPU."""
    spec = {"device": given.device, "dtype": "float32", "attention": attention.replace("pieces", "sdpa")}
    model = random_model(configured(given.shape, BPE_VOCABULARY), spec).to(dtype)
    forward.enable_scoring(model)
    if attention != "sdpa":
        choose_attention(model, torch.device(given.device))
    batch = random_batch(LENGTHS, BPE_VOCABULARY, layout, given.device, row_multiple([model]))
    values = forward.score(model, batch, LogProb(targets(batch)))["value"]
    sums = per_branch(values, batch)
    sums.sum().backward()
    return sums.detach().float().cpu(), model.model.layers[0].self_attn.q_proj.weight.grad.float().cpu()


if __name__ == "__main__":
    sys.exit(main())
