# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Triton kernels over rows of logits; `triton_backend` launches them.

Common arguments, by name:

    logits          [n, columns] projection, rows `row_stride` elements apart
    bias            [columns], read if HAS_BIAS
    temperature     inverse temperatures, [n] if ROW_TEMPERATURE, else one element
    targets         [n] int64, ids of the whole vocabulary
    starts, ends    [n] int64, where each row's kept ids are; read if KEEP
    ids             [K] int64, kept ids, ascending within a row
    statistics      [fields, n] fp32, fields `field_stride` elements apart, numbered as in backend:
                    maximum 0, sum 1, target 2, weighted 3; of kept ids maximum 4, sum 5, weighted 6
    columns         number of this rank's columns that are part of the vocabulary
    scale, softcap  how logits are made of the projection, if HAS_SCALE and HAS_SOFTCAP
    ROUND           whether each step is rounded to the dtype of the projection
    MASKS_EMPTY     whether rows without ids keep their target alone

Row offsets are int64 throughout: rows times vocabulary pass 2^31 at 16k rows.
"""

import triton
import triton.language as tl

# Running maxima start here, a number, so that sums over nothing are 0 and no case of their own.
LOWEST = tl.constexpr(-1e20)
# What takes no part lies below that: its exponential is 0 beside any maximum.
NOTHING = tl.constexpr(-2e20)
# The hardware's exponential is that of base 2.
LOG2_E = tl.constexpr(1.4426950408889634)
# Neighbours that a lane takes in at once: one change of its running maximum for all of them.
GROUP = tl.constexpr(4)


@triton.jit
def _tanh(x):
    # Exact at both ends, where exp overflows to inf or underflows to 0.
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def _to_logit(
    x,
    bias,
    column,
    mask,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ROUND: tl.constexpr,
):
    """Logits before temperature of projected values, fp32; `x` is NOTHING where masked.

    -inf becomes NOTHING, too, a number that products and differences leave alone.
    """
    y = x.to(tl.float32)
    if HAS_BIAS:
        y += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
        if ROUND:
            y = y.to(x.dtype).to(tl.float32)
    if HAS_SCALE:
        y *= scale
        if ROUND:
            y = y.to(x.dtype).to(tl.float32)
    if HAS_SOFTCAP:
        y = softcap * _tanh(y / softcap)
        if ROUND:
            y = y.to(x.dtype).to(tl.float32)
    if HAS_BIAS or HAS_SCALE or HAS_SOFTCAP:
        y = tl.where(mask, y, NOTHING)
    return tl.maximum(y, NOTHING, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _slope(z, temperature, scale, softcap, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Derivative of logits by the projection."""
    slope = temperature
    if HAS_SCALE:
        slope *= scale
    if HAS_SOFTCAP:
        capped = z / (softcap * temperature)
        slope = slope * (1.0 - capped * capped)
    return slope


@triton.jit
def _accumulate(y, maximum, total, weighted, inverse, WITH_WEIGHTED: tl.constexpr):
    """Takes groups of logits before temperature, [lanes, group], into each lane's running sums.

    The sum of exp((y - m) / T) and that of (y - m) exp((y - m) / T), relative to the maximum m,
    which they move with.
    """
    factor = inverse * LOG2_E
    larger = tl.maximum(maximum, tl.max(y, 1))
    rescale = tl.exp2((maximum - larger) * factor)
    # One multiply-add before the exponential; the rounding of the product of m is the same for
    # the whole lane and lost in that of m itself.
    term = tl.exp2(y * factor - (larger * factor)[:, None])
    if WITH_WEIGHTED:
        weighted = rescale * (weighted + total * (maximum - larger))
        weighted += tl.sum(term * (y - larger[:, None]), 1)
    return larger, total * rescale + tl.sum(term, 1), weighted


@triton.jit
def _reduce(maximum, total, weighted, inverse):
    """Maximum and sums of logits at their temperature, from those of lanes before it."""
    largest = tl.max(maximum, 0)
    shift = maximum - largest
    rescale = tl.exp2(shift * (inverse * LOG2_E))
    weighted = tl.sum(rescale * (weighted + total * shift), 0)
    return largest * inverse, tl.sum(rescale * total, 0), weighted * inverse


@triton.jit
def statistics_kernel(
    hidden,
    weight,
    logits,
    bias,
    temperature,
    targets,
    starts,
    ends,
    statistics,
    columns,
    hidden_size,
    row_stride,
    hidden_row_stride,
    hidden_column_stride,
    weight_row_stride,
    weight_column_stride,
    field_stride,
    vocab_start,
    ignore_index,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ROUND: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    ENTROPY: tl.constexpr,
    SKIP_MASKED: tl.constexpr,
    MASKS_EMPTY: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Maximum, sums and the target's logit of a row; one program a row.

    `hidden` [n, h] and `weight` [v / tp, h] are read for the target alone, if not ROUND.
    SKIP_MASKED leaves out rows whose kept ids are all that matters.
    """
    # The last rows first: part of what the projection wrote last is still in the cache.
    row = tl.num_programs(0) - 1 - tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    inverse = tl.load(temperature + row if ROW_TEMPERATURE else temperature)
    last = columns
    if SKIP_MASKED:
        length = tl.load(ends + row) - tl.load(starts + row)
        masked = length >= 0 if MASKS_EMPTY else length > 0
        last = tl.where(masked, 0, columns)

    LANES: tl.constexpr = BLOCK // GROUP
    lanes = tl.arange(0, LANES)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    maximum = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    weighted = tl.zeros([LANES], tl.float32)
    for first in tl.range(0, last, BLOCK, num_stages=STAGES):
        column = first + lanes
        mask = column < columns
        x = tl.load(logits + column, mask=mask, other=NOTHING)
        y = _to_logit(
            x, bias, column, mask, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, ROUND
        )
        maximum, total, weighted = _accumulate(y, maximum, total, weighted, inverse, ENTROPY)
    largest, total_sum, weighted_sum = _reduce(maximum, total, weighted, inverse)

    target = tl.load(targets + row)
    column = target - vocab_start
    owned = (column >= 0) & (column < columns) & (target != ignore_index)
    x = tl.load(logits + column, mask=owned, other=NOTHING)
    y = _to_logit(x, bias, column, owned, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, ROUND)
    z = tl.where(y <= NOTHING, -float("inf"), y * inverse)
    if not ROUND:
        # The target's logit once more, as a sum of products, in place of the projected one.
        hidden += row.to(tl.int64) * hidden_row_stride
        weight += tl.where(owned, column, 0) * weight_row_stride
        products = tl.zeros([BLOCK], tl.float32)
        for first in range(0, tl.where(owned, hidden_size, 0), BLOCK):
            place = first + tl.arange(0, BLOCK)
            inside = place < hidden_size
            a = tl.load(hidden + place * hidden_column_stride, mask=inside, other=0.0)
            b = tl.load(weight + place * weight_column_stride, mask=inside, other=0.0)
            products += a.to(tl.float32) * b.to(tl.float32)
        x = tl.where(owned, tl.sum(products, 0), NOTHING)
        y = _to_logit(
            x, bias, column, owned, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, ROUND
        )
        projected = z
        z = tl.where(y <= NOTHING, -float("inf"), y * inverse)
        if SKIP_MASKED:
            owned &= last > 0
        if owned:
            # No larger maximum: sums may be relative to any number near it.
            term, old_term = tl.exp(z - largest), tl.exp(projected - largest)
            total_sum += tl.where(z > -float("inf"), term - old_term, 0.0)
            if ENTROPY:
                change = term * (z - largest) - old_term * (projected - largest)
                weighted_sum += tl.where(z > -float("inf"), change, 0.0)
    statistics += row
    tl.store(statistics + 0 * field_stride, largest)
    tl.store(statistics + 1 * field_stride, total_sum)
    tl.store(statistics + 2 * field_stride, z)
    if ENTROPY:
        tl.store(statistics + 3 * field_stride, weighted_sum)


@triton.jit
def _load_kept(ids, place, end, start, target, columns, vocab_start):
    """Some of a row's kept ids: which are in these columns, once each and not the target."""
    inside = place < end
    kept = tl.load(ids + place, mask=inside, other=-1)
    before = tl.load(ids + place - 1, mask=inside & (place > start), other=-1)
    column = kept - vocab_start
    here = inside & (kept != before) & (kept != target) & (column >= 0) & (column < columns)
    return kept, column, here


@triton.jit
def kept_statistics_kernel(
    logits,
    bias,
    temperature,
    targets,
    starts,
    ends,
    ids,
    kept_logits,
    statistics,
    columns,
    row_stride,
    field_stride,
    vocab_start,
    vocab_size,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ROUND: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same sums over a row's kept ids and its target, whose logits it stores for backward.

    One program a row, after `statistics_kernel`, which has stored the target's logit. An id
    that can't be one makes the sums NaN.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    inverse = tl.load(temperature + row if ROW_TEMPERATURE else temperature)
    start = tl.load(starts + row)
    end = tl.load(ends + row)
    target = tl.load(targets + row)

    lanes = tl.arange(0, BLOCK)
    maximum = tl.full([BLOCK], LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    highest = tl.full([BLOCK], -1, tl.int64)
    for first in range(start, end, BLOCK):
        place = first + lanes
        kept, column, here = _load_kept(ids, place, end, start, target, columns, vocab_start)
        highest = tl.maximum(highest, kept)
        x = tl.load(logits + column, mask=here, other=NOTHING)
        y = _to_logit(
            x, bias, column, here, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, ROUND
        )
        tl.store(kept_logits + place, y * inverse, mask=here)
        maximum, total, weighted = _accumulate(y[:, None], maximum, total, weighted, inverse, True)
    largest, total_sum, weighted_sum = _reduce(maximum, total, weighted, inverse)

    statistics += row
    z = tl.load(statistics + 2 * field_stride)
    z = tl.maximum(z, NOTHING, propagate_nan=tl.PropagateNan.ALL)
    shift = tl.minimum(largest - z, 0.0)
    rescale = tl.exp(shift)
    term = tl.exp(tl.minimum(z - largest, 0.0))
    largest = tl.maximum(largest, z)
    weighted_sum = rescale * (weighted_sum + total_sum * shift) + term * (z - largest)
    total_sum = total_sum * rescale + term
    # The target's own logit may be NaN.
    total_sum = tl.where((tl.max(highest, 0) >= vocab_size) | (z != z), float("nan"), total_sum)
    tl.store(statistics + 4 * field_stride, largest)
    tl.store(statistics + 5 * field_stride, total_sum)
    tl.store(statistics + 6 * field_stride, weighted_sum)


@triton.jit
def _combine(
    statistics,
    mask,
    rank_stride,
    field_stride,
    NUM_RANKS: tl.constexpr,
    MAXIMUM_FIELD: tl.constexpr,
    SUM_FIELD: tl.constexpr,
    WEIGHTED_FIELD: tl.constexpr,
    WITH_WEIGHTED: tl.constexpr,
):
    """Logsumexp and entropy of some rows, over all ranks, in rank order."""
    largest = tl.load(statistics + MAXIMUM_FIELD * field_stride, mask=mask, other=0.0)
    for rank in range(1, NUM_RANKS):
        part = statistics + rank * rank_stride
        largest = tl.maximum(
            largest, tl.load(part + MAXIMUM_FIELD * field_stride, mask=mask, other=0.0)
        )
    total = tl.zeros_like(largest)
    weighted = tl.zeros_like(largest)
    for rank in range(0, NUM_RANKS):
        part = statistics + rank * rank_stride
        shift = tl.load(part + MAXIMUM_FIELD * field_stride, mask=mask, other=0.0) - largest
        rank_total = tl.load(part + SUM_FIELD * field_stride, mask=mask, other=1.0)
        rescale = tl.exp(shift)
        total += rank_total * rescale
        if WITH_WEIGHTED:
            rank_weighted = tl.load(part + WEIGHTED_FIELD * field_stride, mask=mask, other=0.0)
            weighted += (rank_weighted + rank_total * shift) * rescale
    logarithm = tl.log(total)
    return largest + logarithm, logarithm - weighted / total


@triton.jit
def combine_kernel(
    statistics,
    targets,
    starts,
    ends,
    log_prob,
    entropy,
    log_prob_total,
    entropy_total,
    entropy_value,
    target_logit,
    num_rows,
    rank_stride,
    field_stride,
    vocab_size,
    ignore_index,
    NUM_RANKS: tl.constexpr,
    ENTROPY: tl.constexpr,
    KEEP: tl.constexpr,
    KEPT_ENTROPY: tl.constexpr,
    MASKS_EMPTY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Results of BLOCK rows from the statistics of all ranks, and what backward needs."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    statistics += row
    total, entropy_here = _combine(
        statistics, mask, rank_stride, field_stride, NUM_RANKS, 0, 1, 3, ENTROPY
    )
    chosen = total
    if KEEP:
        kept_total, kept_entropy = _combine(
            statistics, mask, rank_stride, field_stride, NUM_RANKS, 4, 5, 6, True
        )
        length = tl.load(ends + row, mask=mask, other=0) - tl.load(starts + row, mask=mask, other=0)
        masked = length >= 0 if MASKS_EMPTY else length > 0
        chosen = tl.where(masked, kept_total, total)
        chosen = tl.where(length < 0, float("nan"), chosen)
        if KEPT_ENTROPY:
            total = chosen
            entropy_here = tl.where(masked, kept_entropy, entropy_here)

    z = tl.load(statistics + 2 * field_stride, mask=mask, other=0.0)
    for rank in range(1, NUM_RANKS):
        part = statistics + rank * rank_stride
        z = tl.maximum(
            z,
            tl.load(part + 2 * field_stride, mask=mask, other=0.0),
            propagate_nan=tl.PropagateNan.ALL,
        )
    target = tl.load(targets + row, mask=mask, other=0)
    ignored = target == ignore_index
    invalid = (target < 0) | (target >= vocab_size)
    result = tl.where(invalid, float("nan"), z - chosen)
    tl.store(log_prob + row, tl.where(ignored, 0.0, result), mask=mask)
    tl.store(log_prob_total + row, chosen, mask=mask)
    if KEEP:
        tl.store(target_logit + row, z, mask=mask)
    if ENTROPY:
        result = tl.where(invalid, float("nan"), entropy_here)
        tl.store(entropy + row, tl.where(ignored, 0.0, result), mask=mask)
        tl.store(entropy_total + row, total, mask=mask)
        tl.store(entropy_value + row, entropy_here, mask=mask)


@triton.jit
def _gradient(
    z, total, coefficient, entropy_total, entropy, entropy_coefficient, HAS_ENTROPY: tl.constexpr
):
    """Gradient of logits but for the target's part: -g p - g' p (log p + entropy)."""
    gradient = -coefficient * tl.exp(z - total)
    if HAS_ENTROPY:
        log_p = z - entropy_total
        gradient -= entropy_coefficient * tl.exp(log_p) * (log_p + entropy)
    return gradient


@triton.jit
def grad_logits_kernel(
    logits,
    gradient,
    bias,
    temperature,
    targets,
    starts,
    ends,
    log_prob_total,
    entropy_total,
    entropy_value,
    grad_log_prob,
    grad_entropy,
    columns,
    all_columns,
    row_stride,
    gradient_row_stride,
    columns_a_program,
    vocab_start,
    ignore_index,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ROUND: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    HAS_LOG_PROB: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    KEEP: tl.constexpr,
    KEPT_ENTROPY: tl.constexpr,
    MASKS_EMPTY: tl.constexpr,
    SHRINKS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradient of the projection, in the memory of the projection.

    Program (row, i) does the i-th `columns_a_program` columns. Where the gradient's elements are
    smaller (SHRINKS), a row's gradient takes the first part of the row's memory: one program
    does the whole row, in ascending order, so that what it overwrites has been read, but for the
    first block, whose own elements other threads may still be reading. Padding columns up to
    `all_columns` get 0. Masked rows get what their kept ids don't change; `kept_grad_kernel`
    comes after.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    gradient += row.to(tl.int64) * gradient_row_stride
    inverse = tl.load(temperature + row if ROW_TEMPERATURE else temperature)
    target = tl.load(targets + row)
    target_column = target - vocab_start
    asked = False
    coefficient = 0.0
    entropy_coefficient = 0.0
    entropy_normalizer = 0.0
    entropy = 0.0
    if HAS_LOG_PROB:
        coefficient = tl.load(grad_log_prob + row)
        asked |= coefficient != 0.0
    if HAS_ENTROPY:
        entropy_coefficient = tl.load(grad_entropy + row)
        asked |= entropy_coefficient != 0.0
        entropy_normalizer = tl.load(entropy_total + row)
        entropy = tl.load(entropy_value + row)
    asked &= target != ignore_index
    total = tl.load(log_prob_total + row)
    dense = coefficient
    if KEEP:
        length = tl.load(ends + row) - tl.load(starts + row)
        masked = length >= 0 if MASKS_EMPTY else length > 0
        dense = tl.where(masked, 0.0, dense)
        if KEPT_ENTROPY:
            entropy_coefficient = tl.where(masked, 0.0, entropy_coefficient)

    lanes = tl.arange(0, BLOCK)
    start = tl.program_id(1) * columns_a_program
    end = tl.minimum(start + columns_a_program, all_columns)
    for first in tl.range(start, end, BLOCK, num_stages=STAGES):
        column = first + lanes
        mask = column < columns
        x = tl.load(logits + column, mask=mask, other=NOTHING)
        z = inverse * _to_logit(
            x, bias, column, mask, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP, ROUND
        )
        y = _gradient(
            z, total, dense, entropy_normalizer, entropy, entropy_coefficient, HAS_ENTROPY
        )
        y = tl.where(column == target_column, y + coefficient, y)
        y *= _slope(z, inverse, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
        # Not by a factor: a row that nobody asked for may hold NaN.
        y = tl.where(mask & asked, y, 0.0)
        if SHRINKS:
            tl.debug_barrier()
        tl.store(gradient + column, y.to(gradient.dtype.element_ty), mask=column < all_columns)


@triton.jit
def kept_grad_kernel(
    gradient,
    temperature,
    targets,
    starts,
    ends,
    ids,
    kept_logits,
    target_logit,
    log_prob_total,
    entropy_total,
    entropy_value,
    grad_log_prob,
    grad_entropy,
    columns,
    gradient_row_stride,
    vocab_start,
    ignore_index,
    scale,
    softcap,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ROW_TEMPERATURE: tl.constexpr,
    HAS_LOG_PROB: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    MASKS_EMPTY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of a masked row's kept ids and target, whole, over what is there; a program a row.

    From logits that the forward pass stored, since `grad_logits_kernel` has overwritten them;
    nothing is rounded twice.
    """
    row = tl.program_id(0)
    start = tl.load(starts + row)
    end = tl.load(ends + row)
    masked = end >= start if MASKS_EMPTY else end > start
    gradient += row.to(tl.int64) * gradient_row_stride
    inverse = tl.load(temperature + row if ROW_TEMPERATURE else temperature)
    target = tl.load(targets + row)
    asked = False
    coefficient = 0.0
    entropy_coefficient = 0.0
    entropy_normalizer = 0.0
    entropy = 0.0
    if HAS_LOG_PROB:
        coefficient = tl.load(grad_log_prob + row)
        asked |= coefficient != 0.0
    if HAS_ENTROPY:
        entropy_coefficient = tl.load(grad_entropy + row)
        asked |= entropy_coefficient != 0.0
        entropy_normalizer = tl.load(entropy_total + row)
        entropy = tl.load(entropy_value + row)
    asked &= masked & (target != ignore_index)
    total = tl.load(log_prob_total + row)
    # Of a row that nobody asked for, all of it is 0 already.
    last = tl.where(asked, end, start)

    lanes = tl.arange(0, BLOCK)
    for first in range(start, last, BLOCK):
        place = first + lanes
        _, column, here = _load_kept(ids, place, end, start, target, columns, vocab_start)
        z = tl.load(kept_logits + place, mask=here, other=0.0)
        y = _gradient(
            z, total, coefficient, entropy_normalizer, entropy, entropy_coefficient, HAS_ENTROPY
        )
        y *= _slope(z, inverse, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
        tl.store(gradient + column, y.to(gradient.dtype.element_ty), mask=here)

    column = target - vocab_start
    z = tl.load(target_logit + row)
    y = coefficient + _gradient(
        z, total, coefficient, entropy_normalizer, entropy, entropy_coefficient, HAS_ENTROPY
    )
    y *= _slope(z, inverse, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
    owned = asked & (column >= 0) & (column < columns)
    tl.store(gradient + column, y.to(gradient.dtype.element_ty), mask=owned)
