# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""A few cases out of a product of options, with every pair of options in one of them."""

import itertools
from typing import Callable, Dict, List, Sequence


def full_product(options: Dict[str, Sequence], allowed: Callable[..., bool]) -> List[dict]:
    """Every allowed combination of `options`, as keyword arguments."""
    cases = [dict(zip(options, values)) for values in itertools.product(*options.values())]
    return [case for case in cases if allowed(**case)]


def all_pairs(options: Dict[str, Sequence], allowed: Callable[..., bool]) -> List[dict]:
    """A small subset of :func:`full_product` that holds every pair of options which that holds.

    Greedy and without randomness: the next case is the first of those that add most pairs.
    """
    candidates = {
        index: (case, set(itertools.combinations(case.items(), 2)))
        for index, case in enumerate(full_product(options, allowed))
    }
    missing = set().union(*(pairs for _, pairs in candidates.values()))
    chosen = []
    while missing:
        best = max(candidates, key=lambda index: len(candidates[index][1] & missing))
        case, pairs = candidates.pop(best)
        missing -= pairs
        chosen.append(case)
    return chosen
