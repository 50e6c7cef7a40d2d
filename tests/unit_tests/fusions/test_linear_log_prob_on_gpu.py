# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""`linear_log_prob` at sizes that only a GPU has: memory, and offsets beyond 2^31.

Run under torchrun on GPUs alone, see `conftest.py`; an H200 takes about a minute.
"""

import gc

import pytest
import torch

from megatron.core.fusions.linear_log_prob import linear_log_prob
from tests.unit_tests.fusions.problems import IMPLS
from tests.unit_tests.harness.compare import assert_close
from tests.unit_tests.harness.models import device
from tests.unit_tests.harness.ranks import Layout, run_on_ranks

_GIB = 2**30
_IMPLS = pytest.mark.parametrize("impl", IMPLS)


def _operands(num_rows, hidden_size, columns):
    """bf16, made on the GPU without a copy in fp32."""
    torch.manual_seed(3)
    options = dict(dtype=torch.bfloat16, device=device())
    hidden = torch.empty(num_rows, hidden_size, **options).normal_()
    weight = torch.empty(columns, hidden_size, **options).normal_(std=1.5 * hidden_size**-0.5)
    targets = torch.randint(0, columns, (num_rows,), device=device())
    return hidden, weight, targets


def _peak_above(function):
    """Bytes that a call takes at its peak above what is there before, and its result."""
    # Workspaces of libraries are made once.
    function()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, result


def _check_peak(budget, main_grad):
    hidden, weight, targets = _operands(16384, 4096, 65536)
    hidden.requires_grad_()
    weight = torch.nn.Parameter(weight)
    # 4 GiB of logits, of which the budget holds a part.
    of_weight = weight.numel() * 4
    if main_grad:
        weight.main_grad = torch.zeros(weight.shape, device=device())
        of_weight = 0

    def step():
        hidden.grad = weight.grad = None
        log_prob, entropy = linear_log_prob(
            hidden, weight, targets, entropy=True, logits_budget=budget
        )
        (log_prob.sum() + entropy.sum()).backward()

    peak, _ = _peak_above(step)
    allowed = max(budget, 0.25 * _GIB) + 0.25 * _GIB * (budget > 0) + hidden.nbytes + of_weight
    # Where the weight's gradient is returned, its sum in fp32 and its rounding exist at once.
    allowed += 0 if main_grad else weight.nbytes
    assert peak <= allowed, f"{peak / _GIB:.2f} GiB, allowed {allowed / _GIB:.2f}"


def _check_forward_peak(budget, allowed):
    hidden, weight, targets = _operands(16384, 4096, 65536)
    with torch.no_grad():
        peak, _ = _peak_above(
            lambda: linear_log_prob(hidden, weight, targets, entropy=True, logits_budget=budget)
        )
    assert peak <= allowed, f"{peak / _GIB:.3f} GiB, allowed {allowed / _GIB:.3f}"


def _check_some_rows(impl, num_rows, hidden_size, columns, budget):
    """The first and the last rows of a call are those of a small call."""
    hidden, weight, targets = _operands(num_rows, hidden_size, columns)
    hidden.requires_grad_()
    some = torch.cat([torch.arange(8), torch.arange(num_rows - 8, num_rows)]).to(device())
    log_prob, entropy = linear_log_prob(
        hidden, weight, targets, entropy=True, impl=impl, logits_budget=budget
    )
    upstream = torch.zeros(num_rows, device=device())
    upstream[some] = torch.linspace(-1, 1, len(some), device=device())
    (gradient,) = torch.autograd.grad([log_prob, entropy], hidden, [upstream, upstream])

    rows = hidden.detach()[some].double().requires_grad_()
    log_p = (rows @ weight.double().t()).log_softmax(1)
    due = log_p.gather(1, targets[some, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)
    (due_gradient,) = torch.autograd.grad(due, rows, [upstream[some].double()] * 2)
    assert_close("log_prob", log_prob[some], due[0], eps=1e-5)
    assert_close("entropy", entropy[some], due[1], eps=1e-5)
    assert_close("gradient of hidden", gradient[some], due_gradient, eps=2 * 2**-8)
    others = torch.ones(num_rows, dtype=torch.bool, device=device())
    others[some] = False
    assert not any(part[others[i : i + 4096]].any() for i, part in _parts(gradient))


def _parts(gradient):
    return zip(range(0, len(gradient), 4096), gradient.split(4096))


def _check_weight(impl, columns, hidden_size):
    """Of a weight of more than 2^31 elements, the last rows' gradient and none of the others."""
    hidden, weight, targets = _operands(64, hidden_size, columns)
    targets = columns - 1 - targets % 64
    weight.requires_grad_()
    log_prob, _ = linear_log_prob(hidden, weight, targets, impl=impl)
    upstream = torch.linspace(-1, 1, 64, device=device())
    (gradient,) = torch.autograd.grad(log_prob, weight, upstream)
    # In fp32, since fp64 logits take no less than the weight.
    logits = (hidden @ weight.detach().t()).float()
    slope = -logits.softmax(1) * upstream[:, None]
    slope[torch.arange(64), targets] += upstream
    for part in (slice(0, 128), slice(columns - 128, columns)):
        due = slope[:, part].double().t() @ hidden.double()
        assert_close(f"gradient of weight {part}", gradient[part], due, eps=0.02)


class TestMemory:
    """Peak of a step above its inputs; N 16384, h 4096, V 65536: logits of 4 GiB."""

    @pytest.mark.parametrize("budget", [0, 768 * 2**20, 2 * _GIB])
    @pytest.mark.parametrize("main_grad", [False, True])
    def test_step(self, budget, main_grad):
        """The budget, 0.25 GiB and the gradient of hidden states; with none, 0.25 GiB of logits."""
        run_on_ranks(Layout(), _check_peak, budget, main_grad, time_limit=300)

    @pytest.mark.parametrize("budget, allowed", [(0, 0.25), (768 * 2**20, 0.75), (2**40, 0.75)])
    def test_forward_only(self, budget, allowed):
        """Working memory alone, whatever the budget is."""
        run_on_ranks(Layout(), _check_forward_peak, budget, allowed * _GIB, time_limit=300)


class TestLargeOffsets:
    """More than 2^31 elements."""

    @_IMPLS
    def test_of_kept_logits(self, impl):
        """N times V: 16384 rows of 151,936 logits, 9.3 GiB, in one piece."""
        # In plain torch kept logits are copied several times over: there chunks stay chunks.
        budget = 0 if impl == "torch" else 2**40
        arguments = impl, 16384, 256, 151936, budget
        run_on_ranks(Layout(), _check_some_rows, *arguments, time_limit=300)

    @_IMPLS
    def test_of_hidden_states(self, impl):
        """N times h."""
        run_on_ranks(
            Layout(), _check_some_rows, impl, 2**18 + 24, 8192, 1000, 768 * 2**20, time_limit=300
        )

    @_IMPLS
    def test_of_the_weight(self, impl):
        """V times h."""
        run_on_ranks(Layout(), _check_weight, impl, 2**18 + 24, 8192, time_limit=300)
