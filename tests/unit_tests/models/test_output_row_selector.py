# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""`OutputRowSelector` on its own: which rows it takes, where it puts them, what it refuses."""

import os
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from megatron.core import parallel_state
from megatron.core.models.common.output_row_selector import (
    OutputRowSelector,
    OutputRowSelectorError,
)
from tests.unit_tests.harness.compare import assert_same_bits
from tests.unit_tests.harness.models import MASKS, device
from tests.unit_tests.harness.ranks import Layout, call_all, run_on_ranks
from tests.unit_tests.harness.record import RecordOps


class _OneRank:
    """A group of one, so that a selector needs no process group."""

    def size(self):
        return 1

    def rank(self):
        return 0


def _selector(mask, **kwargs):
    return OutputRowSelector(mask, tp_group=_OneRank(), **kwargs)


_masks = st.tuples(st.integers(1, 4), st.integers(1, 9)).flatmap(
    lambda shape: st.lists(
        st.booleans(), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]
    ).map(lambda entries: torch.tensor(entries).view(shape))
)


class TestSelectAndScatter:
    """Rows are those of boolean indexing, in its order."""

    @hypothesis.settings(max_examples=100, deadline=None, database=None)
    @hypothesis.given(mask=_masks, width=st.integers(0, 3))
    def test_round_trip(self, mask, width):
        """A row that lands in another token's place is a log-prob of the wrong token."""
        values = torch.arange(1.0, mask.numel() + 1).view(*mask.shape, *[1] * width)
        values = values.expand(*mask.shape, *[2] * width).requires_grad_()
        selector = _selector(mask)
        selected = selector.select(values)
        assert selector.num_rows == mask.sum()
        assert_same_bits("selected", selected, values[mask])
        back = selector.scatter(selected, fill_value=-1.0)
        expected = torch.full_like(values, -1.0)
        expected[mask] = values[mask]
        assert_same_bits("scattered", back, expected)
        # Through both, the gradient reaches a selected row once and another one never.
        back.sum().backward()
        assert_same_bits(
            "gradient", values.grad, mask.view(*mask.shape, *[1] * width).expand_as(values).float()
        )

    def test_gradient_of_scatter_with_fill_value(self):
        """The fill value is a constant, whatever the rows are."""
        mask = MASKS["random"](2, 7, 1)
        values = torch.randn(int(mask.sum()), 3, requires_grad=True)
        weights = torch.randn(2, 7, 3)
        (_selector(mask).scatter(values, fill_value=float("-inf")).exp() * weights).sum().backward()
        torch.testing.assert_close(values.grad, values.detach().exp() * weights[mask])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
    def test_dtype_is_kept(self, dtype):
        """Token ids are selected with the same selector as log-probs."""
        mask = MASKS["holes"](2, 20, 1)
        values = torch.arange(40).view(2, 20).to(dtype)
        selected = _selector(mask).select(values)
        assert_same_bits("selected", selected, values[mask])
        assert _selector(mask).scatter(selected).dtype is dtype

    def test_values_of_another_shape_are_refused(self):
        """`[s, b]` where `[b, s]` is due has the right number of elements and the wrong rows."""
        selector = _selector(MASKS["random"](2, 6, 1))
        with pytest.raises(OutputRowSelectorError, match=r"\(6, 2\)"):
            selector.select(torch.zeros(6, 2))
        with pytest.raises(OutputRowSelectorError, match="expected"):
            selector.scatter(torch.zeros(selector.num_rows + 1, 3))
        # A model's output as it comes: its leading dimension must not be taken for a row.
        with pytest.raises(OutputRowSelectorError, match=r"pass output\[0\]"):
            selector.scatter(torch.zeros(1, selector.num_rows, 3))


class TestMask:
    """What is accepted as a mask, and that a mask that is not says so."""

    @pytest.mark.parametrize(
        "dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    )
    def test_integers_0_and_1_are_a_mask(self, dtype):
        """As indices they would select rows 0 and 1 over and over."""
        mask = MASKS["random"](2, 6, 1)
        values = torch.randn(2, 6, 3)
        assert_same_bits("selected", _selector(mask.to(dtype)).select(values), values[mask])

    @pytest.mark.parametrize("bad", [2, -1])
    def test_other_integers_are_refused(self, bad):
        """Token indices or segment ids passed as a mask would select almost every row."""
        mask = torch.ones(2, 6, dtype=torch.int64)
        mask[1, 3] = bad
        with pytest.raises(OutputRowSelectorError, match="0 and 1") as raised:
            _selector(mask).build()
        assert raised.value.setting == "mask"

    @pytest.mark.parametrize(
        "mask, says",
        [
            (torch.ones(6, dtype=torch.bool), r"\[6\]"),
            (torch.ones(1, 2, 6, dtype=torch.bool), r"\[1, 2, 6\]"),
            (torch.ones(0, 6, dtype=torch.bool), r"\[0, 6\]"),
            (torch.ones(2, 6), "float32"),
            ([[True, False]], "list"),
        ],
        ids=["1-d", "3-d", "no tokens", "float", "list"],
    )
    def test_what_is_no_mask_is_refused(self, mask, says):
        """The message says what was given; an error deep in indexing would not."""
        with pytest.raises(OutputRowSelectorError, match=says) as raised:
            _selector(mask)
        assert raised.value.setting == "mask"
        assert isinstance(raised.value, ValueError)


def _check_compact(cases):
    tp_group = parallel_state.get_tensor_model_parallel_group()
    tp_size, tp_rank = tp_group.size(), tp_group.rank()

    def check(case):
        mask, sequence_parallel = case
        batch_size, seq_length = mask.shape
        # Every row says which token it is, in each of three columns.
        whole = torch.arange(1.0, mask.numel() + 1).view(batch_size, seq_length, 1)
        whole = whole.expand(-1, -1, 3).to(device())
        shards = tp_size if sequence_parallel else 1
        # [b s h] => [s b h] => [s/tp b h]
        hidden_states = whole.transpose(0, 1).chunk(shards)[tp_rank % shards]
        hidden_states = hidden_states.contiguous().requires_grad_()
        selector = OutputRowSelector(mask, tp_group=tp_group, sequence_parallel=sequence_parallel)
        rows = selector.compact(hidden_states)
        (rows * 2).sum().backward()
        parts = [torch.empty_like(rows) for _ in range(tp_size)]
        torch.distributed.all_gather(parts, rows.detach().contiguous(), group=tp_group)

        expected = whole[mask]
        if mask.all():
            # The plain path is the cheaper one then.
            assert rows is hidden_states
        else:
            per_rank = max(-(-len(expected) // shards), 1)
            assert rows.shape == (per_rank, 1, 3)
            padded = torch.nn.functional.pad(expected, (0, 0, 0, per_rank * shards - len(expected)))
            gathered = torch.cat(parts[:shards]).squeeze(1)
            assert_same_bits("rows over all ranks", gathered, padded)
        selected_here = mask.transpose(0, 1).chunk(shards)[tp_rank % shards]
        expected_gradient = selected_here[..., None].expand_as(hidden_states) * 2.0
        assert_same_bits("gradient", hidden_states.grad, expected_gradient.to(device()))

    call_all(cases, check)


class TestCompact:
    """The output layer's input: the rows in order, spread evenly where the sequence is sharded."""

    @pytest.mark.parametrize("tp_size", [1, 2, 4])
    def test_rows_and_gradient(self, tp_size):
        """An ordinary input of the layer, of which every rank has a part of the same size.

        Of N rows that do not divide by the ranks the last parts are padded; a rank may have no
        row to send and another none to receive.
        """
        generator = torch.Generator().manual_seed(17)
        cases = []
        for batch_size in (1, 2, 3):
            for seq_length in (4, 20):
                masks = [build(batch_size, seq_length, tp_size) for build in MASKS.values()]
                for _ in range(10):
                    density = torch.rand((), generator=generator)
                    masks.append(torch.rand(batch_size, seq_length, generator=generator) < density)
                cases += [(mask, parallel) for mask in masks for parallel in (False, True)]
        run_on_ranks(Layout(tp=tp_size), _check_compact, cases)

    def test_another_shape_is_refused(self):
        """A mask over the whole sequence and hidden states of a shard, or b and s swapped."""
        selector = _selector(MASKS["random"](2, 6, 1))
        for shape in ((2, 6, 3), (3, 2, 3), (6, 3, 3)):
            with pytest.raises(OutputRowSelectorError, match="needs hidden states"):
                selector.compact(torch.zeros(shape))


class TestIndexWork:
    """It is done once, and waits for the device at most once."""

    def test_once_for_all_users(self):
        """Several forward passes of a micro-batch share a selector to share this."""
        selector = _selector(MASKS["random"](2, 6, 1))
        with RecordOps() as record:
            for _ in range(3):
                selector.select(torch.zeros(2, 6))
                selector.compact(torch.zeros(6, 2, 4))
                selector.scatter(torch.zeros(selector.num_rows))
        assert record.counts["nonzero"] == 1


def _check_debug_mode():
    tp_group = parallel_state.get_tensor_model_parallel_group()
    same = MASKS["alternating"](2, 8, 1)
    # As many rows on every rank, so that without a check nothing but the values is wrong.
    differs = same.roll(tp_group.rank() % 2, dims=1)
    for sequence_parallel in (False, True):
        settings = dict(tp_group=tp_group, sequence_parallel=sequence_parallel)
        with mock.patch.dict(os.environ, MCORE_SELECTIVE_DEBUG="1"):
            OutputRowSelector(same, **settings).build()
            with pytest.raises(OutputRowSelectorError, match="differs between") as raised:
                OutputRowSelector(differs, **settings).build()
        assert raised.value.setting == "mask"
        OutputRowSelector(differs, **settings).build()


def test_debug_mode_finds_masks_that_differ():
    """Every rank raises, also the one whose mask would have been the right one."""
    run_on_ranks(Layout(tp=2), _check_debug_mode)


def _check_split_over_ranks():
    tp_group = parallel_state.get_tensor_model_parallel_group()
    mask = torch.ones(2, 7, dtype=torch.bool)
    OutputRowSelector(mask, tp_group=tp_group)
    with pytest.raises(OutputRowSelectorError, match="can't be split"):
        OutputRowSelector(mask, tp_group=tp_group, sequence_parallel=True)


def test_sequence_that_ranks_cannot_share_is_refused():
    """Seven tokens have no two equal shards."""
    run_on_ranks(Layout(tp=2), _check_split_over_ranks)
