# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""`linear_log_prob` over a sharded vocabulary: against the unsharded reference, and what is sent.

A case is a number; a failure says which, with the line that runs it alone.
"""

from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.fusions.linear_log_prob import linear_log_prob
from tests.unit_tests.fusions.parity import assert_right
from tests.unit_tests.fusions.problems import IMPLS, Problem, call, draw_options, draw_problem
from tests.unit_tests.harness.compare import assert_same_bits
from tests.unit_tests.harness.models import device
from tests.unit_tests.harness.ranks import Layout, call_all, run_on_ranks
from tests.unit_tests.harness.record import Collective, RecordOps

_SIZES = pytest.mark.parametrize(
    "tp_size, sequence_parallel",
    [(2, False), (2, True), (4, False), (4, True)],
    ids=["tp2", "tp2sp", "tp4", "tp4sp"],
)
_NUM_SEEDS = {"torch": 40, "triton": 4}
_NUM_SEEDS_AT_LENGTH = {"torch": 300, "triton": 25}


@dataclass(frozen=True)
class _Case:
    """A call drawn from one seed."""

    seed: int
    impl: str
    tp_size: int
    sequence_parallel: bool

    def __str__(self) -> str:
        return (
            f"run_on_ranks(Layout(tp={self.tp_size}), _check_seeds, {self.impl!r}, "
            f"{self.sequence_parallel}, [{self.seed}]) {draw_options(self.seed)}"
        )


def _check_seeds(impl, sequence_parallel, seeds):
    group = parallel_state.get_tensor_model_parallel_group()

    def check(case):
        problem = draw_problem(case.seed, case.tp_size)
        with RecordOps() as record:
            outcome = call(problem, impl, sequence_parallel)
        results = [outcome.log_prob, outcome.entropy]
        of_ranks = [_gather(result, group) for result in results if result is not None]

        assert record.collectives == _expected(problem, sequence_parallel)
        for parts in of_ranks:
            for rank, part in enumerate(parts):
                assert_same_bits(f"results of rank {rank}", part, parts[0])
        assert_right(problem, outcome, group.rank(), sequence_parallel)

    call_all([_Case(seed, impl, group.size(), sequence_parallel) for seed in seeds], check)


def _gather(tensor: Tensor, group) -> list:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    torch.distributed.all_gather(parts, tensor.detach(), group=group)
    return parts


def _expected(problem: Problem, sequence_parallel: bool) -> list:
    """What is sent, in order."""
    of_hidden = problem.hidden.numel(), problem.hidden.dtype
    fields = 7 if problem.keep else 4 if problem.options["entropy"] else 3
    statistics = len(problem.shards) * fields * problem.num_rows
    collectives = [Collective("allgather_base", statistics, torch.float32)]
    trains_hidden = "hidden" not in problem.options["frozen"]
    if sequence_parallel:
        gather = Collective("allgather_base", *of_hidden)
        collectives = [gather, *collectives, gather]
        if trains_hidden:
            collectives.append(Collective("reduce_scatter_base", *of_hidden))
    elif trains_hidden:
        collectives.append(Collective("allreduce", *of_hidden))
    return collectives


def _check_no_rows(impl, sequence_parallel):
    hidden = torch.empty(0, 24, device=device(), requires_grad=True)
    weight = torch.randn(37, 24, device=device(), requires_grad=True)
    targets = torch.zeros(0, dtype=torch.int64, device=device())
    with RecordOps() as record:
        log_prob, entropy = linear_log_prob(
            hidden, weight, targets, entropy=True, impl=impl, sequence_parallel=sequence_parallel
        )
        (log_prob.sum() + entropy.sum()).backward()
    assert not record.collectives
    assert hidden.grad.shape == hidden.shape
    assert not weight.grad.any()


def _check_forward_only(sequence_parallel):
    """Without gradients nothing but the statistics is sent."""
    problem = draw_problem(3, 2)
    rank = parallel_state.get_tensor_model_parallel_rank()
    hidden = problem.hidden.chunk(2)[rank] if sequence_parallel else problem.hidden
    start, end = problem.bounds(rank)
    with torch.no_grad(), RecordOps() as record:
        linear_log_prob(
            hidden,
            problem.weight[start:end],
            problem.rows.targets,
            sequence_parallel=sequence_parallel,
        )
    assert len(record.collectives) == 1 + sequence_parallel


def _check_group(explicit):
    """Ranks 0 and 1 share one vocabulary, 2 and 3 another one."""
    rank = torch.distributed.get_rank()
    # Each pair has a problem of its own.
    problem = draw_problem(20 + rank // 2, 2, uneven=False, frozen=(), strides="none")
    if not explicit:
        outcome = call(problem, "torch")
    else:
        group = parallel_state.get_tensor_model_parallel_group()
        wanted = mock.patch.object(
            parallel_state, "get_tensor_model_parallel_group", side_effect=AssertionError
        )
        start, end = problem.bounds(group.rank())
        with wanted:
            log_prob, _ = linear_log_prob(
                problem.hidden,
                problem.weight[start:end],
                problem.rows.targets,
                tp_group=group,
                bias=None if problem.bias is None else problem.bias[start:end],
                **problem.arguments(),
            )
        outcome = call(problem, "torch")
        assert_same_bits("log_prob of the group", log_prob, outcome.log_prob)
    assert_right(problem, outcome, parallel_state.get_tensor_model_parallel_rank())


class TestParity:
    """Values, all gradients, equal bits on all ranks, and the list of collectives, in one."""

    @_SIZES
    @pytest.mark.parametrize("impl", IMPLS)
    def test_random_calls(self, impl, tp_size, sequence_parallel):
        """All options at random, a rank without columns of the vocabulary among them."""
        seeds = list(range(_NUM_SEEDS[impl]))
        run_on_ranks(Layout(tp=tp_size), _check_seeds, impl, sequence_parallel, seeds)

    @pytest.mark.full
    @_SIZES
    @pytest.mark.parametrize("impl", IMPLS)
    def test_random_calls_at_length(self, impl, tp_size, sequence_parallel):
        """More of them."""
        seeds = list(range(1000, 1000 + _NUM_SEEDS_AT_LENGTH[impl]))
        run_on_ranks(
            Layout(tp=tp_size), _check_seeds, impl, sequence_parallel, seeds, time_limit=300
        )

    @pytest.mark.parametrize("explicit", [False, True])
    def test_uses_its_group(self, explicit):
        """Beside data parallelism; the group that is given, and parallel_state is not asked."""
        run_on_ranks(Layout(tp=2, dp=2), _check_group, explicit)


class TestCollectives:
    """What is not sent."""

    @pytest.mark.parametrize("impl", IMPLS)
    @pytest.mark.parametrize("sequence_parallel", [False, True])
    def test_none_without_rows(self, impl, sequence_parallel):
        """Forward and backward of no rows."""
        run_on_ranks(Layout(tp=2), _check_no_rows, impl, sequence_parallel)

    @pytest.mark.parametrize("sequence_parallel", [False, True])
    def test_forward_only(self, sequence_parallel):
        """One all-gather of statistics, beside that of hidden states."""
        run_on_ranks(Layout(tp=2), _check_forward_only, sequence_parallel)
