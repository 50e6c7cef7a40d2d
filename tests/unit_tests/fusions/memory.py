# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Watches the memory that operators take, where the dispatcher sees it."""

from typing import Dict, List, Set

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NewMemory(TorchDispatchMode):
    """Lists tensors in memory that no argument of their operator was in, and holds none of them."""

    def __init__(self):
        super().__init__()
        self.shapes: List[tuple] = []
        # Bytes of each mask.
        self.masks: List[int] = []
        self._storages: List[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        old = _storages((args, kwargs))
        for where, tensor in _storages(result).items():
            if where not in old:
                storage = tensor.untyped_storage()
                self.shapes.append(tuple(tensor.shape))
                self._storages.append((StorageWeakRef(storage), storage.nbytes()))
                if tensor.dtype is torch.bool:
                    self.masks.append(storage.nbytes())
        return result

    def alive(self, but: List[Tensor]) -> int:
        """Bytes that something still holds, other than these tensors."""
        known = _known(but)
        alive = {ref.cdata: size for ref, size in self._storages if not ref.expired()}
        return sum(size for where, size in alive.items() if where not in known)


def _storages(tree) -> Dict[int, Tensor]:
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return {tensor.untyped_storage()._cdata: tensor for tensor in tensors}


def _known(tensors: List[Tensor]) -> Set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}
