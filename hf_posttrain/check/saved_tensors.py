"""Bytes of the tensors that a forward saves for its backward."""

from collections.abc import Iterable
from contextlib import AbstractContextManager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class SavedTensorCounter:
    """Counts the bytes that autograd saves. Each storage counts once, and the model's own weights and buffers do not.

    own: the weights and buffers of the model.
    """

    def __init__(self, own: Iterable[Tensor]) -> None:
        self.bytes = 0
        # references keep the storages alive, so that ids are not reused
        self.known = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in own)}

    def add(self, tensor: Tensor) -> Tensor:
        """Count a tensor, and return it."""
        storage = tensor.untyped_storage()
        self.bytes += storage.nbytes() * (id(storage) not in self.known)
        self.known[id(storage)] = storage
        return tensor

    def counting(self) -> AbstractContextManager:
        """Return a context in which all tensors that autograd saves are counted."""
        return saved_tensors_hooks(self.add, lambda tensor: tensor)
