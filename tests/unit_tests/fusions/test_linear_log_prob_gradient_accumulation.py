# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Where `linear_log_prob` leaves the gradient of the weight: autograd, or `main_grad`.

The rules are those of Megatron's linear layers with `gradient_accumulation_fusion`.
"""

import pytest
import torch

from megatron.core.fusions.linear_log_prob import linear_log_prob
from tests.unit_tests.fusions.memory import NewMemory
from tests.unit_tests.fusions.problems import IMPLS, Draw, draw_problem, work_of
from tests.unit_tests.fusions.reference import truth
from tests.unit_tests.harness.compare import assert_close, assert_same_bits
from tests.unit_tests.harness.models import device
from tests.unit_tests.harness.ranks import Layout, run_on_ranks

_WORKS = ("kept", "kept chunks", "partly kept", "again")
_IMPLS = pytest.mark.parametrize("impl", IMPLS)


def _problem(seed, work="kept", dtype="fp32", shape="small"):
    """A problem whose weight is trained."""
    return draw_problem(
        seed,
        dtype=dtype,
        logits_dtype="fp32",
        shape=shape,
        work=work,
        frozen=(),
        strides="none",
        padding="none",
        uneven=False,
        upstream="log_prob",
    )


def _parameter(problem, main_grad=None, **attributes):
    weight = torch.nn.Parameter(problem.weight.clone())
    if main_grad is not None:
        weight.main_grad = main_grad
    for name, value in attributes.items():
        setattr(weight, name, value)
    return weight


def _backward(problem, weight, impl, wgrad="auto"):
    """A micro-batch; returns the gradient of its hidden states."""
    hidden = problem.hidden.detach().requires_grad_()
    with work_of(problem, len(weight)) as budget:
        log_prob, _ = linear_log_prob(
            hidden,
            weight,
            problem.rows.targets,
            bias=problem.bias,
            logits_budget=budget,
            wgrad=wgrad,
            impl=impl,
            **problem.arguments(),
        )
    log_prob.backward(problem.grad_log_prob)
    return hidden.grad


def _true_gradient(problem, weight):
    return truth(
        problem.hidden, weight.detach(), problem.bias, problem.rows, problem.grad_log_prob, None
    ).gradients["weight"]


def _content(problem, dtype=torch.float32):
    return Draw(5).normal(*problem.weight.shape, dtype=dtype)


def _check_fp32(impl, work, wgrad):
    first = _problem(1, work)
    content = _content(first)
    weight = _parameter(first, content.clone(), grad_added_to_main_grad=False)
    due = content.double()
    for seed in (1, 2):
        problem = _problem(seed, work)
        weight.grad_added_to_main_grad = False
        _backward(problem, weight, impl, wgrad)
        assert weight.grad_added_to_main_grad is True
        due += _true_gradient(problem, weight)
        # A plain sum: nothing that was there is lost, and nothing is counted twice.
        assert_close(f"main_grad after {seed}", weight.main_grad, due, eps=2e-6)


def _check_16_bit(impl, dtype):
    problem = _problem(4, "again", "fp32")
    # The products in fp32, so that what is tested is the sum: the weight's dtype does not matter.
    content = _content(problem, dtype)
    weight = _parameter(problem, content.clone(), grad_added_to_main_grad=False)
    _backward(problem, weight, impl)
    exact = _true_gradient(problem, weight)
    due = content.double() + exact
    # One rounding, to nearest, of a sum in fp32.
    half_ulp = torch.finfo(dtype).eps / 2
    error = (weight.main_grad.double() - due).abs()
    assert bool((error <= half_ulp * due.abs() * 1.01 + 2e-6).all()), error.max()

    # What adding chunk by chunk would give.
    naive = content.clone()
    for row in range(problem.num_rows):
        part = _true_gradient(_rows(problem, row), weight)
        naive += part.to(dtype)
    naive_error = (naive.double() - due).abs()
    assert error.square().sum() < 0.7 * naive_error.square().sum()


def _rows(problem, row):
    """The same with the incoming gradient of one row alone."""
    only = torch.zeros_like(problem.grad_log_prob)
    only[row] = problem.grad_log_prob[row]
    return type(problem)(**{**vars(problem), "grad_log_prob": only})


def _check_16_bit_operands(impl):
    """bf16 throughout, two micro-batches."""
    first = _problem(1, "again", "bf16")
    weight = _parameter(first, torch.zeros_like(first.weight), grad_added_to_main_grad=False)
    due = torch.zeros_like(first.weight, dtype=torch.float64)
    for seed in (1, 2):
        problem = _problem(seed, "again", "bf16")
        _backward(problem, weight, impl)
        due += _true_gradient(problem, weight)
    # The gradient of logits is rounded, and the sum after each micro-batch.
    assert_close("main_grad", weight.main_grad, due, eps=3 * 2**-8)


def _check_stand_in(impl):
    problem = _problem(1)
    # None where the weight has no flag: nobody waits for a gradient.
    weight = _parameter(problem, _content(problem))
    _backward(problem, weight, impl)
    assert weight.grad is None
    assert not hasattr(weight, "grad_added_to_main_grad")

    # One for all weights of a shape; and autograd keeps it as it is.
    flagged = [
        _parameter(problem, _content(problem), grad_added_to_main_grad=False) for _ in range(2)
    ]
    for weight in flagged:
        _backward(problem, weight, impl)
        assert weight.grad.shape == weight.shape and weight.grad.dtype is weight.dtype
    assert flagged[0].grad.data_ptr() == flagged[1].grad.data_ptr()
    assert flagged[0].grad.data_ptr() != flagged[0].main_grad.data_ptr()

    other = _problem(1, shape="odd")
    weight = _parameter(other, _content(other), grad_added_to_main_grad=False)
    _backward(other, weight, impl)
    assert weight.grad.shape == weight.shape
    assert weight.grad.data_ptr() != flagged[0].grad.data_ptr()


def _check_zeros(impl):
    """Of a tied weight the embedding's gradient is added to what comes back."""
    problem = _problem(1)
    content = _content(problem)
    attributes = dict(grad_added_to_main_grad=False, zero_out_wgrad=True)
    weights = [_parameter(problem, content.clone(), **attributes) for _ in range(2)]
    for weight in weights:
        _backward(problem, weight, impl)
        assert weight.grad.dtype is weight.dtype and not weight.grad.any()
        assert weight.grad_added_to_main_grad is True
        # As the embedding does; the next one is zeros all the same.
        weight.grad += 1
    assert weights[0].grad.data_ptr() != weights[1].grad.data_ptr()


def _check_grad(impl, work):
    problem = _problem(1, work)
    content = _content(problem)
    weight = _parameter(problem, content.clone(), grad_added_to_main_grad=False)
    _backward(problem, weight, impl, wgrad="grad")
    assert weight.grad_added_to_main_grad is False
    assert_same_bits("main_grad", weight.main_grad, content)
    assert_close("grad", weight.grad, _true_gradient(problem, weight), eps=2e-6)


def _check_frozen(impl, work):
    problem = _problem(1, work)
    content = _content(problem)

    def new_memory(requires_grad, wgrad):
        weight = _parameter(problem, content.clone(), grad_added_to_main_grad=False)
        weight.requires_grad_(requires_grad)
        with NewMemory() as record:
            _backward(problem, weight, impl, wgrad)
        return weight, record.shapes.count(tuple(weight.shape))

    weight, of_frozen = new_memory(False, "auto")
    assert weight.grad is None and weight.grad_added_to_main_grad is False
    assert_same_bits("main_grad", weight.main_grad, content)
    assert of_frozen == 0
    # What it would have cost, so that this test can see it; main_grad saves it, too.
    assert new_memory(True, "grad")[1] > 0
    _backward(problem, _parameter(problem, content, grad_added_to_main_grad=False), impl)
    assert new_memory(True, "main_grad")[1] == 0


def _check_no_rows(impl):
    """Data parallelism counts on a gradient of every micro-batch."""
    weight = torch.nn.Parameter(torch.randn(37, 24, device=device()))
    weight.main_grad = content = torch.randn(37, 24, device=device())
    before = content.clone()
    weight.grad_added_to_main_grad = False
    hidden = torch.empty(0, 24, device=device(), requires_grad=True)
    targets = torch.zeros(0, dtype=torch.int64, device=device())
    linear_log_prob(hidden, weight, targets, impl=impl)[0].sum().backward()
    assert weight.grad_added_to_main_grad is True and weight.grad.shape == weight.shape
    assert_same_bits("main_grad", content, before)


def _check_refused(impl):
    problem = _problem(1)
    content = _content(problem)
    for main_grad, wgrad, says in (
        (None, "main_grad", "no main_grad"),
        (content[:-1], "auto", r"weight.main_grad: got \[74, 16\]"),
        (content.to("meta"), "auto", "on meta"),
        (content.double(), "auto", "float64"),
    ):
        with pytest.raises(ValueError, match=says):
            _backward(problem, _parameter(problem, main_grad), impl, wgrad)


class TestMainGrad:
    """The gradient is in `main_grad` when backward returns."""

    @_IMPLS
    @pytest.mark.parametrize(
        "work, wgrad", [*((work, "auto") for work in _WORKS), ("again", "main_grad")]
    )
    def test_adds_up_in_fp32(self, impl, work, wgrad):
        """Two micro-batches on top of what is there."""
        run_on_ranks(Layout(), _check_fp32, impl, work, wgrad)

    @_IMPLS
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_adds_to_16_bits_once(self, impl, dtype):
        """One rounding for all chunks, and so closer than a rounding for each."""
        run_on_ranks(Layout(), _check_16_bit, impl, dtype)

    @_IMPLS
    def test_adds_up_in_bf16(self, impl):
        """Operands and `main_grad` in bf16."""
        run_on_ranks(Layout(), _check_16_bit_operands, impl)

    @_IMPLS
    def test_no_rows(self, impl):
        """Nothing to add, but the flag and the stand-in are due."""
        run_on_ranks(Layout(), _check_no_rows, impl)


class TestWhatAutogradGets:
    """The gradient itself, a stand-in, zeros, or nothing."""

    @_IMPLS
    def test_stand_in(self, impl):
        """One tensor for all weights of a shape that have the flag, None for those without."""
        run_on_ranks(Layout(), _check_stand_in, impl)

    @_IMPLS
    def test_zeros_where_they_are_read(self, impl):
        """Of a tensor of their own."""
        run_on_ranks(Layout(), _check_zeros, impl)

    @_IMPLS
    @pytest.mark.parametrize("work", _WORKS)
    def test_gradient_where_asked_for(self, impl, work):
        """`main_grad` and flag stay as they are."""
        run_on_ranks(Layout(), _check_grad, impl, work)

    @_IMPLS
    @pytest.mark.parametrize("work", _WORKS)
    def test_nothing_of_a_frozen_weight(self, impl, work):
        """No memory of its shape, no change of `main_grad`, no flag."""
        run_on_ranks(Layout(), _check_frozen, impl, work)

    @_IMPLS
    def test_refuses_what_does_not_fit(self, impl):
        """Missing, or of another shape, device or dtype."""
        run_on_ranks(Layout(), _check_refused, impl)
