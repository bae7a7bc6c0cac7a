"""NEFTune (arXiv 2310.05914): noise on the embeddings in training, the same in every layout and batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .forward import causal_lm


@contextmanager
def embedding_noise(model: nn.Module, batch: dict[str, Any], alpha: float) -> Iterator[None]:
    """Inside, the embeddings of a forward get uniform noise within alpha / sqrt(L H), where L is the length of the
    token's own example. transformers takes that of the row, which holds several examples, or padding."""
    lengths = example_lengths(batch)

    def add_noise(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        largest = alpha / (lengths * output.shape[-1]).sqrt()
        return output + torch.empty_like(output).uniform_(-1, 1) * largest[..., None].to(output.dtype)

    hook = causal_lm(model).get_input_embeddings().register_forward_hook(add_noise)
    try:
        yield
    finally:
        hook.remove()


def example_lengths(batch: dict[str, Any]) -> Tensor:
    """[R, L]: how many tokens the prompt and the branch have together that a token is of. A prompt that several
    branches share counts with the longest of them."""
    position, real = batch["position_ids"] + 1, batch["router_weights"] > 0
    # documents by their numbers, or where positions begin again
    begins = position.diff(dim=1, prepend=position[:, :1]) != 1
    document = batch["document"] + 1 if "document" in batch else begins.cumsum(1)
    document = document + torch.arange(len(document), device=document.device)[:, None] * (position.shape[1] + 1)

    def longest(group: Tensor) -> Tensor:
        """The largest position among the tokens of a group, for each of them."""
        table = position.new_ones(int(group.max()) + 1)
        return table.scatter_reduce(0, group.flatten(), (position * real).flatten(), "amax")[group]

    if "branch" not in batch:
        return longest(document)
    branch = batch["branch"]
    return torch.where(branch > 0, longest(document * (branch.max() + 1) + branch), longest(document))
