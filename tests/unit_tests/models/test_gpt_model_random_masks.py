# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Random masks through the whole model: what nobody thought of listing in `MASKS`.

A case is a number; a failure says which, with the line that runs it alone.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.models.common.output_row_selector import OutputRowSelector
from tests.unit_tests.harness.compare import assert_close
from tests.unit_tests.harness.models import (
    device,
    gradients,
    make_batch,
    make_config,
    make_gpt_model,
    weights_of_loss,
)
from tests.unit_tests.harness.ranks import Layout, call_all, run_on_ranks

_PARALLEL_SIZES = pytest.mark.parametrize(
    "tp_size, sequence_parallel",
    [(1, False), (2, False), (2, True), (4, True)],
    ids=["tp1", "tp2", "tp2sp", "tp4sp"],
)


@dataclass(frozen=True)
class _Case:
    """A mask, how it is passed, and a loss, all drawn from one seed."""

    seed: int
    tp_size: int
    sequence_parallel: bool

    def __str__(self) -> str:
        return (
            f"run_on_ranks(Layout(tp={self.tp_size}), _check_seeds, "
            f"{self.sequence_parallel}, [{self.seed}])"
        )

    def draw(self):
        """The mask, what is passed for it, and whether the loss reads a transposed output."""
        generator = torch.Generator().manual_seed(self.seed)

        def integer(low, high):
            return int(torch.randint(low, high + 1, (), generator=generator))

        batch_size = integer(1, 3)
        # Down to a shard of one token.
        shard = integer(1, 6)
        seq_length = shard * self.tp_size
        kind = integer(0, 3)
        # How likely a row is selected: everywhere, by sequence, by shard of the sequence, by token
        # in turns as of a conversation.
        shape = [(1, 1, 1), (batch_size, 1, 1), (1, self.tp_size, 1), (batch_size, 1, 1)][kind]
        likely = torch.rand(shape, generator=generator)
        # Often all or nothing.
        likely = (likely * 2 - 0.5).clamp(0, 1)
        drawn = torch.rand(batch_size, self.tp_size, shard, generator=generator)
        mask = (drawn < likely).view(batch_size, seq_length)
        if kind == 3:
            turns = torch.rand(batch_size, seq_length, generator=generator) < 0.3
            mask = turns.cumsum(1) % 2 == 1
        passed = [mask, mask.long(), mask.t().contiguous().t(), None][integer(0, 3)]
        return mask, passed, bool(integer(0, 1))


def _check_seeds(sequence_parallel, seeds):
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    models = [
        make_gpt_model(
            make_config(sequence_parallel=sequence_parallel),
            share_embeddings_and_output_weights=tied,
        )
        for tied in (False, True)
    ]

    def check(case):
        mask, passed, transposed = case.draw()
        model = models[case.seed % 2]
        if passed is None:
            passed = OutputRowSelector(mask, sequence_parallel=sequence_parallel)
        batch = make_batch(*mask.shape, seed=case.seed)
        selected = model(**batch, output_row_selector=passed)
        found = _gradients(model, selected.squeeze(0), mask, transposed)
        expected = model(**batch)[mask.to(device())]
        due = _gradients(model, expected, mask, transposed)
        assert selected.dim() == 3
        assert_close("logits", selected.squeeze(0), expected, eps=2e-6)
        for name, gradient in found.items():
            assert_close(name, gradient, due[name], eps=2e-6)

    call_all([_Case(seed, tp_size, sequence_parallel) for seed in seeds], check)


def _gradients(model, rows: Tensor, mask: Tensor, transposed: bool):
    weights = weights_of_loss((*mask.shape, rows.size(-1)))[mask]
    if transposed:
        # The gradient that the head gets is then not contiguous.
        rows, weights = rows.t(), weights.t().contiguous()
    (rows * weights).sum().backward()
    return gradients(model)


class TestRandomMasks:
    """Rows and every parameter's gradient, against the full output."""

    @_PARALLEL_SIZES
    def test_equals_full_path(self, tp_size, sequence_parallel):
        """Sequences and shards with all rows, no row, or turns of unlike lengths."""
        seeds = list(range(30 if tp_size < 4 else 20))
        run_on_ranks(Layout(tp=tp_size), _check_seeds, sequence_parallel, seeds)

    @pytest.mark.full
    @_PARALLEL_SIZES
    def test_equals_full_path_at_length(self, tp_size, sequence_parallel):
        """More of them."""
        seeds = list(range(100, 500))
        run_on_ranks(Layout(tp=tp_size), _check_seeds, sequence_parallel, seeds, time_limit=300)
