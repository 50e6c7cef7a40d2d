# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The gradients of a call while they are added up, block by block and slice by slice."""

from typing import Optional

import torch
from torch import Tensor

from megatron.core.fusions.linear_log_prob.backend import Logits, Normalizers, RowBackend, Rows
from megatron.core.fusions.linear_log_prob.matrix_products import multiply
from megatron.core.fusions.linear_log_prob.weight_gradient import WeightGradient


class BackwardPass:
    """Takes projected logits, turns them into their gradient, and multiplies that into the others.

    Args:
        backend (RowBackend): Does the work on rows of logits.
        how (Logits): How logits are made of the projection.
        hidden (Tensor): `[N, h]`, with sequence parallelism all ranks' rows.
        weight (Tensor): `[v / tp, h]`, as it is multiplied.
        bias (Tensor, optional): `[v / tp]`.
        rows (Rows): All N.
        normalizers (Normalizers): Of all rows.
        kept_logits (Tensor, optional): As the backend made them in forward.
        grad_log_prob (Tensor, optional): `[N]`.
        grad_entropy (Tensor, optional): `[N]`.
        weight_gradient (WeightGradient, optional): None where the weight is frozen.
        needs_hidden (bool): Whether the gradient of hidden states is wanted.
        needs_bias (bool): Whether that of the bias is.

    Attributes:
        grad_hidden (Tensor, optional): `[N, h]`, complete once every row has been used.
        grad_bias (Tensor, optional): `[v / tp]` fp32.
    """

    def __init__(
        self,
        *,
        backend: RowBackend,
        how: Logits,
        hidden: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],
        rows: Rows,
        normalizers: Normalizers,
        kept_logits: Optional[Tensor],
        grad_log_prob: Optional[Tensor],
        grad_entropy: Optional[Tensor],
        weight_gradient: Optional[WeightGradient],
        needs_hidden: bool,
        needs_bias: bool,
    ):
        self._backend = backend
        self._how = how
        self._hidden = hidden
        self._weight = weight
        self._bias = bias
        self._rows = rows
        self._normalizers = normalizers
        self._kept_logits = kept_logits
        self._grad_log_prob = _as_rows(grad_log_prob)
        self._grad_entropy = _as_rows(grad_entropy)
        self._weight_gradient = weight_gradient
        self.grad_hidden = self.grad_bias = None
        if needs_hidden:
            self.grad_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        if needs_bias:
            self.grad_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)

    def project(self, logits: Tensor, start: int, end: int, first: int, last: int) -> None:
        """Projects rows `start` to `end` to columns `first` to `last` again."""
        multiply(self._hidden[start:end], self._weight[first:last].t(), logits)

    def grad_logits(self, logits: Tensor, start: int, end: int, first: int, last: int) -> Tensor:
        """Turns projected logits of these rows and columns into their gradient, in place."""
        gradient = self._backend.grad_logits(
            logits,
            None if self._bias is None else self._bias[first:last],
            self._rows.part(start, end),
            self._how.part(first, last),
            self._normalizers.part(start, end),
            None if self._grad_log_prob is None else self._grad_log_prob[start:end],
            None if self._grad_entropy is None else self._grad_entropy[start:end],
            self._kept_logits,
            self._hidden.dtype,
        )
        if self.grad_bias is not None:
            self.grad_bias[first:last] += gradient.sum(0, dtype=torch.float32)
        return gradient

    @property
    def num_columns(self) -> int:
        """Columns v / tp."""
        return self._weight.size(0)

    @property
    def device(self) -> torch.device:
        """Where all of it happens."""
        return self._weight.device

    def new_hidden_total(self, num_rows: int) -> Optional[Tensor]:
        """Memory in which the gradient of a block's hidden states is added up over slices."""
        if self.grad_hidden is None:
            return None
        shape = (num_rows, self._hidden.size(1))
        return torch.empty(shape, dtype=torch.float32, device=self._hidden.device)

    def multiply_into_hidden(
        self, gradient: Tensor, out: Optional[Tensor], first: int, last: int, add: bool = False
    ) -> None:
        """Writes or adds the product with columns `first` to `last` of the weight."""
        if out is not None:
            multiply(gradient, self._weight[first:last], out, add=add)

    def add_to_weight(self, gradient: Tensor, start: int, end: int, first: int, last: int) -> None:
        """Adds the product with these rows' hidden states to these columns' gradient."""
        if self._weight_gradient is not None:
            self._weight_gradient.add(gradient, self._hidden[start:end], first, last)


def _as_rows(gradient: Optional[Tensor]) -> Optional[Tensor]:
    """An incoming gradient as the kernels read it: it may be expanded, or strided."""
    return None if gradient is None else gradient.float().contiguous()
