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
from megatron.core.fusions.linear_log_prob.chunking import ChunkPlan, plan_chunks
from megatron.core.fusions.linear_log_prob.keep_set import KeptIds
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
        logits_budget (int): Bytes for kept logits and the working chunk; 0 without gradients.
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
        ctx.set_materialize_grads(False)
        with _on_device_without_autocast(hidden):
            rows = Rows(targets, inverse_temperature, kept)
            total_hidden, compute_weight = _operands(hidden, weight, settings)
            plan = _plan(targets.numel(), weight.size(0), settings)
            statistics = _new_statistics(rows, settings)
            kept_logits = settings.backend.new_kept_logits(rows)
            logits = None
            if plan.kept_rows:
                logits = _new_logits(plan.kept_rows, weight, settings)
            buffer = None
            for start, end in plan.chunks(0, plan.num_rows):
                if start < plan.kept_rows:
                    chunk = logits[start:end]
                else:
                    if buffer is None:
                        buffer = _new_logits(end - start, weight, settings)
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
            *(results.normalizers),
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
        ctx.logits_are_kept = True
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
        rows = Rows(targets, inverse_temperature, kept)
        with _on_device_without_autocast(hidden):
            total_hidden, compute_weight = _operands(hidden, weight, settings)
            grad_log_prob, grad_entropy = _as_rows(grad_log_prob), _as_rows(grad_entropy)
            parts = list(plan.parts())
            grad_hidden = weight_gradient = grad_bias = handle = None
            if needs_hidden:
                grad_hidden = torch.empty(
                    total_hidden.shape, dtype=total_hidden.dtype, device=hidden.device
                )
            if needs_weight:
                weight_gradient = WeightGradient(ctx.weight, ctx.main_grad, len(parts))
            if needs_bias:
                grad_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
            buffer = None
            for start, end in parts:
                if start < plan.kept_rows:
                    # Not by its own name: the version counter would call the saved tensor stale.
                    part, projected = logits.data, ctx.logits_are_kept
                    ctx.logits_are_kept = False
                else:
                    if buffer is None:
                        buffer = _new_logits(end - start, weight, settings)
                    part, projected = buffer[: end - start], False
                if not projected:
                    for first, last in plan.chunks(start, end):
                        settings.backend.project_again(
                            total_hidden[first:last],
                            compute_weight,
                            part[first - start : last - start],
                        )
                grad_logits = settings.backend.grad_logits(
                    part,
                    bias,
                    rows.part(start, end),
                    settings.logits,
                    normalizers.part(start, end),
                    None if grad_log_prob is None else grad_log_prob[start:end],
                    None if grad_entropy is None else grad_entropy[start:end],
                    kept_logits,
                    settings.compute_dtype,
                )
                if needs_hidden:
                    torch.mm(grad_logits, compute_weight, out=grad_hidden[start:end])
                    if end == plan.num_rows:
                        # The last product with hidden states runs beside the reduction.
                        grad_hidden, handle = _start_reduction(grad_hidden, settings)
                if needs_weight:
                    weight_gradient.add(grad_logits, total_hidden[start:end])
                if needs_bias:
                    grad_bias += grad_logits.sum(0, dtype=torch.float32)
            if handle is not None:
                handle.wait()
            return (
                None if grad_hidden is None else grad_hidden.to(hidden.dtype).view(hidden.shape),
                None if weight_gradient is None else weight_gradient.finish(),
                None if grad_bias is None else grad_bias.to(bias.dtype),
                None,
                None,
                None,
                None,
                None,
            )


@contextlib.contextmanager
def _on_device_without_autocast(tensor: Tensor):
    """Kernels go to the current device, which another thread may have set otherwise.

    Operands are cast by hand and once, where autocast would cast in every product.
    """
    on_device = contextlib.nullcontext()
    if tensor.device.type == "cuda":
        on_device = torch.cuda.device(tensor.device)
    with on_device, torch.autocast(tensor.device.type, enabled=False):
        yield


def _operands(hidden: Tensor, weight: Tensor, settings: Settings) -> Tuple[Tensor, Tensor]:
    """The operands of the projection `[N, h]` and `[v / tp, h]`.

    With sequence parallelism this is one all-gather of `hidden`, in forward and in backward, as
    in the linear layers: the shard is what is saved.
    """
    hidden = hidden.to(settings.compute_dtype)
    weight = weight.to(settings.compute_dtype)
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


def _plan(num_rows: int, columns: int, settings: Settings) -> ChunkPlan:
    row_bytes = _row_stride(columns, settings) * settings.logits_dtype.itemsize
    return plan_chunks(num_rows, row_bytes, settings.logits_budget)


def _new_logits(num_rows: int, weight: Tensor, settings: Settings) -> Tensor:
    """Memory for the logits of some rows."""
    columns = weight.size(0)
    memory = torch.empty(
        (num_rows, _row_stride(columns, settings)),
        dtype=settings.logits_dtype,
        device=weight.device,
    )
    return memory[:, :columns]


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
    gathered = statistics.new_empty((tp_size, *statistics.shape))
    torch.distributed.all_gather_into_tensor(gathered, statistics, group=settings.tp_group)
    return gathered


def _as_rows(gradient: Optional[Tensor]) -> Optional[Tensor]:
    """An incoming gradient as the kernels read it: it may be expanded, or strided."""
    return None if gradient is None else gradient.float().contiguous()


def _start_reduction(grad_hidden: Tensor, settings: Settings):
    """Starts the one reduction of the gradient of hidden states, of which ranks hold parts."""
    if settings.sequence_parallel:
        tp_size = get_pg_size(settings.tp_group)
        shard = grad_hidden.new_empty((grad_hidden.size(0) // tp_size, grad_hidden.size(1)))
        handle = torch.distributed.reduce_scatter_tensor(
            shard, grad_hidden, group=settings.tp_group, async_op=True
        )
        return shard, handle
    if settings.allreduce_dgrad:
        handle = torch.distributed.all_reduce(grad_hidden, group=settings.tp_group, async_op=True)
        return grad_hidden, handle
    return grad_hidden, None
