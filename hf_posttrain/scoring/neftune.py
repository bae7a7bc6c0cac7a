"""NEFTune (arXiv 2310.05914): noise on the embeddings in training, independent of the layout and the batch.

Legend: R rows, L row length, H hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..batching.micro_batch import MicroBatch
from .forward import causal_lm


@contextmanager
def embedding_noise(model: nn.Module, batch: MicroBatch, alpha: float) -> Iterator[None]:
    """Add uniform noise within alpha / sqrt(length x H) to the embeddings of a forward inside the context.

    The length is that of the token's own example. transformers uses the length of the row, which holds several
    examples, or padding.
    """
    lengths = example_lengths(batch)

    def add_noise(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        bound = alpha / (lengths * output.shape[-1]).sqrt()
        return output + torch.empty_like(output).uniform_(-1, 1) * bound[..., None].to(output.dtype)

    hook = causal_lm(model).get_input_embeddings().register_forward_hook(add_noise)
    try:
        yield
    finally:
        hook.remove()


def example_lengths(batch: MicroBatch) -> Tensor:
    """Return the length of each token's example, [R, L]: the number of tokens of its prompt and branch together.

    A prompt that several branches share counts with the longest of them.
    """
    ends = (batch.position_ids + 1) * (batch.router_weights > 0)

    def largest_end(begins: Tensor) -> Tensor:
        """Return the largest end within the part of the row to which each token belongs."""
        part = begins.cumsum(1)
        table = ends.new_ones(len(ends), ends.shape[1] + 1)
        return table.scatter_reduce(1, part, ends, "amax").gather(1, part)

    if batch.document is None or batch.branch is None:  # positions restart with each example
        return largest_end(batch.position_ids == 0)
    document, branch = (part.diff(dim=1, prepend=part[:, :1]) != 0 for part in (batch.document, batch.branch))
    return torch.where(batch.branch > 0, largest_end(document | branch), largest_end(document))
