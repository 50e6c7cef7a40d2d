# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""`linear_log_prob` on one rank: values and all gradients of random calls, against fp64.

A case is a number; a failure says which, with the line that runs it alone. The sharded ones are
in `test_linear_log_prob_parallel.py`.
"""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from megatron.core.fusions.linear_log_prob import KeepSet, linear_log_prob
from tests.unit_tests.fusions.parity import assert_right
from tests.unit_tests.fusions.problems import IMPLS, OPTIONS, call, draw_options, draw_problem
from tests.unit_tests.harness.models import device
from tests.unit_tests.harness.ranks import Layout, call_all, run_on_ranks

# Triton's interpreter takes 0.2 s a call.
_SEEDS = {"torch": range(300), "triton": range(1000, 1050)}
_SEEDS_AT_LENGTH = {"torch": range(2000, 5000), "triton": range(5000, 5300)}


@dataclass(frozen=True)
class _Case:
    """A call drawn from one seed."""

    seed: int
    impl: str

    def __str__(self) -> str:
        options = draw_options(self.seed)
        return f"run_on_ranks(Layout(), _check_seeds, {self.impl!r}, [{self.seed}]) {options}"


def _check_seeds(impl, seeds):
    def check(case):
        problem = draw_problem(case.seed)
        assert_right(problem, call(problem, case.impl))

    call_all([_Case(seed, impl) for seed in seeds], check)


def _check_work(impl):
    """Chunks, blocks and slices come about on purpose, and are right."""
    for shape, work, expected in (
        ("medium", "kept", lambda plan: (plan.chunks, plan.kept) == (1, 13)),
        ("medium", "kept chunks", lambda plan: plan.chunks > 1 and plan.kept == 13),
        ("medium", "partly kept", lambda plan: 0 < plan.kept < 13),
        ("medium", "again", lambda plan: plan.kept == 0 and plan.blocks > 1),
        ("wide", "again", lambda plan: plan.kept == 0 and plan.slices > 1),
    ):
        problem = draw_problem(
            1,
            dtype="fp32",
            logits_dtype="fp32",
            shape=shape,
            work=work,
            entropy=True,
            upstream="both",
            keep="unmasked",
            frozen=(),
        )
        plans = []
        outcome = call(problem, impl, plans=plans)
        (plan,) = plans
        found = SimpleNamespace(
            chunks=len(list(plan.chunks())),
            kept=plan.kept_rows,
            blocks=len(list(plan.blocks())),
            slices=len(list(plan.slices(len(problem.weight)))),
        )
        assert expected(found), f"{shape}, {work}: {found}"
        assert_right(problem, outcome)


def _check_no_rows(impl, entropy, keep):
    hidden = torch.empty(0, 24, device=device(), requires_grad=True)
    weight = torch.randn(37, 24, device=device(), requires_grad=True)
    bias = torch.randn(37, device=device(), requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.int64, device=device())
    log_prob, value = linear_log_prob(
        hidden,
        weight,
        nothing,
        temperature=torch.ones(0, device=device()),
        entropy=entropy,
        keep=KeepSet(torch.zeros(1, dtype=torch.int64, device=device()), nothing) if keep else None,
        bias=bias,
        impl=impl,
    )
    assert log_prob.shape == (0,) and log_prob.requires_grad
    assert value.shape == (0,) if entropy else value is None
    results = [log_prob, value] if entropy is True else [log_prob]
    sum(result.sum() for result in results).backward()
    for leaf in (hidden, weight, bias):
        assert leaf.grad.shape == leaf.shape and not leaf.grad.any()


def _pairs(seeds):
    """Pairs of option values that occur together."""
    return {
        pair for seed in seeds for pair in itertools.combinations(draw_options(seed).items(), 2)
    }


class TestParity:
    """Error at most three times that of plain torch in the same dtype; see `parity`."""

    @pytest.mark.parametrize("impl", IMPLS)
    def test_random_calls(self, impl):
        """All options at random."""
        run_on_ranks(Layout(), _check_seeds, impl, list(_SEEDS[impl]))

    @pytest.mark.full
    @pytest.mark.parametrize("impl", IMPLS)
    def test_random_calls_at_length(self, impl):
        """More of them."""
        seeds = list(_SEEDS_AT_LENGTH[impl])
        run_on_ranks(Layout(), _check_seeds, impl, seeds, time_limit=300)

    def test_random_calls_hold_all_options(self):
        """An option that no seed draws is one that nothing tests."""
        possible = _pairs(range(20000))
        assert not possible - _pairs(_SEEDS["torch"])
        assert not possible - _pairs(_SEEDS_AT_LENGTH["triton"])
        single = {item for pair in _pairs(_SEEDS["triton"]) for item in pair}
        assert single == {(name, value) for name in OPTIONS for value in OPTIONS[name]}

    @pytest.mark.parametrize("impl", IMPLS)
    def test_all_kinds_of_work(self, impl):
        """What backward keeps, projects again in blocks of rows and in slices of columns."""
        run_on_ranks(Layout(), _check_work, impl)

    @pytest.mark.parametrize("impl", IMPLS)
    @pytest.mark.parametrize("entropy", [False, "no_grad", True])
    @pytest.mark.parametrize("keep", [False, True])
    def test_no_rows(self, impl, entropy, keep):
        """Empty results that keep the graph, and gradients of zeros."""
        run_on_ranks(Layout(), _check_no_rows, impl, entropy, keep)
