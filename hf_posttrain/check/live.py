"""Bytes of tensors that are alive, from one operation to the next: real tensors, and those that are shapes alone."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of these tensors, each counted once however many of them share it."""
    return sum({id(storage): storage.nbytes() for storage in [t.untyped_storage() for t in tensors]}.values())


class Live(TorchDispatchMode):
    """While it is entered, the bytes of all tensors that operations have made and that still exist, and their peak.

    A tensor counts from the operation that returns it until the last view of it is gone, wherever that is: in a
    variable, in autograd's graph or in a cache. What a kernel takes and gives back within itself is not seen.
    """

    def __init__(self, known: Iterable[Tensor] = ()):
        """known: tensors that are counted elsewhere, such as weights."""
        super().__init__()
        self.now = self.peak = 0
        self._kept = [tensor.untyped_storage() for tensor in known]  # alive, so that no new one takes its place
        self._seen: dict[int, Any] = {id(storage): None for storage in self._kept}

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.index.Tensor:
            args = args[0], _by_number(args[1])
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._seen:
            return
        size = storage.nbytes()
        self._seen[key] = weakref.ref(storage, lambda _: self._forget(key, size))
        self.now += size
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int, size: int) -> None:
        self.now -= size
        del self._seen[key]


def _by_number(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Indices with a lone mask as numbers: what it picks of a tensor that is a shape is then a shape as well."""
    [*one] = indices
    if len(one) == 1 and one[0] is not None and one[0].dtype == torch.bool and one[0].dim() == 1:
        return [one[0].nonzero()[:, 0]]
    return one
