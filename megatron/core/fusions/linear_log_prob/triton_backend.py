# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The row work by Triton kernels, each over whole rows in one pass."""

from typing import Optional

import torch
import triton
from torch import Tensor

from megatron.core.fusions.linear_log_prob import triton_kernels as kernels
from megatron.core.fusions.linear_log_prob.backend import Logits, Normalizers, Results, RowBackend

# Columns of a block, warps and pipeline stages, measured on an H200 at v / tp of 38,016 and
# 62,080 (benchmarks/linear_log_prob.csv): both kernels then run near the copy bandwidth.
_STATISTICS = dict(BLOCK=2048, STAGES=1, num_warps=8)
_GRAD_LOGITS = dict(BLOCK=2048, STAGES=2, num_warps=8)
# Kept ids are tens or hundreds a row.
_KEPT_BLOCK = 256
_COMBINE_BLOCK = 256


class TritonBackend(RowBackend):
    """See :class:`RowBackend`."""

    name = "triton"

    def new_kept_logits(self, rows):
        """See RowBackend."""
        if rows.kept is None:
            return None
        ids = rows.kept.ids
        return torch.empty(ids.shape, dtype=torch.float32, device=ids.device)

    def take_statistics(self, hidden, weight, bias, logits, rows, how, statistics, kept_logits):
        """See RowBackend."""
        num_rows = logits.size(0)
        kept = rows.kept
        kernels.statistics_kernel[(num_rows,)](
            hidden,
            weight,
            logits,
            bias,
            rows.inverse_temperature,
            rows.targets,
            None if kept is None else kept.starts,
            None if kept is None else kept.ends,
            statistics,
            how.columns,
            hidden.size(1),
            logits.stride(0),
            *hidden.stride(),
            *weight.stride(),
            statistics.stride(0),
            how.vocab_start,
            how.ignore_index,
            **_transform(bias, how),
            ROW_TEMPERATURE=rows.inverse_temperature.numel() > 1,
            ENTROPY=how.entropy,
            SKIP_MASKED=kept is not None and (kept.entropy or not how.entropy),
            MASKS_EMPTY=kept is not None and kept.masks_empty,
            **_STATISTICS,
        )
        if kept is not None:
            kernels.kept_statistics_kernel[(num_rows,)](
                logits,
                bias,
                rows.inverse_temperature,
                rows.targets,
                kept.starts,
                kept.ends,
                kept.ids,
                kept_logits,
                statistics,
                how.columns,
                logits.stride(0),
                statistics.stride(0),
                how.vocab_start,
                how.vocab_size,
                **_transform(bias, how),
                ROW_TEMPERATURE=rows.inverse_temperature.numel() > 1,
                BLOCK=_KEPT_BLOCK,
            )

    def combine(self, statistics, rows, how):
        """See RowBackend."""
        kept = rows.kept
        num_rows = rows.targets.numel()

        # The results have memory of their own: a schedule may free it before backward.
        log_prob = statistics.new_empty(num_rows)
        entropy = statistics.new_empty(num_rows) if how.entropy else None
        saved = statistics.new_empty((4, num_rows)).unbind()
        normalizers = Normalizers(
            log_prob=saved[0],
            entropy=saved[1] if how.entropy else None,
            entropy_value=saved[2] if how.entropy else None,
            target=saved[3] if kept is not None else None,
        )
        if num_rows:
            kernels.combine_kernel[(triton.cdiv(num_rows, _COMBINE_BLOCK),)](
                statistics,
                rows.targets,
                None if kept is None else kept.starts,
                None if kept is None else kept.ends,
                log_prob,
                entropy,
                *normalizers,
                num_rows,
                statistics.stride(0),
                statistics.stride(1),
                how.vocab_size,
                how.ignore_index,
                NUM_RANKS=statistics.size(0),
                ENTROPY=how.entropy,
                KEEP=kept is not None,
                KEPT_ENTROPY=kept is not None and kept.entropy and how.entropy,
                MASKS_EMPTY=kept is not None and kept.masks_empty,
                BLOCK=_COMBINE_BLOCK,
            )
        return Results(log_prob, entropy, normalizers)

    def grad_logits(
        self, logits, bias, rows, how, normalizers, grad_log_prob, grad_entropy, kept_logits, dtype
    ):
        """See RowBackend."""
        num_rows, all_columns = logits.shape
        kept = rows.kept
        gradient = logits.view(dtype)[:, :all_columns]
        shrinks = dtype.itemsize < logits.dtype.itemsize
        block = _GRAD_LOGITS["BLOCK"]
        columns_a_program = triton.cdiv(all_columns, block) * block if shrinks else block
        has = dict(HAS_LOG_PROB=grad_log_prob is not None, HAS_ENTROPY=grad_entropy is not None)
        kernels.grad_logits_kernel[(num_rows, triton.cdiv(all_columns, columns_a_program))](
            logits,
            gradient,
            bias,
            rows.inverse_temperature,
            rows.targets,
            None if kept is None else kept.starts,
            None if kept is None else kept.ends,
            normalizers.log_prob,
            normalizers.entropy,
            normalizers.entropy_value,
            grad_log_prob,
            grad_entropy,
            how.columns,
            all_columns,
            logits.stride(0),
            gradient.stride(0),
            columns_a_program,
            how.vocab_start,
            how.ignore_index,
            **_transform(bias, how),
            **has,
            ROW_TEMPERATURE=rows.inverse_temperature.numel() > 1,
            KEEP=kept is not None,
            KEPT_ENTROPY=kept is not None and kept.entropy,
            MASKS_EMPTY=kept is not None and kept.masks_empty,
            SHRINKS=shrinks,
            **_GRAD_LOGITS,
        )
        if kept is not None:
            transform = _transform(bias, how)
            del transform["HAS_BIAS"], transform["ROUND"]
            kernels.kept_grad_kernel[(num_rows,)](
                gradient,
                rows.inverse_temperature,
                rows.targets,
                kept.starts,
                kept.ends,
                kept.ids,
                kept_logits,
                normalizers.target,
                normalizers.log_prob,
                normalizers.entropy,
                normalizers.entropy_value,
                grad_log_prob,
                grad_entropy,
                how.columns,
                gradient.stride(0),
                how.vocab_start,
                how.ignore_index,
                **transform,
                **has,
                ROW_TEMPERATURE=rows.inverse_temperature.numel() > 1,
                MASKS_EMPTY=kept.masks_empty,
                BLOCK=_KEPT_BLOCK,
            )
        return gradient


def _transform(bias: Optional[Tensor], how: Logits) -> dict:
    """Arguments of a kernel that makes logits of the projection."""
    return dict(
        scale=how.scale,
        softcap=how.softcap or 1.0,
        HAS_BIAS=bias is not None,
        HAS_SCALE=how.scale != 1.0,
        HAS_SOFTCAP=how.softcap is not None,
        ROUND=how.rounds,
    )
