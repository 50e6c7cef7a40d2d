# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Inputs, the float64 reference, cuBLAS's own GEMMs, and how `linear_log_prob.py` measures.

A call is timed by device events, and the calls of a measurement are queued one behind the other,
as in a training step: the time is the device's, without the launch latency of an empty queue. For
the op, every repetition is preceded by cuBLAS's GEMMs, so that both see the same clocks.
"""

import gc
import statistics
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from log_prob_cases import ENTROPY_GRADIENT, FORWARD, Shape
from torch import Tensor

# Rows and vocabulary ids whose values and gradients are compared with float64.
_CHECKED = 16
_REFERENCE_ROWS = 1024


@dataclass(frozen=True)
class Provider:
    """Something that maps hidden states to log-probabilities.

    Attributes:
        key (str): What it is called on the command line.
        name (str): What it is called in the CSV.
        version (str): Of the package, or the commit.
        run (Callable): Called with :class:`Inputs` and the kind of entropy, one of `"none"`,
            `"value"` and `"gradient"`; returns log-probabilities `[N]` and entropy `[N]` or None,
            or a sum of losses and None where it isn't the same job.
        entropies (tuple): The kinds of entropy to measure.
        ours (bool): Whether it is the op of this repository.
        main_grad (bool): Whether it adds the gradient of the weight to `main_grad`.
        same_job (bool): Whether it gives a log-probability and takes a gradient per row.
        all_tokens (bool): Whether it computes all T rows, of which N are then used.
        budget (int, optional): The op's budget for logits.
        forward (bool): Whether to measure it in forward alone, too, where the budget plays no part.
        rows (tuple, optional): Numbers of rows to measure at; None for all.
        note (str): For the CSV.
    """

    key: str
    name: str
    version: str
    run: Callable[["Inputs", str], Tuple[Tensor, Optional[Tensor]]]
    entropies: Tuple[str, ...]
    ours: bool = False
    main_grad: bool = False
    same_job: bool = True
    all_tokens: bool = False
    budget: Optional[int] = None
    forward: bool = True
    rows: Optional[Tuple[int, ...]] = None
    note: str = ""

    def kinds_of_entropy(self, job: str) -> List[str]:
        """The kinds of entropy to measure in a job."""
        if job == FORWARD and not self.forward:
            return []
        return [
            kind for kind in self.entropies if (kind == "gradient") == (job == ENTROPY_GRADIENT)
        ]


class Inputs:
    """Tensors of one measurement, the same for everyone.

    Args:
        shape (Shape): Of the weight.
        tokens (int): Number T of packed tokens.
        rows (int): Number N of them that are used, in spans of about 256 as in an episode.
        device (torch.device): Where.
        main_grad (bool): Whether the op's weight has one.

    Attributes:
        hidden (Tensor): `[N, H]` bf16, the used rows.
        weight (Tensor): `[V / TP, H]` bf16, with `main_grad` fp32.
        plain_weight (Tensor): The same memory, without `main_grad`.
        targets (Tensor): `[N]` int64.
        grad_log_prob, grad_entropy (Tensor): `[N]` fp32, what comes in from the loss.
        selected (Tensor): `[N]` int64, which of all tokens the rows are.
        all_hidden, all_targets (Tensor, optional): `[T, H]` and `[T]`, after :meth:`add_tokens`.
    """

    def __init__(
        self, shape: Shape, tokens: int, rows: int, device: torch.device, main_grad: bool = True
    ):
        self.shape, self.tokens, self.rows, self.device = shape, tokens, rows, device
        self._generator = torch.Generator(device).manual_seed(rows)
        self.hidden = self._normal(rows, shape.hidden_size).bfloat16().requires_grad_()
        weight = self._normal(shape.vocab, shape.hidden_size)
        # Logits of standard deviation 1.5: log-probabilities and entropy as in a language model
        # that isn't sure, where every column counts.
        weight = weight.mul_(1.5 / shape.hidden_size**0.5).bfloat16()
        self.weight = torch.nn.Parameter(weight)
        self.plain_weight = weight.detach().requires_grad_()
        if main_grad:
            self.weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
        self.targets = torch.randint(0, shape.vocab, (rows,), **self._where())
        self.grad_log_prob = self._normal(rows)
        self.grad_entropy = self._normal(rows).mul_(0.01)
        self.selected = _spans(tokens, rows).to(device)
        self.all_hidden: Optional[Tensor] = None
        self.all_targets: Optional[Tensor] = None

    def _where(self) -> Dict[str, Any]:
        return dict(device=self.device, generator=self._generator)

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(*size, **self._where())

    def add_tokens(self) -> None:
        """Makes hidden states of all T tokens, the selected ones equal to `hidden`."""
        if self.all_hidden is None:
            hidden = torch.empty(
                self.tokens, self.shape.hidden_size, dtype=torch.bfloat16, device=self.device
            )
            hidden.normal_(generator=self._generator)
            hidden[self.selected] = self.hidden.detach()
            self.all_hidden = hidden.requires_grad_()
            size = (self.tokens,)
            self.all_targets = torch.randint(0, self.shape.vocab, size, **self._where())
            self.all_targets[self.selected] = self.targets

    def drop_tokens(self) -> None:
        """Frees what :meth:`add_tokens` made."""
        self.all_hidden = self.all_targets = None

    def clear_gradients(self) -> None:
        """Drops gradients. `main_grad` goes on accumulating, as over micro-batches."""
        for tensor in (self.hidden, self.weight, self.plain_weight, self.all_hidden):
            if tensor is not None:
                tensor.grad = None

    def zero_main_grad(self) -> None:
        """Starts `main_grad` anew."""
        if hasattr(self.weight, "main_grad"):
            self.weight.main_grad.zero_()


def _spans(tokens: int, rows: int) -> Tensor:
    spans = max(1, rows // 256)
    parts = []
    for span in range(spans):
        length = rows * (span + 1) // spans - rows * span // spans
        end = tokens * (span + 1) // spans
        parts.append(torch.arange(end - length, end))
    selected = torch.cat(parts)
    assert selected.numel() == rows, f"{rows} rows do not fit into {tokens} tokens"
    return selected


class Reference:
    """Values and gradients of some rows and vocabulary ids, in float64 of the bf16 operands."""

    def __init__(self, inputs: Inputs):
        hidden, weight = inputs.hidden.detach(), inputs.weight.detach()
        step = max(inputs.rows // _CHECKED, 1)
        self._rows = torch.arange(0, inputs.rows, step, device=inputs.device)[:_CHECKED]
        self._targets = inputs.targets
        targets = inputs.targets[self._rows]
        # In float64 the weight is four times as large: a part at a time.
        parts = weight.split(8192)
        x = torch.cat([hidden[self._rows].double() @ part.double().t() for part in parts], 1)
        log_p = torch.log_softmax(x, -1)
        self.log_prob = log_p.gather(1, targets[:, None])[:, 0]
        self.entropy = -(log_p.exp() * log_p).sum(-1)
        self._grad_hidden = {}
        for kind in ("value", "gradient"):
            grad = -log_p.exp() * inputs.grad_log_prob[self._rows, None]
            grad.scatter_add_(1, targets[:, None], inputs.grad_log_prob[self._rows, None].double())
            if kind == "gradient":
                entropy_part = log_p.exp() * (log_p + self.entropy[:, None])
                grad -= entropy_part * inputs.grad_entropy[self._rows, None]
            pairs = zip(grad.split(8192, dim=1), parts)
            self._grad_hidden[kind] = sum(columns @ part.double() for columns, part in pairs)
        self._ids = torch.cat([targets, torch.arange(4, device=inputs.device)]).unique()
        self._grad_weight = self._weight_gradients(inputs)

    def _weight_gradients(self, inputs: Inputs) -> Dict[str, Tensor]:
        # All rows take part in these, so their normalisers are taken in fp32, a part at a time.
        hidden, weight = inputs.hidden.detach(), inputs.weight.detach()
        shape = self._ids.numel(), hidden.shape[1]
        found = {
            kind: torch.zeros(shape, dtype=torch.float64, device=inputs.device)
            for kind in ("value", "gradient")
        }
        for start in range(0, inputs.rows, _REFERENCE_ROWS):
            rows = slice(start, start + _REFERENCE_ROWS)
            log_p = torch.log_softmax(_product_fp32(hidden[rows], weight.t()), -1)
            entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
            log_p = log_p[:, self._ids].double()
            is_target = inputs.targets[rows, None] == self._ids
            grad = (is_target.double() - log_p.exp()) * inputs.grad_log_prob[rows, None]
            found["value"] += grad.t() @ hidden[rows].double()
            grad -= log_p.exp() * (log_p + entropy) * inputs.grad_entropy[rows, None]
            found["gradient"] += grad.t() @ hidden[rows].double()
        return found

    def errors(
        self, provider: Provider, inputs: Inputs, job: str, results: Tuple
    ) -> Dict[str, Optional[float]]:
        """Largest absolute errors of values, relative errors (in norm) of gradients.

        Args:
            provider (Provider): Whose results and gradients these are.
            inputs (Inputs): With the gradients of a single call.
            job (str): What was called.
            results (Tuple): Log-probabilities and entropy or None.
        """
        log_prob, entropy = results
        found: Dict[str, Optional[float]] = {}
        if not provider.same_job:
            return found
        found["err_log_prob"] = (log_prob[self._rows] - self.log_prob).abs().max().item()
        if entropy is not None:
            found["err_entropy"] = (entropy[self._rows] - self.entropy).abs().max().item()
        if job == FORWARD:
            return found
        kind = "gradient" if job == ENTROPY_GRADIENT else "value"
        if provider.all_tokens:
            grad = inputs.all_hidden.grad[inputs.selected[self._rows]]
        else:
            grad = inputs.hidden.grad[self._rows]
        found["err_dhidden"] = _relative(grad, self._grad_hidden[kind])
        if not provider.all_tokens:  # the gradients of the other rows are 0, but no part of this
            grad = inputs.weight.main_grad if provider.main_grad else inputs.plain_weight.grad
            found["err_dweight"] = _relative(grad[self._ids], self._grad_weight[kind])
        return found


def _relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def _product_fp32(left: Tensor, right: Tensor, out: Optional[Tensor] = None) -> Tensor:
    if left.device.type == "cuda":
        if out is None:
            size = left.shape[0], right.shape[1]
            out = torch.empty(size, dtype=torch.float32, device=left.device)
        return torch.mm(left, right, out_dtype=torch.float32, out=out)
    return torch.mm(left.float(), right.float(), out=out)


class Gemms:
    """cuBLAS's own products of a shape, one call each over all rows, with the op's output types.

    Args:
        inputs (Inputs): The operands.
        backward (bool): Whether the products of backward are needed, too.
    """

    NAMES = ("forward", "dhidden", "dweight")

    def __init__(self, inputs: Inputs, backward: bool):
        self._backward = backward
        self._hidden, self._weight = inputs.hidden.detach(), inputs.weight.detach()
        size = inputs.rows, inputs.shape.vocab
        self._logits = torch.empty(size, dtype=torch.float32, device=inputs.device)
        self._device = inputs.device
        if not backward:
            return
        self._main_grad = inputs.weight.main_grad
        # A gradient as it comes, since the power that a product draws depends on its operands.
        self._grad = torch.empty(size, dtype=torch.bfloat16, device=inputs.device)
        _product_fp32(self._hidden, self._weight.t(), out=self._logits)
        for start in range(0, inputs.rows, _REFERENCE_ROWS):
            rows = slice(start, start + _REFERENCE_ROWS)
            part = self._logits[rows].softmax(-1).mul_(-inputs.grad_log_prob[rows, None])
            self._grad[rows] = part

    @torch.no_grad()
    def queue(self, backward: bool) -> List:
        """Runs them once; returns marks before, between and after them."""
        marks = [mark(self._device)]
        _product_fp32(self._hidden, self._weight.t(), out=self._logits)
        marks.append(mark(self._device))
        if backward:
            torch.mm(self._grad, self._weight)
            marks.append(mark(self._device))
            add_weight_gradient(self._main_grad, self._grad, self._hidden)
            marks.append(mark(self._device))
        return marks

    def medians(self, repeats: Sequence[List]) -> Dict[str, float]:
        """Median milliseconds of each product over the marks of several runs."""
        return {
            name: statistics.median(milliseconds(run[i], run[i + 1]) for run in repeats)
            for i, name in enumerate(self.NAMES[: len(repeats[0]) - 1])
        }

    def measure(self, repeat: int) -> Dict[str, float]:
        """Median milliseconds of each product, on their own."""
        for _ in range(2):
            self.queue(self._backward)
        marks = [self.queue(self._backward) for _ in range(repeat)]
        synchronize(self._device)
        return self.medians(marks)


def gemm_milliseconds(gemms: Dict[str, float], job: str, projected_again: float) -> float:
    """What the products of a job take.

    Args:
        gemms (Dict[str, float]): Milliseconds of each product.
        job (str): Forward alone, or with backward.
        projected_again (float): Share of the rows that are projected again in backward: 0 makes
            three products, 1 makes four.
    """
    if job == FORWARD:
        return gemms["forward"]
    return (1 + projected_again) * gemms["forward"] + gemms["dhidden"] + gemms["dweight"]


def add_weight_gradient(main_grad: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """Adds `grad.T @ hidden` to an fp32 `main_grad`, as the op does."""
    if grad.device.type == "cuda":
        torch.addmm(main_grad, grad.t(), hidden, out_dtype=torch.float32, out=main_grad)
    else:
        main_grad.addmm_(grad.t().float(), hidden.float())


def mark(device: torch.device):
    """A point in the device's queue; on a CPU, in time."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start, end) -> float:
    """Time between two marks that have been reached."""
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def call(provider: Provider, inputs: Inputs, job: str, entropy: str) -> Tuple:
    """Runs a job once. Gradients are left where the provider puts them."""
    if job == FORWARD:
        with torch.no_grad():
            return provider.run(inputs, entropy)
    log_prob, found = provider.run(inputs, entropy)
    if not provider.same_job:
        log_prob.backward()
    elif job == ENTROPY_GRADIENT:
        gradients = [inputs.grad_log_prob.to(log_prob.dtype), inputs.grad_entropy.to(found.dtype)]
        torch.autograd.backward([log_prob, found], gradients)
    else:
        log_prob.backward(inputs.grad_log_prob.to(log_prob.dtype))
    return log_prob.detach(), None if found is None else found.detach()


@dataclass
class Measurement:
    """What was measured of one provider in one job.

    Attributes:
        times (list): Milliseconds of each repetition.
        peak_gib (float): Peak memory above the inputs, gradients included.
        errors (dict): See :meth:`Reference.errors`.
        gemms (dict, optional): Products measured between the repetitions.
    """

    times: List[float]
    peak_gib: float
    errors: Dict[str, Optional[float]]
    gemms: Optional[Dict[str, float]] = None
    fifths: Tuple[float, float] = field(init=False)
    median: float = field(init=False)

    def __post_init__(self):
        self.median = statistics.median(self.times)
        quantiles = statistics.quantiles(self.times, n=5, method="inclusive")
        self.fifths = quantiles[0], quantiles[-1]


def measure(
    provider: Provider,
    inputs: Inputs,
    job: str,
    entropy: str,
    reference: Reference,
    repeat: int,
    seconds: float,
    gemms: Optional[Gemms] = None,
) -> Measurement:
    """Measures a provider in a job: errors first, then peak memory, then time.

    Args:
        provider (Provider): What to measure.
        inputs (Inputs): With tokens, if the provider takes all of them.
        job (str): One of `JOBS`.
        entropy (str): Kind of entropy.
        reference (Reference): Of these inputs.
        repeat (int): Repetitions, where they fit into the time.
        seconds (float): Time for the repetitions; 7 of the op and 3 of others are always made.
        gemms (Gemms, optional): Products to run before each repetition.
    """
    device = inputs.device
    inputs.clear_gradients()
    inputs.zero_main_grad()
    results = call(provider, inputs, job, entropy)  # compiles and loads kernels, too
    errors = reference.errors(provider, inputs, job, results)
    del results
    inputs.clear_gradients()
    call(provider, inputs, job, entropy)
    inputs.clear_gradients()

    peak = float("nan")
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    call(provider, inputs, job, entropy)
    synchronize(device)
    taken = time.perf_counter() - start
    if device.type == "cuda":
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    inputs.clear_gradients()

    least = 7 if provider.ours else 3
    repeat = max(min(repeat, int(seconds / taken)), least)
    if taken < 0.02:  # the allocator has its memory back, clocks are up
        for _ in range(3):
            call(provider, inputs, job, entropy)
            inputs.clear_gradients()
    marks, gemm_marks = [], []
    for _ in range(repeat):
        if gemms is not None:
            gemm_marks.append(gemms.queue(backward=job != FORWARD))
        start = mark(device)
        call(provider, inputs, job, entropy)
        marks.append((start, mark(device)))
        inputs.clear_gradients()
    synchronize(device)
    return Measurement(
        times=[milliseconds(start, end) for start, end in marks],
        peak_gib=peak,
        errors=errors,
        gemms=None if gemms is None else gemms.medians(gemm_marks),
    )
