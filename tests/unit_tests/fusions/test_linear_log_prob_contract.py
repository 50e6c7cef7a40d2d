# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""What `linear_log_prob` promises beside its values: bits, what it saves, and whom it minds."""

import gc
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch

from megatron.core.fusions.linear_log_prob import KeepSet, linear_log_prob
from tests.unit_tests.fusions.memory import NewMemory
from tests.unit_tests.fusions.problems import HUGE, IMPLS, draw_problem, rows_a_chunk, work_of
from tests.unit_tests.fusions.reference import truth
from tests.unit_tests.harness.compare import assert_close, assert_same_bits
from tests.unit_tests.harness.models import device
from tests.unit_tests.harness.ranks import Layout, run_on_ranks

_WORKS = ("kept", "kept chunks", "partly kept", "again")
_IMPLS = pytest.mark.parametrize("impl", IMPLS)


def _problem(work="kept", **options):
    settings = dict(
        dtype="fp32",
        logits_dtype="fp32",
        shape="small",
        work=work,
        entropy=True,
        keep="unmasked, entropy",
        bias=True,
        frozen=(),
        strides="none",
        padding="some",
        uneven=False,
        upstream="both",
        temperature="rows",
        ignored=True,
    )
    return draw_problem(8, **{**settings, **options})


class _Call:
    """A forward pass whose backward is to come."""

    def __init__(self, problem, impl, budget=None, **overrides):
        self._problem = problem
        operands = dict(hidden=problem.hidden, weight=problem.weight, bias=problem.bias)
        operands.update((name, overrides.pop(name)) for name in operands if name in overrides)
        self.leaves = {
            name: tensor.detach().clone().requires_grad_() for name, tensor in operands.items()
        }
        self.plans = []
        work = nullcontext(budget)
        if budget is None:
            work = work_of(problem, len(problem.weight), self.plans)
        with work as budget:
            self.results = linear_log_prob(
                self.leaves["hidden"],
                self.leaves["weight"],
                problem.rows.targets,
                bias=self.leaves["bias"],
                impl=impl,
                logits_budget=budget,
                **{**problem.arguments(), **overrides},
            )

    def backward(self, retain_graph=False):
        """Gradients by name."""
        upstream = self._problem.grad_log_prob, self._problem.grad_entropy
        gradients = torch.autograd.grad(
            self.results, list(self.leaves.values()), upstream, retain_graph=retain_graph
        )
        return dict(zip(self.leaves, gradients))

    def everything(self):
        """Results and gradients, by name."""
        log_prob, entropy = (result.detach().clone() for result in self.results)
        return {"log_prob": log_prob, "entropy": entropy, **self.backward()}


def _assert_same(actual, expected):
    for name, tensor in expected.items():
        assert_same_bits(name, actual[name], tensor)


def _check_deterministic(impl, work, dtype):
    logits_dtype = "match" if dtype == "bf16" else "fp32"
    problem = _problem(work, dtype=dtype, logits_dtype=logits_dtype, shape="small")
    expected = _Call(problem, impl).everything()
    for _ in range(4):
        _assert_same(_Call(problem, impl).everything(), expected)
    with torch.no_grad():
        call = _Call(problem, impl)
    for name, result in zip(("log_prob", "entropy"), call.results):
        assert_same_bits(name, result, expected[name])
    # Products this small round alike whatever their size; larger ones may not.
    assert call.plans == _Call(problem, impl).plans

    call = _Call(problem, impl)
    first = call.backward(retain_graph=True)
    _assert_same(first, {name: expected[name] for name in first})
    _assert_same(call.backward(retain_graph=True), first)
    _assert_same(call.backward(), first)


def _check_saved(impl, work, keep):
    """Hooks that move everything elsewhere leave nothing behind, and get what is documented."""
    problem = _problem(work, keep="unmasked, entropy" if keep else None)
    expected = _Call(problem, impl).everything()
    elsewhere = []

    def pack(tensor):
        elsewhere.append(tensor.clone())
        return len(elsewhere) - 1

    memory = NewMemory()
    with memory, torch.autograd.graph.saved_tensors_hooks(pack, lambda i: elsewhere[i].clone()):
        call = _Call(problem, impl)
    # Triton's interpreter leaves cycles that hold the last launch's arguments.
    gc.collect()
    assert memory.alive([*elsewhere, *call.leaves.values(), *call.results]) == 0

    num_rows, columns = problem.num_rows, len(problem.weight)
    logits = [tensor for tensor in elsewhere if tensor.shape[1:] == (columns,)]
    kept_rows = sum(len(tensor) for tensor in logits)
    if work == "partly kept":
        assert 0 < kept_rows < num_rows
    else:
        assert kept_rows == (0 if work == "again" else num_rows)
    # Beside operands and logits: target, temperature and five numbers a row; kept ids and the
    # logits of those.
    small = (8 + 4 + 5 * 4) * num_rows
    if keep:
        small += 16 * num_rows + (8 + 4) * len(problem.keep.ids)
    saved = sum(tensor.nbytes for tensor in elsewhere)
    saved -= sum(leaf.nbytes for leaf in call.leaves.values()) + 4 * columns * kept_rows
    assert 0 < saved <= small
    _assert_same(call.backward(), {name: expected[name] for name in call.leaves})


def _check_offloaded(impl, work):
    problem = _problem(work)
    expected = _Call(problem, impl).everything()
    with torch.autograd.graph.save_on_cpu():
        call = _Call(problem, impl)
    for _ in range(2):
        _assert_same(call.backward(True), {name: expected[name] for name in call.leaves})


def _check_results_freed(impl, work):
    problem = _problem(work)
    expected = _Call(problem, impl).everything()
    call = _Call(problem, impl)
    for result in call.results:
        result.untyped_storage().resize_(0)
    _assert_same(call.backward(), {name: expected[name] for name in call.leaves})


def _check_graph_freed(impl):
    """Nothing holds the results or their graph once the caller lets go of them."""
    call = _Call(_problem(), impl)
    references = [weakref.ref(result.grad_fn) for result in call.results]
    del call
    assert not any(reference() for reference in references)


def _check_autocast(impl, work):
    problem = _problem(work)
    half = _problem(work, dtype="bf16")
    wide = {name: getattr(half, name).float() for name in ("hidden", "weight", "bias")}
    expected = _Call(half, impl, bias=wide["bias"]).everything()
    with torch.autocast(device().type, torch.bfloat16):
        call = _Call(problem, impl, **wide)
    found = call.everything()
    for name, tensor in found.items():
        assert tensor.dtype is torch.float32
        if name in ("log_prob", "entropy"):
            assert_same_bits(name, tensor, expected[name])
        else:
            assert_close(name, tensor, expected[name], eps=2**-8)
    # bf16 operands stay what they are, and an autocast that is off changes nothing.
    with torch.autocast(device().type, torch.bfloat16):
        call = _Call(half, impl)
    assert {leaf.dtype for leaf in call.backward().values()} == {torch.bfloat16}
    with torch.autocast(device().type, torch.bfloat16, enabled=False):
        _assert_same(_Call(problem, impl).everything(), _Call(problem, impl).everything())


def _check_compiled(impl, backend):
    problem = _problem()

    def function(hidden, weight, bias):
        log_prob, entropy = linear_log_prob(
            2 * hidden, weight, problem.rows.targets, bias=bias, impl=impl, **problem.arguments()
        )
        return log_prob - 1, entropy * 0.5

    def run(function):
        leaves = [problem.hidden, problem.weight, problem.bias]
        leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        results = function(*leaves)
        upstream = problem.grad_log_prob, problem.grad_entropy
        return (*results, *torch.autograd.grad(results, leaves, upstream))

    torch._dynamo.reset()
    expected = run(function)
    for actual, due in zip(run(torch.compile(function, backend=backend)), expected):
        assert_same_bits("compiled", actual, due)


def _check_threads(impl):
    problems, budgets = [_problem(), _problem(shape="odd")], (HUGE, 0)
    calls = list(zip(problems, budgets))
    expected = [_Call(problem, impl, budget).everything() for problem, budget in calls]
    found = [None, None]
    # Triton's interpreter has one grid for the whole process.
    at_once = impl == "torch" or device().type == "cuda"
    start = threading.Barrier(2 if at_once else 1)

    def work(index):
        start.wait()
        problem, budget = calls[index]
        for _ in range(5 if at_once else 1):
            found[index] = _Call(problem, impl, budget).everything()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
        if not at_once:
            thread.join()
    for thread in threads:
        thread.join()
    for actual, due in zip(found, expected):
        _assert_same(actual, due)


def _check_bad_row(impl, work, value, asked):
    """A NaN or inf of a row's hidden states, and one whose row nobody asks for."""
    problem = _problem(work, keep="unmasked", ignored=False)
    problem.grad_log_prob[3], problem.grad_entropy[3] = (1.0, 1.0) if asked else (0.0, 0.0)
    expected = _Call(problem, impl).everything()
    problem.hidden[3, 5] = value
    found = _Call(problem, impl).everything()
    others = torch.arange(problem.num_rows, device=device()) != 3
    for name in ("log_prob", "entropy", "hidden"):
        assert_same_bits(name, found[name][others], expected[name][others])
    if value != value:
        assert found["log_prob"][3].isnan() and found["entropy"][3].isnan()
    if not asked:
        assert not found["hidden"][3].any()
    elif value != value:
        assert found["hidden"][3].isnan().all()
    if not asked:
        assert found["bias"].isfinite().all()


def _check_forbidden_columns(impl, work):
    """A bias of -inf forbids an id: it takes no part, and nothing becomes NaN."""
    problem = _problem(work, keep=None, ignored=False)
    forbidden = [0, 7, 55]
    problem.rows.targets[
        torch.isin(problem.rows.targets, torch.tensor(forbidden, device=device()))
    ] = 1
    due = truth(
        problem.hidden,
        problem.weight,
        problem.bias.clone().index_fill_(0, torch.tensor(forbidden, device=device()), -1e4),
        problem.rows,
        problem.grad_log_prob,
        problem.grad_entropy,
    )
    problem.bias[forbidden] = -torch.inf
    found = _Call(problem, impl).everything()
    assert_close("log_prob", found["log_prob"], due.log_prob, eps=2e-6)
    assert_close("entropy", found["entropy"], due.entropy, eps=2e-6)
    for name, gradient in due.gradients.items():
        assert_close(name, found[name], gradient, eps=1e-5)
    assert not found["weight"][forbidden].any()


def _check_no_mask(impl, kind):
    problem = _problem(keep=kind)
    # So few that no list of them is as large as one row of a mask.
    lengths = torch.full((problem.num_rows,), 3, device=device())
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    ids = torch.arange(3 * problem.num_rows, device=device()) % problem.rows.vocab_size
    keep = KeepSet(offsets, ids, problem.keep.empty, problem.keep.entropy)

    def masks(keep):
        with rows_a_chunk(4, problem, len(problem.weight)), NewMemory() as memory:
            log_prob, entropy = linear_log_prob(
                problem.hidden.detach().requires_grad_(),
                problem.weight,
                problem.rows.targets,
                bias=problem.bias,
                impl=impl,
                logits_budget=0,
                **{**problem.arguments(), "keep": keep},
            )
            (log_prob.sum() + entropy.sum()).backward()
        return memory.masks

    found = masks(keep)
    assert max(found) < problem.num_rows * problem.rows.vocab_size
    # Nor one of a chunk, but those that are made without kept ids as well.
    a_row = problem.rows.vocab_size

    def large(sizes):
        return [size for size in sizes if size >= a_row]

    assert len(large(found)) <= len(large(masks(None)))


class TestDeterminism:
    """Equal bits."""

    @_IMPLS
    @pytest.mark.parametrize("work", _WORKS)
    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_same_bits(self, impl, work, dtype):
        """Five times, without gradients, and in a second and third backward of one graph."""
        run_on_ranks(Layout(), _check_deterministic, impl, work, dtype)


class TestSavedTensors:
    """Memory that waits for backward."""

    @_IMPLS
    @pytest.mark.parametrize("work", _WORKS)
    @pytest.mark.parametrize("keep", [False, True])
    def test_hooks_see_all(self, impl, work, keep):
        """Kept logits included: with hooks that take it away, nothing stays."""
        run_on_ranks(Layout(), _check_saved, impl, work, keep)

    @_IMPLS
    @pytest.mark.parametrize("work", _WORKS)
    def test_offloaded(self, impl, work):
        """Backward from copies, twice."""
        run_on_ranks(Layout(), _check_offloaded, impl, work)

    @_IMPLS
    @pytest.mark.parametrize("work", _WORKS)
    def test_results_may_be_freed(self, impl, work):
        """From 0.18 on a schedule frees the model's output before backward is done."""
        run_on_ranks(Layout(), _check_results_freed, impl, work)

    @_IMPLS
    def test_graph_is_freed(self, impl):
        """No cycle keeps logits until the garbage collector comes."""
        run_on_ranks(Layout(), _check_graph_freed, impl)


class TestSurroundings:
    """Autocast, compilation, threads."""

    @_IMPLS
    @pytest.mark.parametrize("work", ["kept", "again"])
    def test_autocast(self, impl, work):
        """Values of bf16 operands, gradients in the operands' own dtype."""
        run_on_ranks(Layout(), _check_autocast, impl, work)

    @_IMPLS
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_in_a_compiled_function(self, impl, backend):
        """The same bits as without."""
        run_on_ranks(Layout(), _check_compiled, impl, backend)

    @_IMPLS
    def test_threads(self, impl):
        """Two calls at once from threads other than the main one."""
        run_on_ranks(Layout(), _check_threads, impl)


class TestNumbers:
    """What is no number stays where it is."""

    @_IMPLS
    @pytest.mark.parametrize("work", ["kept", "again"])
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("asked", [True, False])
    def test_bad_row(self, impl, work, value, asked):
        """Other rows have the same bits; a row that is not asked for has no gradient."""
        run_on_ranks(Layout(), _check_bad_row, impl, work, value, asked)

    @_IMPLS
    @pytest.mark.parametrize("work", ["kept", "again"])
    def test_forbidden_columns(self, impl, work):
        """Logits of -inf."""
        run_on_ranks(Layout(), _check_forbidden_columns, impl, work)

    @_IMPLS
    @pytest.mark.parametrize("kind", ["unmasked", "target, entropy"])
    def test_no_dense_mask(self, impl, kind):
        """Kept ids stay a list."""
        run_on_ranks(Layout(), _check_no_mask, impl, kind)
