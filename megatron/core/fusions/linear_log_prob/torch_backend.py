# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The row work in plain torch, on any device: the reference, and what runs without Triton."""

from dataclasses import replace
from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from megatron.core.fusions.linear_log_prob.backend import (
    KEPT_MAXIMUM,
    KEPT_SUM,
    KEPT_WEIGHTED,
    MAXIMUM,
    SUM,
    TARGET,
    WEIGHTED,
    Logits,
    Normalizers,
    Results,
    RowBackend,
    Rows,
)

# A logit below all others, and still a number: sums over nothing then need no special case.
_LOWEST = -1e30


class TorchBackend(RowBackend):
    """See :class:`RowBackend`."""

    name = "torch"

    def take_statistics(self, hidden, weight, bias, logits, rows, how, statistics, kept_logits):
        """See RowBackend."""
        z = _make_logits(logits, bias, rows, how)
        if how.columns and not how.rounds:
            _compute_targets(z, hidden, weight, bias, rows, how)
        # A shard may have no column of the vocabulary.
        target = z.new_full(z.shape[:1], -torch.inf)
        maximum = z.new_full(z.shape[:1], _LOWEST)
        if how.columns:
            owned, column = _find(rows.targets, how)
            target = z.gather(1, column.unsqueeze(1)).squeeze(1).where(owned, target)
            maximum = z.amax(1).maximum(maximum)
        exponential, weighted = _sums(z, maximum.unsqueeze(1))
        statistics[MAXIMUM] = maximum
        statistics[SUM] = exponential.sum(1)
        statistics[TARGET] = target
        if how.entropy:
            statistics[WEIGHTED] = weighted.sum(1)
        if rows.kept is not None:
            _take_kept_statistics(z, target, rows, how, statistics)

    def combine(self, statistics, rows, how):
        """See RowBackend."""
        total, weighted = _combine(statistics, MAXIMUM, SUM, WEIGHTED if how.entropy else None)
        target = statistics[:, TARGET].amax(0)
        kept = rows.kept
        log_prob_total = total
        if kept is not None:
            kept_total, kept_weighted = _combine(statistics, KEPT_MAXIMUM, KEPT_SUM, KEPT_WEIGHTED)
            masked = _masked(rows)
            log_prob_total = kept_total.where(masked, total)
            log_prob_total = log_prob_total.masked_fill(kept.ends < kept.starts, torch.nan)
            if kept.entropy and how.entropy:
                total, weighted = log_prob_total, kept_weighted.where(masked, weighted)
        ignored = rows.targets == how.ignore_index
        invalid = (rows.targets < 0) | (rows.targets >= how.vocab_size)
        log_prob = target - log_prob_total
        log_prob = log_prob.masked_fill(invalid, torch.nan).masked_fill(ignored, 0.0)
        entropy = None
        if how.entropy:
            entropy = (-weighted).masked_fill(invalid, torch.nan).masked_fill(ignored, 0.0)
        return Results(
            log_prob,
            entropy,
            Normalizers(
                log_prob=log_prob_total,
                entropy=total if how.entropy else None,
                entropy_value=-weighted if how.entropy else None,
                target=None,
            ),
        )

    def grad_logits(
        self, logits, bias, rows, how, normalizers, grad_log_prob, grad_entropy, kept_logits, dtype
    ):
        """See RowBackend."""
        z = _make_logits(logits, bias, rows, how)
        grad = torch.zeros_like(z)
        kept = rows.kept
        masked = None if kept is None else _masked(rows)
        if grad_log_prob is not None:
            of_row = grad_log_prob if kept is None else grad_log_prob.masked_fill(masked, 0.0)
            grad -= of_row.unsqueeze(1) * (z - normalizers.log_prob.unsqueeze(1)).exp()
            owned, column = _find(rows.targets, how)
            if how.columns:
                grad.scatter_add_(
                    1, column.unsqueeze(1), grad_log_prob.masked_fill(~owned, 0.0).unsqueeze(1)
                )
        if grad_entropy is not None:
            of_row = grad_entropy
            if kept is not None and kept.entropy:
                of_row = of_row.masked_fill(masked, 0.0)
            grad -= of_row.unsqueeze(1) * _entropy_slope(
                z, normalizers.entropy.unsqueeze(1), normalizers.entropy_value.unsqueeze(1)
            )
        if kept is not None:
            _add_kept_gradient(z, grad, rows, how, normalizers, grad_log_prob, grad_entropy)
        inverse_temperature = rows.inverse_temperature.unsqueeze(1)
        if how.softcap is not None:
            grad *= 1 - (z / (how.softcap * inverse_temperature)).square()
        grad *= how.scale * inverse_temperature
        # Nothing of a row that nobody asked for, whatever is in it.
        asked = torch.zeros_like(rows.targets, dtype=torch.bool)
        for gradient in (grad_log_prob, grad_entropy):
            if gradient is not None:
                asked |= gradient != 0
        grad.masked_fill_(~(asked & (rows.targets != how.ignore_index)).unsqueeze(1), 0.0)
        # It takes the first part of the memory of each row.
        result = logits.view(dtype)[:, : logits.size(1)]
        result[:, : how.columns] = grad
        result[:, how.columns :] = 0
        return result


def _compute_targets(
    z: Tensor, hidden: Tensor, weight: Tensor, bias: Optional[Tensor], rows: Rows, how: Logits
) -> None:
    """Puts the targets' logits, computed from their operands, into `z`."""
    owned, column = _find(rows.targets, how)
    row, column = owned.nonzero().squeeze(1), column[owned]
    projected = (hidden[row].float() * weight[column].float()).sum(1)
    rows = Rows(rows.targets, rows.inverse_temperature.expand(z.size(0))[row], None)
    how = replace(how, columns=1)
    bias = None if bias is None else bias[column].unsqueeze(1)
    z[row, column] = _make_logits(projected.unsqueeze(1), bias, rows, how).squeeze(1)


def _make_logits(logits: Tensor, bias: Optional[Tensor], rows: Rows, how: Logits) -> Tensor:
    """Logits `[n, columns]` fp32 of projected rows."""

    def rounded(y):
        return y.to(logits.dtype).float() if how.rounds else y

    y = logits[:, : how.columns].float()
    if bias is not None:
        y = rounded(y + bias[..., : how.columns].float())
    if how.scale != 1.0:
        y = rounded(y * how.scale)
    if how.softcap is not None:
        y = rounded(how.softcap * torch.tanh(y / how.softcap))
    return y * rows.inverse_temperature.unsqueeze(1)


def _find(targets: Tensor, how: Logits) -> Tuple[Tensor, Tensor]:
    """Whether each row's target is in this rank's columns, and in which, 0 where it isn't."""
    column = targets - how.vocab_start
    owned = (column >= 0) & (column < how.columns) & (targets != how.ignore_index)
    return owned, column.masked_fill(~owned, 0)


def _sums(z: Tensor, maximum: Tensor) -> Tuple[Tensor, Tensor]:
    """exp(z - maximum) and (z - maximum) * exp(z - maximum), the latter 0 where exp is."""
    shifted = z - maximum
    exponential = shifted.exp()
    return exponential, (shifted * exponential).masked_fill(exponential == 0, 0.0)


def _combine(statistics: Tensor, maximum: int, total: int, weighted: Optional[int]):
    """Logsumexp, and the sum of softmax * (z - logsumexp), over the parts of all ranks.

    Args:
        statistics (Tensor): `[tp, fields, N]`.
        maximum, total, weighted (int): Fields; the last one is None where it isn't wanted.
    """
    overall = statistics[:, maximum].amax(0)
    exponentials = torch.zeros_like(overall)
    products = torch.zeros_like(overall)
    # In rank order, so that every rank adds alike.
    for part in statistics:
        shift = part[maximum] - overall
        exponentials += part[total] * shift.exp()
        if weighted is not None:
            products += (part[weighted] + part[total] * shift) * shift.exp()
    logsum = exponentials.log()
    return overall + logsum, None if weighted is None else products / exponentials - logsum


def _entropy_slope(z: Tensor, total: Tensor, entropy: Tensor) -> Tensor:
    """Minus the derivative of the entropy by its logits, p * (log p + entropy)."""
    log_p = z - total
    p = log_p.exp()
    return (p * (log_p + entropy)).masked_fill(p == 0, 0.0)


def _masked(rows: Rows) -> Tensor:
    """`[n]`, which rows are normalised over kept ids."""
    lengths = rows.kept.ends - rows.kept.starts
    return lengths >= 0 if rows.kept.masks_empty else lengths > 0


class _Kept(NamedTuple):
    """Kept ids of some rows that are in this rank's columns, each once, and without the target."""

    row: Tensor
    column: Tensor
    # [n] rows that list an id that can't be one.
    malformed: Tensor
    # [n] number of them in each row
    lengths: Tensor


def _find_kept(rows: Rows, how: Logits) -> _Kept:
    """Finds the kept ids of some rows."""
    kept = rows.kept
    num_rows = rows.targets.numel()
    lengths = (kept.ends - kept.starts).clamp(min=0)
    row = torch.repeat_interleave(torch.arange(num_rows, device=lengths.device), lengths)
    place = torch.arange(row.numel(), device=lengths.device) - (lengths.cumsum(0) - lengths)[row]
    ids = kept.ids[kept.starts[row] + place]
    first = torch.ones_like(row, dtype=torch.bool)
    first[1:] = (ids[1:] != ids[:-1]) | (place[1:] == 0)
    malformed = torch.zeros(num_rows, dtype=torch.bool, device=row.device)
    malformed[row[ids >= how.vocab_size]] = True
    column = ids - how.vocab_start
    here = first & (ids != rows.targets[row]) & (column >= 0) & (column < how.columns)
    row, column = row[here], column[here]
    return _Kept(row, column, malformed, torch.bincount(row, minlength=num_rows))


def _take_kept_statistics(
    z: Tensor, target: Tensor, rows: Rows, how: Logits, statistics: Tensor
) -> None:
    """Takes the statistics of kept ids, the target among them."""
    found = _find_kept(rows, how)
    values = z[found.row, found.column]

    def reduced(data, how_reduced, initial):
        # Unlike index_add, the same bits each time on a GPU, too.
        return torch.segment_reduce(
            data, how_reduced, lengths=found.lengths, initial=initial, unsafe=True
        )

    maximum = reduced(values, "max", _LOWEST).maximum(target)
    exponential, weighted = _sums(values, maximum[found.row])
    target_exponential, target_weighted = _sums(target, maximum)
    statistics[KEPT_MAXIMUM] = maximum
    total = reduced(exponential, "sum", 0.0) + target_exponential
    statistics[KEPT_SUM] = total.masked_fill(found.malformed, torch.nan)
    statistics[KEPT_WEIGHTED] = reduced(weighted, "sum", 0.0) + target_weighted


def _add_kept_gradient(
    z: Tensor,
    grad: Tensor,
    rows: Rows,
    how: Logits,
    normalizers: Normalizers,
    grad_log_prob: Optional[Tensor],
    grad_entropy: Optional[Tensor],
) -> None:
    """Adds what masked rows get through the sum over their kept ids, but for the target's one."""
    found = _find_kept(rows, how)
    owned, target_column = _find(rows.targets, how)
    owned = owned & _masked(rows)
    # The target is one of them.
    row = torch.cat([found.row, owned.nonzero().squeeze(1)])
    column = torch.cat([found.column, target_column[owned]])
    values = z[row, column]
    added = torch.zeros_like(values)
    if grad_log_prob is not None:
        added -= grad_log_prob[row] * (values - normalizers.log_prob[row]).exp()
    if grad_entropy is not None and rows.kept.entropy:
        added -= grad_entropy[row] * _entropy_slope(
            values, normalizers.entropy[row], normalizers.entropy_value[row]
        )
    # No two of them are in one place.
    grad[row, column] += added
