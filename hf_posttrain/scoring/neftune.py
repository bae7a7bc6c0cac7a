"""NEFTune (arXiv 2310.05914): noise on the embeddings in training, the same in every layout and batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..batching.micro_batch import MicroBatch
from .forward import causal_lm


@contextmanager
def embedding_noise(model: nn.Module, batch: MicroBatch, alpha: float) -> Iterator[None]:
    """Inside, the embeddings of a forward get uniform noise within alpha / sqrt(L H), where L is the length of the
    token's own example. transformers takes that of the row, which holds several examples, or padding.
    """
    lengths = example_lengths(batch)

    def add_noise(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        largest = alpha / (lengths * output.shape[-1]).sqrt()
        return output + torch.empty_like(output).uniform_(-1, 1) * largest[..., None].to(output.dtype)

    hook = causal_lm(model).get_input_embeddings().register_forward_hook(add_noise)
    try:
        yield
    finally:
        hook.remove()


def example_lengths(batch: MicroBatch) -> Tensor:
    """[R, L]: how many tokens the prompt and the branch have together that a token is of. A prompt that several
    branches share counts with the longest of them.
    """
    reached = (batch.position_ids + 1) * (batch.router_weights > 0)

    def longest(begins: Tensor) -> Tensor:
        """The largest position between two places where a part of the row begins, for each token."""
        part = begins.cumsum(1)
        table = reached.new_ones(len(reached), reached.shape[1] + 1)
        return table.scatter_reduce(1, part, reached, "amax").gather(1, part)

    if batch.document is None or batch.branch is None:  # positions begin again
        return longest(batch.position_ids == 0)
    document, branch = (part.diff(dim=1, prepend=part[:, :1]) != 0 for part in (batch.document, batch.branch))
    return torch.where(batch.branch > 0, longest(document | branch), longest(document))
