# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Comparison of tensors against an error budget, with the worst element in the message."""

from typing import Dict, Optional

import torch
from torch import Tensor


def assert_close(
    name: str,
    actual: Tensor,
    reference: Tensor,
    *,
    eps: float,
    peer: Optional[Tensor] = None,
    atol: float = 0.0,
) -> None:
    """Asserts that no element's error is above its budget.

    The budget is `eps` times the largest absolute value of `reference`, and `atol`. With `peer`,
    a computation of the same thing in the dtype of `actual` by the path that is trusted, three
    times the largest error of that is added: a result may be as wrong as its dtype makes it, and
    no more.

    Args:
        name (str): What is compared, for the message.
        actual (Tensor): The result under test.
        reference (Tensor): The truth, in a wider dtype where there is one.
        eps (float): Part of the budget that the test states, relative to the largest value.
        peer (Tensor, optional): See above.
        atol (float): Part of the budget for what cancels: a result may be much smaller than the
            logits that it is a difference of.
    """
    assert actual.shape == reference.shape, f"{name}: {actual.shape} is not {reference.shape}"
    if not actual.numel():
        return
    truth = reference.detach().double()
    error = (actual.detach().double() - truth).abs()
    budget = eps * truth.abs().max().item() + atol
    if peer is not None:
        budget += 3 * (peer.detach().double() - truth).abs().max().item()
    # Not `error > budget`, which NaN passes.
    if not bool((error <= budget).all()):
        worst = error.nan_to_num(nan=torch.inf).argmax()
        index = tuple(i.item() for i in torch.unravel_index(worst, error.shape))
        raise AssertionError(
            f"{name}: {(~(error <= budget)).sum().item()} of {error.numel()} elements are off by "
            f"more than {budget:.3g}; the worst is {list(index)}, "
            f"{actual.detach()[index].item():.9g} where {truth[index].item():.9g} is right"
        )


def assert_same_bits(name: str, actual: Tensor, expected: Tensor) -> None:
    """Asserts equal dtype, shape and bits, those of NaN included."""
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype} is not {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: {actual.shape} is not {expected.shape}"
    differs = _bits(actual) != _bits(expected)
    if differs.any():
        index = tuple(i.item() for i in differs.nonzero()[0])
        raise AssertionError(
            f"{name}: {differs.sum().item()} of {differs.numel()} elements differ; the first is "
            f"{list(index)}, {actual.detach()[index].item():.9g} where "
            f"{expected.detach()[index].item():.9g} was expected"
        )


def assert_same_gradients(
    actual: Dict[str, Tensor], expected: Dict[str, Tensor], ignore_sign_of_zero: bool = False
) -> None:
    """Asserts equal bits of gradients by parameter name."""
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        if ignore_sign_of_zero:
            assert torch.equal(gradient, expected[name]), f"gradient of {name} differs"
        else:
            assert_same_bits(f"gradient of {name}", gradient, expected[name])


def _bits(tensor: Tensor) -> Tensor:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().view(integer)
