# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Matrix products of 16-bit operands with fp32 results.

On a GPU cuBLAS writes them, where torch is new enough to ask for it. Elsewhere operands are cast.
"""

from functools import lru_cache

import torch
from torch import Tensor


def check_fp32_products(device: torch.device, dtype: torch.dtype) -> None:
    """Checks that products of operands of a dtype can be had in fp32.

    Args:
        device (torch.device): Where the operands are.
        dtype (torch.dtype): Their dtype.

    Raises:
        ValueError: This torch can't ask cuBLAS for them.
    """
    if device.type == "cuda" and dtype is not torch.float32 and not _mm_takes_out_dtype():
        raise ValueError(
            f"linear_log_prob needs torch 2.8 or newer for {dtype} on a GPU, this is "
            f"{torch.__version__}, which can't return products of it in fp32; update torch."
        )


@lru_cache(maxsize=None)
def _mm_takes_out_dtype() -> bool:
    return "dtype" in torch.ops.aten.mm.overloads()


def multiply(left: Tensor, right: Tensor, out: Tensor, add: bool = False) -> None:
    """Writes `left @ right` to `out`, or adds it to that.

    Args:
        left (Tensor): `[n, k]`. As with the others, rows or columns may be apart.
        right (Tensor): `[k, m]` of the same dtype.
        out (Tensor): `[n, m]` of that dtype or fp32.
        add (bool): Whether to add.
    """
    options = {}
    if out.dtype is not left.dtype:
        if left.device.type == "cuda":
            options = dict(out_dtype=out.dtype)
        else:
            left, right = left.to(out.dtype), right.to(out.dtype)
    if add:
        torch.addmm(out, left, right, out=out, **options)
    else:
        torch.mm(left, right, out=out, **options)
