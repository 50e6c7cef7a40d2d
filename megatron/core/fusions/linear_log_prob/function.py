# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The autograd function: chunks, collectives, what is kept, and both matrix products' gradients."""

import contextlib
from dataclasses import dataclass
from typing import Optional, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.fusions.linear_log_prob.backend import (
    Logits,
    Normalizers,
    RowBackend,
    Rows,
    count_fields,
)
from megatron.core.fusions.linear_log_prob.backward_pass import BackwardPass
from megatron.core.fusions.linear_log_prob.chunking import ChunkPlan, plan_chunks
from megatron.core.fusions.linear_log_prob.keep_set import KeptIds
from megatron.core.fusions.linear_log_prob.matrix_products import as_matrix
from megatron.core.fusions.linear_log_prob.weight_gradient import WeightGradient
from megatron.core.utils import get_pg_size

# Rows of logits start at a multiple of this, so that matrix products can load whole vectors.
_ROW_ALIGNMENT_BYTES = 128


@dataclass(frozen=True)
class Settings:
    """Everything about a call that is no tensor.

    Attributes:
        backend (RowBackend): Does the work on rows of logits.
        logits (Logits): How logits are made of the projection.
        entropy_gradient (bool): Whether the entropy has a gradient.
        compute_dtype (torch.dtype): Of the operands of all matrix products.
        logits_dtype (torch.dtype): Of the projection.
        logits_budget (int): Bytes for kept logits and the working memory.
        needs_gradient (bool): Whether there is going to be a backward pass.
        tp_group (ProcessGroup, optional): The ranks that share the vocabulary.
        sequence_parallel (bool): Whether hidden states are a shard of the rows.
        allreduce_dgrad (bool): Whether the gradient of hidden states is all-reduced.
    """

    backend: RowBackend
    logits: Logits
    entropy_gradient: bool
    compute_dtype: torch.dtype
    logits_dtype: torch.dtype
    logits_budget: int
    needs_gradient: bool
    tp_group: Optional[torch.distributed.ProcessGroup]
    sequence_parallel: bool
    allreduce_dgrad: bool


def apply_linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    targets: Tensor,
    inverse_temperature: Tensor,
    kept: Optional[KeptIds],
    main_grad: Optional[Tensor],
    settings: Settings,
) -> Tuple[Tensor, Optional[Tensor]]:
    """Runs the autograd function on checked arguments.

    Args:
        hidden (Tensor): `[N, h]`, with sequence parallelism `[N / tp, h]`.
        weight (Tensor): `[v / tp, h]`.
        bias (Tensor, optional): `[v / tp]`.
        targets (Tensor): `[N]`.
        inverse_temperature (Tensor): `[N]` or `[1]` fp32.
        kept (KeptIds, optional): See :class:`Rows`.
        main_grad (Tensor, optional): Where the gradient of the weight is added.
        settings (Settings): See there.

    Returns:
        Tuple[Tensor, Optional[Tensor]]: Log-probabilities and entropy `[N]` fp32.
    """
    log_prob, entropy = _LinearLogProb.apply(
        hidden, weight, bias, targets, inverse_temperature, kept, main_grad, settings
    )
    return log_prob, entropy


class _LinearLogProb(torch.autograd.Function):
    """See linear_log_prob."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, inverse_temperature, kept, main_grad, settings):
        """Forward."""
        with _on_device_without_autocast(hidden):
            rows = Rows(targets, inverse_temperature, kept)
            total_hidden, compute_weight = _operands(hidden, weight, settings)
            plan = _plan(targets.numel(), weight, settings)
            statistics = _new_statistics(rows, settings)
            kept_logits = settings.backend.new_kept_logits(rows)
            logits = buffer = None
            kept_rows = plan.kept_rows if settings.needs_gradient else 0
            if kept_rows:
                logits = _new_logits(kept_rows, weight.size(0), hidden.device, settings)
            for start, end in plan.chunks():
                if start < kept_rows:
                    chunk = logits[start:end]
                else:
                    if buffer is None or buffer.size(0) < end - start:
                        buffer = None
                        buffer = _new_logits(end - start, weight.size(0), hidden.device, settings)
                    chunk = buffer[: end - start]
                settings.backend.project_rows(
                    total_hidden[start:end],
                    compute_weight,
                    bias,
                    chunk,
                    rows.part(start, end),
                    settings.logits,
                    statistics[:, start:end],
                    kept_logits,
                )
            results = settings.backend.combine(
                _gather_statistics(statistics, settings), rows, settings.logits
            )
        ctx.save_for_backward(
            hidden,
            weight,
            bias,
            targets,
            inverse_temperature,
            *results.normalizers,
            *((kept.starts, kept.ends, kept.ids) if kept is not None else (None,) * 3),
            kept_logits,
            logits,
        )
        ctx.plan = plan
        ctx.settings = settings
        ctx.keep_options = None if kept is None else (kept.masks_empty, kept.entropy)
        # Attributes of the parameter itself are wanted in backward, and a saved tensor may come
        # back as a copy. main_grad can't be saved: micro-batches change it in place.
        ctx.weight = weight
        ctx.main_grad = main_grad
        # Backward turns the kept logits into their gradient, so a second one can't use them.
        ctx.logits_are_intact = True
        ctx.set_materialize_grads(False)
        if results.entropy is not None and not settings.entropy_gradient:
            ctx.mark_non_differentiable(results.entropy)
        return results.log_prob, results.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_prob, grad_entropy):
        """Backward."""
        hidden, weight, bias, targets, inverse_temperature, *rest = ctx.saved_tensors
        normalizers, (starts, ends, ids, kept_logits, logits) = Normalizers(*rest[:4]), rest[4:]
        kept = None if starts is None else KeptIds(starts, ends, ids, *ctx.keep_options)
        settings, plan = ctx.settings, ctx.plan
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        with _on_device_without_autocast(hidden):
            total_hidden, compute_weight = _operands(hidden, weight, settings)
            weight_gradient = None
            if needs_weight:
                weight_gradient = WeightGradient(
                    ctx.weight, ctx.main_grad, plan.num_blocks, settings.compute_dtype
                )
            work = BackwardPass(
                backend=settings.backend,
                how=settings.logits,
                hidden=total_hidden,
                weight=compute_weight,
                bias=bias,
                rows=Rows(targets, inverse_temperature, kept),
                normalizers=normalizers,
                kept_logits=kept_logits,
                grad_log_prob=grad_log_prob,
                grad_entropy=grad_entropy,
                weight_gradient=weight_gradient,
                needs_hidden=needs_hidden,
                needs_bias=needs_bias,
            )
            reduction = _Reduction(settings)
            if plan.kept_rows:
                # Not by its own name: the version counter would call the saved tensor stale.
                _use_kept_rows(work, plan, logits.data, ctx.logits_are_intact, reduction)
                ctx.logits_are_intact = False
            _use_other_rows(work, plan, settings, reduction)
            grad_hidden = reduction.finish(work.grad_hidden)
            return (
                None if grad_hidden is None else grad_hidden.to(hidden.dtype),
                None if weight_gradient is None else weight_gradient.finish(),
                None if work.grad_bias is None else work.grad_bias.to(bias.dtype),
                None,
                None,
                None,
                None,
                None,
            )


def _use_kept_rows(
    work: BackwardPass, plan: ChunkPlan, logits: Tensor, intact: bool, reduction: "_Reduction"
) -> None:
    """Backward of the rows whose logits were kept, all at once."""
    rows, columns = logits.shape
    if not intact:
        for start, end in plan.kept_chunks():
            work.project(logits[start:end], start, end, 0, columns)
    gradient = work.grad_logits(logits, 0, rows, 0, columns)
    out = None if work.grad_hidden is None else work.grad_hidden[:rows]
    work.multiply_into_hidden(gradient, out, 0, columns)
    if rows == plan.num_rows:
        reduction.start(work.grad_hidden)
    work.add_to_weight(gradient, 0, rows, 0, columns)


def _use_other_rows(
    work: BackwardPass, plan: ChunkPlan, settings: Settings, reduction: "_Reduction"
) -> None:
    """Backward of the other rows, projected again tile by tile."""
    buffer = total = None
    columns = work.num_columns
    slices = list(plan.slices(columns))
    for start, end in plan.blocks():
        if buffer is None:
            buffer = _new_logits(end - start, plan.slice_columns, work.device, settings)
            if len(slices) > 1:
                total = work.new_hidden_total(end - start)
        out = None if work.grad_hidden is None else work.grad_hidden[start:end]
        block_total = out if total is None else total[: end - start]
        for first, last in slices:
            logits = buffer[: end - start, : last - first]
            work.project(logits, start, end, first, last)
            gradient = work.grad_logits(logits, start, end, first, last)
            work.multiply_into_hidden(gradient, block_total, first, last, add=first > 0)
            if last == columns:
                if total is not None:
                    out.copy_(block_total)
                if end == plan.num_rows:
                    reduction.start(work.grad_hidden)
            work.add_to_weight(gradient, start, end, first, last)


class _Reduction:
    """The one reduction of the gradient of hidden states, of which each rank holds a part.

    It starts when the gradient is complete and runs beside the last product, that of the weight.
    """

    def __init__(self, settings: Settings):
        self._settings = settings
        self._handle = self._shard = None

    def start(self, grad_hidden: Optional[Tensor]) -> None:
        """Starts it where there is something to reduce."""
        if grad_hidden is None:
            return
        tp_group = self._settings.tp_group
        if self._settings.sequence_parallel:
            num_rows = grad_hidden.size(0) // get_pg_size(tp_group)
            self._shard = grad_hidden.new_empty((num_rows, grad_hidden.size(1)))
            self._handle = torch.distributed.reduce_scatter_tensor(
                self._shard, grad_hidden, group=tp_group, async_op=True
            )
        elif self._settings.allreduce_dgrad:
            self._handle = torch.distributed.all_reduce(grad_hidden, group=tp_group, async_op=True)

    def finish(self, grad_hidden: Optional[Tensor]) -> Optional[Tensor]:
        """The reduced gradient, with sequence parallelism this rank's shard."""
        if self._handle is not None:
            self._handle.wait()
        return grad_hidden if self._shard is None else self._shard


def _on_device_without_autocast(tensor: Tensor) -> contextlib.ExitStack:
    """Kernels go to the current device, which another thread may have set otherwise.

    Operands are cast by hand and once, where autocast would cast in every product.
    """
    stack = contextlib.ExitStack()
    device = tensor.device
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        stack.enter_context(torch.cuda.device(device))
    if torch.is_autocast_enabled(device.type):
        stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack


def _operands(hidden: Tensor, weight: Tensor, settings: Settings) -> Tuple[Tensor, Tensor]:
    """The operands of the projection `[N, h]` and `[v / tp, h]`.

    With sequence parallelism this is one all-gather of `hidden`, in forward and in backward, as
    in the linear layers: the shard is what is saved.
    """
    hidden = as_matrix(hidden.to(settings.compute_dtype))
    weight = as_matrix(weight.to(settings.compute_dtype))
    if not settings.sequence_parallel or not hidden.numel():
        return hidden, weight
    hidden = hidden.contiguous()
    tp_size = get_pg_size(settings.tp_group)
    total_hidden = hidden.new_empty((hidden.size(0) * tp_size, hidden.size(1)))
    torch.distributed.all_gather_into_tensor(total_hidden, hidden, group=settings.tp_group)
    return total_hidden, weight


def _row_stride(columns: int, settings: Settings) -> int:
    """Elements from one row of logits to the next."""
    alignment = _ROW_ALIGNMENT_BYTES // settings.logits_dtype.itemsize
    return -(-columns // alignment) * alignment


def _plan(num_rows: int, weight: Tensor, settings: Settings) -> ChunkPlan:
    columns, hidden_size = weight.shape
    itemsize = settings.logits_dtype.itemsize
    return plan_chunks(
        num_rows,
        _row_stride(columns, settings) * itemsize,
        settings.logits_budget,
        columns=columns,
        hidden_size=hidden_size,
        itemsize=itemsize,
    )


def _new_logits(num_rows: int, columns: int, device: torch.device, settings: Settings) -> Tensor:
    """Memory for logits."""
    shape = (num_rows, _row_stride(columns, settings))
    return torch.empty(shape, dtype=settings.logits_dtype, device=device)[:, :columns]


def _new_statistics(rows: Rows, settings: Settings) -> Tensor:
    fields = count_fields(settings.logits.entropy, rows.kept is not None)
    return torch.empty(
        (fields, rows.targets.numel()), dtype=torch.float32, device=rows.targets.device
    )


def _gather_statistics(statistics: Tensor, settings: Settings) -> Tensor:
    """The statistics of all ranks `[tp, fields, N]`, by the call's one collective of its own."""
    tp_size = get_pg_size(settings.tp_group)
    if tp_size == 1 or not statistics.numel():
        return statistics.expand(tp_size, *statistics.shape)
    fields, num_rows = statistics.shape
    gathered = statistics.new_empty((tp_size * fields, num_rows))
    torch.distributed.all_gather_into_tensor(gathered, statistics, group=settings.tp_group)
    return gathered.view(tp_size, fields, num_rows)
