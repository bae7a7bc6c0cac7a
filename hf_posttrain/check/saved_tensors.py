"""Bytes of the tensors that a forward keeps for its backward."""

from collections.abc import Iterable
from contextlib import AbstractContextManager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class SavedTensorCounter:
    """Counts what autograd keeps, each memory once, without that of the model's own weights and buffers."""

    def __init__(self, own: Iterable[Tensor]):
        self.bytes = 0
        # they stay here, so that none takes the place of another
        self.known = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in own)}

    def add(self, tensor: Tensor) -> Tensor:
        """The tensor itself, counted."""
        storage = tensor.untyped_storage()
        self.bytes += storage.nbytes() * (id(storage) not in self.known)
        self.known[id(storage)] = storage
        return tensor

    def counting(self) -> AbstractContextManager:
        """Inside, all is counted that autograd keeps."""
        return saved_tensors_hooks(self.add, lambda tensor: tensor)
