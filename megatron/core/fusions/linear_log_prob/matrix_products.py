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


def as_matrix(tensor: Tensor) -> Tensor:
    """The tensor itself where its rows or its columns are dense, as products want it, or a copy.

    Otherwise every product would make one.

    Args:
        tensor (Tensor): `[n, m]`.
    """
    (rows, columns), (row_stride, column_stride) = tensor.shape, tensor.stride()
    dense_rows = column_stride == 1 and row_stride >= columns
    dense_columns = row_stride == 1 and column_stride >= rows
    return tensor if dense_rows or dense_columns else tensor.contiguous()


def multiply(left: Tensor, right: Tensor, out: Tensor, add: bool = False) -> None:
    """Writes `left @ right` to `out`, or adds it to that.

    Args:
        left (Tensor): `[n, k]`. As with the others, rows or columns may be apart.
        right (Tensor): `[k, m]` of the same dtype.
        out (Tensor): `[n, m]` of that dtype or fp32.
        add (bool): Whether to add.
    """
    options = {}
    if left.device.type == "cpu":
        # oneDNN's 16-bit kernels read past rows of odd length and multiply what they find, NaN
        # included, by 0; so what lies between rows must not be anything.
        left, right = left.to(out.dtype).contiguous(), right.to(out.dtype).contiguous()
    elif out.dtype is not left.dtype:
        options = dict(out_dtype=out.dtype)
    if add:
        torch.addmm(out, left, right, out=out, **options)
    else:
        torch.mm(left, right, out=out, **options)
