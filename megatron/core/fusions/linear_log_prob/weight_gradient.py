# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Where the gradient of the output weight goes, by the rules of Megatron's linear layers."""

from typing import Dict, Optional, Tuple

import torch
from torch import Tensor

from megatron.core.fusions.linear_log_prob.matrix_products import multiply


def accumulates_in_main_grad(weight: Tensor, wgrad: str) -> bool:
    """Whether the gradient is added to `weight.main_grad`.

    Args:
        weight (Tensor): The output weight.
        wgrad (str): `"auto"`, `"main_grad"` or `"grad"`.

    Raises:
        ValueError: `"main_grad"` was asked for and isn't there or doesn't fit.
    """
    if wgrad == "grad" or not weight.requires_grad:
        return False
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        if wgrad == "main_grad":
            raise ValueError(
                "wgrad: got 'main_grad', but weight has no main_grad; wrap the model for data "
                "parallelism first, or pass wgrad='grad'."
            )
        return False
    if main_grad.shape != weight.shape or main_grad.device != weight.device:
        raise ValueError(
            f"weight.main_grad: got {list(main_grad.shape)} on {main_grad.device}, expected "
            f"{list(weight.shape)} on {weight.device}."
        )
    if main_grad.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"weight.main_grad: got {main_grad.dtype}, expected fp32, bf16 or fp16.")
    return True


class WeightGradient:
    """Adds up the gradient of a weight over blocks of rows.

    The sum is in fp32: `main_grad` itself where that is fp32, else a sum that is added to it or
    returned at the end, in one rounding.

    Args:
        weight (Tensor): `[v / tp, h]`, the parameter.
        main_grad (Tensor, optional): Where the gradient is added; None returns it.
        num_blocks (int): Number of blocks of rows.
        dtype (torch.dtype): Of the products' operands.
    """

    def __init__(
        self, weight: Tensor, main_grad: Optional[Tensor], num_blocks: int, dtype: torch.dtype
    ):
        self._weight = weight
        self._main_grad = main_grad
        # One product that is returned needs no sum: it is rounded once in any case.
        self._adds = main_grad is not None or num_blocks != 1
        if main_grad is not None and main_grad.dtype is torch.float32:
            self._total = main_grad
        elif self._adds:
            self._total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        else:
            self._total = torch.empty(weight.shape, dtype=dtype, device=weight.device)

    def add(self, grad_output: Tensor, hidden: Tensor, start: int, end: int) -> None:
        """Adds `grad_output.T @ hidden` to a range of the weight's rows.

        Args:
            grad_output (Tensor): `[n, end - start]`.
            hidden (Tensor): `[n, h]`.
            start, end (int): The range, which every block covers once.
        """
        multiply(grad_output.t(), hidden, self._total[start:end], add=self._adds)

    def finish(self) -> Optional[Tensor]:
        """Puts the sum where it belongs and returns the gradient that autograd is given."""
        if self._main_grad is None:
            return self._total.to(self._weight.dtype)
        if self._total is not self._main_grad:
            self._main_grad.add_(self._total)
        return _announce(self._weight, self._main_grad)


def _announce(weight: Tensor, main_grad: Tensor) -> Optional[Tensor]:
    """Tells data parallelism that the gradient is in `main_grad`; returns its stand-in."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    # As in LinearWithGradAccumulationAndAsyncCommunication: autograd is given a gradient that
    # nobody reads, so that backward hooks run on the main backprop thread.
    if getattr(weight, "zero_out_wgrad", False):
        # This one is read: the embedding's gradient of a tied weight is added to it, in place,
        # so it can't be shared.
        return torch.zeros(main_grad.shape, dtype=weight.dtype, device=weight.device)
    key = (tuple(main_grad.shape), weight.dtype, weight.device)
    if key not in _unread_gradients:
        _unread_gradients[key] = torch.empty(
            main_grad.shape, dtype=weight.dtype, device=weight.device
        )
    # A tensor of its own, or autograd would clone the memory that it finds shared.
    return _unread_gradients[key].detach()


# One per shape and device for the whole process; every micro-batch reuses it.
_unread_gradients: Dict[Tuple, Tensor] = {}
