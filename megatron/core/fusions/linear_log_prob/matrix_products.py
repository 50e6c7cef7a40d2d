# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Matrix products that accumulate in fp32 and keep it.

On a GPU cuBLAS writes fp32 results of 16-bit operands, where torch is new enough to ask for them.
Elsewhere the operands are cast.
"""

from functools import lru_cache

import torch
from torch import Tensor


def check_fp32_products(device: torch.device, dtype: torch.dtype) -> None:
    """Checks that products of a dtype can be had in fp32.

    Raises:
        ValueError: This torch can't ask cuBLAS for them.
    """
    if device.type == "cuda" and dtype is not torch.float32 and not _mm_takes_out_dtype():
        raise ValueError(
            f"linear_log_prob needs torch 2.8 or newer for {dtype} on a GPU, this is "
            f"{torch.__version__}: products in fp32 can't be had from it."
        )


@lru_cache(maxsize=None)
def _mm_takes_out_dtype() -> bool:
    return any("dtype" in name for name in torch.ops.aten.mm.overloads())


def project(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """Writes `hidden @ weight.T` to `out`, in the dtype of the operands or in fp32.

    Args:
        hidden (Tensor): `[n, h]`.
        weight (Tensor): `[v, h]`.
        out (Tensor): `[n, v]`, rows possibly further apart than their length.
    """
    if out.dtype is hidden.dtype:
        torch.mm(hidden, weight.t(), out=out)
    elif hidden.device.type == "cuda":
        torch.mm(hidden, weight.t(), out_dtype=out.dtype, out=out)
    else:
        torch.mm(hidden.to(out.dtype), weight.t().to(out.dtype), out=out)


def accumulate_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds `left.T @ right` to an fp32 total.

    Args:
        total (Tensor): `[v, h]` fp32.
        left (Tensor): `[n, v]`, rows possibly further apart than their length.
        right (Tensor): `[n, h]`.
    """
    if left.dtype is total.dtype:
        torch.addmm(total, left.t(), right, out=total)
    elif left.device.type == "cuda":
        torch.addmm(total, left.t(), right, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, left.t().to(total.dtype), right.to(total.dtype), out=total)
