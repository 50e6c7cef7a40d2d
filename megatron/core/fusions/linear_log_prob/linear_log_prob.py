# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The public function: checks its arguments, then runs the autograd function."""

import math
import os
from numbers import Real
from typing import Optional, Tuple, Union

import torch
from torch import Tensor

from megatron.core.fusions.linear_log_prob.backend import Logits, choose_backend
from megatron.core.fusions.linear_log_prob.function import Settings, apply_linear_log_prob
from megatron.core.fusions.linear_log_prob.keep_set import (
    KeepSet,
    KeptIds,
    check_keep_set,
    check_keep_set_values,
    prepare_keep_set,
)
from megatron.core.fusions.linear_log_prob.matrix_products import check_fp32_products
from megatron.core.fusions.linear_log_prob.weight_gradient import accumulates_in_main_grad
from megatron.core.utils import get_pg_rank, get_pg_size, get_tensor_model_parallel_group_if_none

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEFAULT_LOGITS_BUDGET = 768 * 2**20


# Its work is launched by hand: a compiler that traced it would find nothing to fuse.
@torch.compiler.disable
def linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: Union[float, Tensor] = 1.0,
    entropy: Union[bool, str] = False,
    keep: Optional[KeepSet] = None,
    bias: Optional[Tensor] = None,
    logit_scale: float = 1.0,
    logit_softcap: Optional[float] = None,
    vocab_size: Optional[int] = None,
    vocab_start: Optional[int] = None,
    ignore_index: int = -100,
    logits_dtype: str = "fp32",
    logits_budget: int = DEFAULT_LOGITS_BUDGET,
    wgrad: str = "auto",
    tp_group: Optional[torch.distributed.ProcessGroup] = None,
    sequence_parallel: bool = False,
    impl: str = "auto",
) -> Tuple[Tensor, Optional[Tensor]]:
    """Log-probability of each row's target, and the entropy, over a vocab-parallel projection.

    With x = hidden @ weight.T + bias over all shards of the vocabulary, the logits of a row are
    z = softcap(logit_scale * x) / temperature, softcap(y) = c * tanh(y / c), and the results are
    z[target] - logsumexp(z) and logsumexp(z) - sum(softmax(z) * z).

    Rows are projected in chunks, over which one kernel takes the maximum and the sums. The
    target's logit is computed once more, as an fp32 sum of products: that of the matrix product,
    whose accumulators are shorter, has the larger part of the log-probability's error. In
    backward logits become their own gradient in place, which is multiplied into both gradients.
    Logits that fit `logits_budget` are kept for that, the others are projected again.

    Collectives over `tp_group`, the same on every rank whatever is frozen. Forward: one
    all-gather of 16 bytes a row and rank (28 with `keep`), before it with `sequence_parallel` one
    of `hidden`. Backward: one all-reduce of the gradient of `hidden`, or with
    `sequence_parallel` one all-gather of `hidden` and one reduce-scatter of its gradient. None at
    N = 0. Partial sums are combined in rank order, so that all ranks hold the same bits; gradients
    that come in are expected to be the same on all ranks, too.

    Saved for backward, visible to saved-tensor hooks: `hidden` as given, `weight`, `bias`,
    `targets`, up to five fp32 numbers a row, and the kept logits. The returned tensors are not.
    A second backward projects again what the first one overwrote and gives the same bits.

    Results are deterministic, and the same with and without gradients.

    Args:
        hidden (Tensor): `[N, h]` fp32, bf16 or fp16; with `sequence_parallel` this rank's
            `[N / tp, h]`.
        weight (Tensor): `[v / tp, h]` of the same dtype (under autocast both are cast, as
            in a linear layer), this rank's rows of the projection.
        targets (Tensor): `[N]` int64 or int32, ids of the whole vocabulary, the same on every
            rank.
        temperature (float or Tensor): Above 0, or `[N]` of these. It has no gradient.
        entropy (bool or str): True for the entropy with gradient, `"no_grad"` for its value
            alone, False for None.
        keep (KeepSet, optional): Ids over which a row is normalised, for top-p and top-k replay.
        bias (Tensor, optional): `[v / tp]`, added to the projection.
        logit_scale (float): Multiplies the logits, before the cap.
        logit_softcap (float, optional): The cap c.
        vocab_size (int, optional): Size of the vocabulary where the shards are padded: columns
            from there on take no part. Defaults to all columns.
        vocab_start (int, optional): First id of this rank's shard where shards differ in size;
            needs `vocab_size`. Defaults to the rank times `v / tp`.
        ignore_index (int): A target of this value makes results and gradients of its row 0.
        logits_dtype (str): `"fp32"` keeps the projection in fp32; `"match"` rounds logits to the
            dtype of `hidden`, as a linear layer would.
        logits_budget (int): Bytes that logits may take, kept for backward or not. Up to 0.25 GiB
            are taken in any case; without gradients never more than 0.75 GiB.
        wgrad (str): `"main_grad"` adds the gradient of `weight` to `weight.main_grad`, in fp32
            where that is, and sets `grad_added_to_main_grad` where the weight has it; `"grad"`
            returns it to autograd; `"auto"` is the former where there is a `main_grad`.
        tp_group (ProcessGroup, optional): The ranks that share the vocabulary. Defaults to the one
            of `parallel_state` where that is set up, else to this rank alone.
        sequence_parallel (bool): Whether `hidden` is a shard of the rows.
        impl (str): `"torch"`, `"triton"` or `"auto"`: Triton for tensors on a GPU where it is
            installed, else torch.

    Returns:
        Tuple[Tensor, Optional[Tensor]]: Log-probabilities `[N]` and entropy `[N]` or None, fp32.

    Raises:
        TypeError: An argument is of the wrong type or dtype.
        ValueError: Shapes, devices or values don't fit; values of tensors on a GPU are looked at
            under the environment variable `MCORE_SELECTIVE_DEBUG=1` only, which waits for the
            device. Without it a target, temperature or kept id that can't be one makes the
            results of its row NaN. All before any collective.
    """
    tp_group = get_tensor_model_parallel_group_if_none(tp_group)
    tp_size = get_pg_size(tp_group)
    sequence_parallel = sequence_parallel and tp_size > 1
    return run_linear_log_prob(
        hidden,
        weight,
        targets,
        temperature=temperature,
        entropy=entropy,
        keep=keep,
        bias=bias,
        logit_scale=logit_scale,
        logit_softcap=logit_softcap,
        vocab_size=vocab_size,
        vocab_start=vocab_start,
        ignore_index=ignore_index,
        logits_dtype=logits_dtype,
        logits_budget=logits_budget,
        wgrad=wgrad,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        allreduce_dgrad=tp_size > 1 and not sequence_parallel,
        impl=impl,
    )


def run_linear_log_prob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: Union[float, Tensor] = 1.0,
    entropy: Union[bool, str] = False,
    keep: Union[KeepSet, KeptIds, None] = None,
    bias: Optional[Tensor] = None,
    logit_scale: float = 1.0,
    logit_softcap: Optional[float] = None,
    vocab_size: Optional[int] = None,
    vocab_start: Optional[int] = None,
    ignore_index: int = -100,
    logits_dtype: str = "fp32",
    logits_budget: int = DEFAULT_LOGITS_BUDGET,
    wgrad: str = "auto",
    tp_group: Optional[torch.distributed.ProcessGroup],
    sequence_parallel: bool,
    allreduce_dgrad: bool,
    impl: str = "auto",
) -> Tuple[Tensor, Optional[Tensor]]:
    """:func:`linear_log_prob` with the reduction of the gradient of `hidden` said separately.

    A layer may leave the reduction to its caller. All arguments are checked here.

    Args:
        keep (KeepSet or KeptIds, optional): As there, or as prepared before.
        allreduce_dgrad (bool): Whether the gradient of `hidden` is all-reduced over `tp_group`.
        hidden, weight, targets, temperature, entropy, bias, logit_scale, logit_softcap,
            vocab_size, vocab_start, ignore_index, logits_dtype, logits_budget, wgrad, tp_group,
            sequence_parallel, impl: As there, without its defaults for groups.

    Returns:
        Tuple[Tensor, Optional[Tensor]]: As there.

    Raises:
        TypeError, ValueError: As there.
    """
    tp_size = get_pg_size(tp_group)
    compute_dtype = _check_operands(hidden, weight, bias)
    num_rows = hidden.size(0) * (tp_size if sequence_parallel else 1)
    _check_targets(targets, num_rows, hidden.device)
    _check_options(entropy, logits_dtype, logits_budget, wgrad, impl, ignore_index)
    _check_scalars(logit_scale, logit_softcap)
    vocab_size, vocab_start = _check_vocabulary(weight, vocab_size, vocab_start, tp_group)
    _check_temperature(temperature, num_rows, hidden.device)
    if isinstance(keep, KeepSet) or not isinstance(keep, (KeptIds, type(None))):
        check_keep_set(keep, num_rows, hidden.device)
    if hidden.device.type == "cpu" or os.environ.get("MCORE_SELECTIVE_DEBUG") == "1":
        check_values(targets, ignore_index, temperature, keep, vocab_size)
    main_grad = weight.main_grad if accumulates_in_main_grad(weight, wgrad) else None
    needs_gradient = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
    )
    settings = Settings(
        backend=choose_backend(impl, hidden.device),
        logits=Logits(
            columns=min(max(vocab_size - vocab_start, 0), weight.size(0)),
            vocab_start=vocab_start,
            vocab_size=vocab_size,
            ignore_index=ignore_index,
            scale=float(logit_scale),
            softcap=None if logit_softcap is None else float(logit_softcap),
            rounds=logits_dtype == "match",
            entropy=entropy is not False,
        ),
        entropy_gradient=entropy is True,
        compute_dtype=compute_dtype,
        logits_dtype=compute_dtype if logits_dtype == "match" else torch.float32,
        logits_budget=logits_budget,
        needs_gradient=needs_gradient,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel,
        allreduce_dgrad=allreduce_dgrad,
    )
    if isinstance(keep, KeepSet):
        keep = prepare_keep_set(keep)
    return apply_linear_log_prob(
        hidden,
        weight,
        bias,
        targets.long(),
        _invert(temperature, hidden.device),
        keep,
        main_grad,
        settings,
    )


def _invert(temperature: Union[float, Tensor], device: torch.device) -> Tensor:
    """The inverse of the temperature, fp32; NaN where a row's temperature can't be one."""
    if not isinstance(temperature, Tensor):
        return torch.full((1,), 1.0 / temperature, dtype=torch.float32, device=device)
    temperature = temperature.detach().float()
    possible = (temperature > 0) & temperature.isfinite()
    return temperature.reciprocal().masked_fill(~possible, torch.nan)


def _check_operands(hidden: Tensor, weight: Tensor, bias: Optional[Tensor]) -> torch.dtype:
    """Checks the operands of the projection; returns the dtype that it is done in."""
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is None and name == "bias":
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, expected a tensor.")
        if tensor.dtype not in _DTYPES:
            raise TypeError(
                f"{name}: got {tensor.dtype}, expected fp32, bf16 or fp16; cast it first."
            )
        if tensor.device != hidden.device:
            raise ValueError(
                f"{name}: is on {tensor.device}, hidden is on {hidden.device}; move it there."
            )
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.size(1) != weight.size(1):
        raise ValueError(
            f"hidden, weight: got shapes {list(hidden.shape)} and {list(weight.shape)}, expected "
            "[N, h] and [v / tp, h]; flatten [s, b, h] by hidden.flatten(0, 1)."
        )
    if not weight.numel():
        raise ValueError(f"weight: got shape {list(weight.shape)}, expected at least one column.")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias: got shape {list(bias.shape)}, expected {list(weight.shape[:1])} as weight."
        )
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    elif weight.dtype is not dtype:
        raise TypeError(
            f"weight: got {weight.dtype}, expected {dtype} as hidden; cast one of them, or run "
            "under autocast."
        )
    check_fp32_products(hidden.device, dtype)
    return dtype


def _check_targets(targets: Tensor, num_rows: int, device: torch.device) -> None:
    if not isinstance(targets, Tensor) or targets.dtype not in (torch.int64, torch.int32):
        found = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
        raise TypeError(f"targets: got {found}, expected an int64 or int32 tensor.")
    if targets.shape != (num_rows,):
        raise ValueError(
            f"targets: got shape {list(targets.shape)}, expected [N] = [{num_rows}], one for each "
            "row of hidden, with sequence_parallel those of all ranks."
        )
    if targets.device != device:
        raise ValueError(f"targets: is on {targets.device}, hidden is on {device}; move it there.")


def _check_options(entropy, logits_dtype, logits_budget, wgrad, impl, ignore_index) -> None:
    for name, value, expected in (
        ("entropy", entropy, (True, False, "no_grad")),
        ("logits_dtype", logits_dtype, ("fp32", "match")),
        ("wgrad", wgrad, ("auto", "main_grad", "grad")),
        ("impl", impl, ("auto", "torch", "triton")),
    ):
        if not any(
            value is option or value == option and type(value) is str for option in expected
        ):
            options = ", ".join(repr(option) for option in expected)
            raise ValueError(f"{name}: got {value!r}, expected one of {options}.")
    for name, value in (("logits_budget", logits_budget), ("ignore_index", ignore_index)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}: got {value!r}, expected an int.")
    if logits_budget < 0:
        raise ValueError(
            f"logits_budget: got {logits_budget}, expected bytes, 0 to keep nothing for backward."
        )


def _check_scalars(logit_scale: float, logit_softcap: Optional[float]) -> None:
    if not _is_number(logit_scale):
        raise TypeError(f"logit_scale: got {type(logit_scale).__name__}, expected a number.")
    if not math.isfinite(logit_scale) or logit_scale == 0:
        raise ValueError(f"logit_scale: got {logit_scale}, expected a finite number other than 0.")
    if logit_softcap is None:
        return
    if not _is_number(logit_softcap):
        raise TypeError(f"logit_softcap: got {type(logit_softcap).__name__}, expected a number.")
    if not 0 < logit_softcap < math.inf:
        raise ValueError(
            f"logit_softcap: got {logit_softcap}, expected a finite number above 0, or None for "
            "no cap."
        )


def _check_vocabulary(
    weight: Tensor,
    vocab_size: Optional[int],
    vocab_start: Optional[int],
    tp_group: Optional[torch.distributed.ProcessGroup],
) -> Tuple[int, int]:
    """Checks the vocabulary; returns its size and the start of this rank's shard."""
    columns, tp_size = weight.size(0), get_pg_size(tp_group)
    for name, value in (("vocab_size", vocab_size), ("vocab_start", vocab_start)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise TypeError(f"{name}: got {value!r}, expected an int or None.")
    if vocab_start is not None:
        if vocab_size is None:
            raise ValueError(
                "vocab_start: needs vocab_size, which can't be told from shards of unlike sizes."
            )
        if vocab_start < 0:
            raise ValueError(f"vocab_start: got {vocab_start}, expected the first id of the shard.")
        if vocab_size < 1:
            raise ValueError(f"vocab_size: got {vocab_size}, expected at least 1.")
        return vocab_size, vocab_start
    if vocab_size is None:
        vocab_size = columns * tp_size
    elif not 1 <= vocab_size <= columns * tp_size:
        raise ValueError(
            f"vocab_size: got {vocab_size}, expected 1 to {columns * tp_size}, the columns of all "
            "shards."
        )
    return vocab_size, columns * get_pg_rank(tp_group)


def _check_temperature(
    temperature: Union[float, Tensor], num_rows: int, device: torch.device
) -> None:
    if not isinstance(temperature, Tensor):
        if not _is_number(temperature):
            raise TypeError(
                f"temperature: got {type(temperature).__name__}, expected a number or a tensor."
            )
        if not 0 < temperature < math.inf:
            raise ValueError(
                f"temperature: got {temperature}, expected a finite number above 0; for greedy "
                "decoding use the temperature that the policy is trained at."
            )
        return
    if not temperature.is_floating_point():
        raise TypeError(f"temperature: got {temperature.dtype}, expected a floating-point tensor.")
    if temperature.shape != (num_rows,):
        raise ValueError(
            f"temperature: got shape {list(temperature.shape)}, expected [N] = [{num_rows}] or a "
            "number."
        )
    if temperature.device != device:
        raise ValueError(
            f"temperature: is on {temperature.device}, hidden is on {device}; move it there."
        )
    if temperature.requires_grad:
        raise ValueError("temperature: requires a gradient, and has none; pass it detached.")


def check_values(
    targets: Tensor,
    ignore_index: int,
    temperature: Union[float, Tensor],
    keep: Union[KeepSet, KeptIds, None],
    vocab_size: int,
) -> None:
    """Checks tensors by value, which waits for their device.

    Args:
        targets (Tensor): `[N]`.
        ignore_index (int): Target that is no id.
        temperature (float or Tensor): A tensor's values are checked.
        keep (KeepSet, KeptIds, optional): A KeepSet's values are checked.
        vocab_size (int): Size of the whole vocabulary.

    Raises:
        ValueError: A row has a value that can't be one.
    """
    wrong = (targets != ignore_index) & ((targets < 0) | (targets >= vocab_size))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"targets: row {row} has {int(targets[row])}, expected an id from 0 to "
            f"{vocab_size - 1} or ignore_index = {ignore_index}."
        )
    if isinstance(temperature, Tensor):
        wrong = ~((temperature > 0) & temperature.isfinite())
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"temperature: row {row} has {float(temperature[row])}, expected a finite number "
                "above 0."
            )
    if isinstance(keep, KeepSet):
        check_keep_set_values(keep, vocab_size)


def _is_number(value) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
