# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Records what a piece of code does, where the dispatcher sees it."""

from collections import Counter
from dataclasses import dataclass
from typing import List

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Collective:
    """One call of a collective on this rank."""

    name: str
    # The larger of what the rank puts in and what it gets out.
    elements: int
    dtype: torch.dtype


class RecordOps(TorchDispatchMode):
    """Counts operators, and lists collectives with their sizes, in forward and backward.

    Below Python's functions, so that a collective counts whatever name it was imported under.
    """

    def __init__(self):
        super().__init__()
        self.counts: Counter = Counter()
        self.collectives: List[Collective] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] += 1
        if func.namespace == "c10d":
            # Outputs and inputs come first, each a tensor or nested lists of tensors.
            sides = [[x for x in tree_leaves(arg) if isinstance(x, torch.Tensor)] for arg in args]
            sides = [side for side in sides[:2] if side]
            elements = max(sum(tensor.numel() for tensor in side) for side in sides)
            self.collectives.append(Collective(name.strip("_"), elements, sides[0][0].dtype))
        return func(*args, **(kwargs or {}))
