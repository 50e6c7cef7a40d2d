# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The all-reduce of the tensor-parallel regions, given a tensor that is not contiguous.

Upstream's `_reduce` reduces a contiguous copy then and returns the tensor itself, unreduced: the
gradients of all but this rank's part of the vocabulary are missing, without an error.
"""

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from tests.unit_tests.harness.compare import assert_same_bits
from tests.unit_tests.harness.models import device
from tests.unit_tests.harness.ranks import Layout, call_all, run_on_ranks

_ROWS, _COLUMNS = 6, 5

# `[rows, columns]` of contiguous memory as tensors of the same values and other strides.
_STRIDED = {
    "transposed": lambda values: values.t().contiguous().t(),
    "part of wider rows": lambda values: torch.nn.functional.pad(values, (0, 3))[:, :_COLUMNS],
    "expanded": lambda values: values[:1].expand(_ROWS, -1),
}

# Functions of a tensor whose gradient, that of their sum, arrives with such strides.
_OPERATIONS_OF_STRIDED_GRADIENT = {
    "transposed": lambda values, weights: values.t() * weights.t().contiguous(),
    "part of wider rows": lambda values, weights: (
        torch.cat((values, values[:, :3].detach()), dim=1)
        * torch.nn.functional.pad(weights, (0, 3))
    ),
    "expanded": lambda values, weights: values.sum(0) * weights[0],
}


def _values_of_rank(rank: int) -> torch.Tensor:
    """Whole numbers, whose sum over the ranks is exact in any order."""
    values = torch.arange(1.0, 1.0 + _ROWS * _COLUMNS, device=device())
    return values.view(_ROWS, _COLUMNS) * 10**rank


def _sum_over_ranks() -> torch.Tensor:
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    return sum(_values_of_rank(rank) for rank in range(tp_size))


def _check_forward():
    values = _values_of_rank(parallel_state.get_tensor_model_parallel_rank())

    def check(strides):
        strided = _STRIDED[strides](values)
        assert not strided.is_contiguous()
        before = strided.clone()
        reduced = reduce_from_tensor_model_parallel_region(strided)
        assert_same_bits("sum", reduced, _STRIDED[strides](_sum_over_ranks()))
        assert_same_bits("input afterwards", strided, before)

    call_all(list(_STRIDED), check)


def _check_backward():
    values = torch.zeros(_ROWS, _COLUMNS, device=device(), requires_grad=True)
    weights = _values_of_rank(parallel_state.get_tensor_model_parallel_rank())

    def check(strides):
        contiguous = []
        copied = copy_to_tensor_model_parallel_region(values)
        copied.register_hook(lambda gradient: contiguous.append(gradient.is_contiguous()))
        output = _OPERATIONS_OF_STRIDED_GRADIENT[strides](copied, weights)
        (gradient,) = torch.autograd.grad(output.sum(), values)
        # Else the test would be about a gradient that autograd has laid out anew.
        assert contiguous == [False]
        expected = _sum_over_ranks()
        if strides == "expanded":
            expected = _STRIDED[strides](expected)
        assert_same_bits("gradient", gradient, expected)

    call_all(list(_OPERATIONS_OF_STRIDED_GRADIENT), check)


def _check_contiguous_is_not_copied():
    values = _values_of_rank(parallel_state.get_tensor_model_parallel_rank())
    reduced = reduce_from_tensor_model_parallel_region(values)
    assert_same_bits("sum", reduced, _sum_over_ranks())
    assert reduced.data_ptr() == values.data_ptr()


_TP_SIZES = pytest.mark.parametrize("tp_size", [2, 4])


class TestReduceOfNonContiguousInput:
    """Every rank has the sum, whatever the strides of its part."""

    @_TP_SIZES
    def test_forward_of_reduce(self, tp_size):
        """The forward returned this rank's part alone. What the caller passed stays as it is."""
        run_on_ranks(Layout(tp=tp_size), _check_forward)

    @_TP_SIZES
    def test_backward_of_copy(self, tp_size):
        """A loss that transposes, slices or sums logits sends such a gradient to the head."""
        run_on_ranks(Layout(tp=tp_size), _check_backward)

    @_TP_SIZES
    def test_contiguous_input_is_reduced_in_place(self, tp_size):
        """The fix must cost the ordinary case, every row-parallel layer's output, no copy."""
        run_on_ranks(Layout(tp=tp_size), _check_contiguous_is_not_copied)
