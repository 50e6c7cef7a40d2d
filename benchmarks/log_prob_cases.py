# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""What `linear_log_prob.py` measures: jobs, shapes, rows, and the names that the CSV has for them."""

from dataclasses import dataclass

FORWARD = "forward"
BACKWARD = "forward + backward"
ENTROPY_GRADIENT = "forward + backward with entropy gradient"
JOBS = (FORWARD, BACKWARD, ENTROPY_GRADIENT)
WEIGHT_GRADIENT = "weight gradient"

COLUMNS = (
    "date,gpu,torch,triton,provider,provider_version,job,entropy,same_job,tokens,rows,hidden_size,"
    "vocab,budget,rows_kept,peak_gib,ms_p50,ms_p20,ms_p80,gemm_ms,ratio,err_log_prob,err_entropy,"
    "err_dhidden,err_dweight,note"
).split(",")


@dataclass(frozen=True)
class Shape:
    """A model's output weight on one tensor-parallel rank.

    Attributes:
        label (str): Model and number of ranks.
        hidden_size (int): Columns H.
        vocab (int): Rows V / TP.
    """

    label: str
    hidden_size: int
    vocab: int


SHAPES = {
    "qwen3.5-9b": Shape("Qwen3.5-9B, TP 4", 4096, 62080),
    "qwen3-4b": Shape("Qwen3-4B, TP 4", 2560, 38016),
    "llama-3-70b": Shape("Llama-3-70B, TP 8", 8192, 16032),
}
# 2,944 is 25 % of 11,776, a packed batch of multi-turn episodes; 16,384 is 25 % of 65,536.
ROWS = (1, 16, 256, 1024, 2048, 2944, 8192, 11776, 16384, 65536)
# slime #1767: shape, tokens and used rows of one rank of the batch that ran out of memory.
REPORTED = ("qwen3-4b", 433152, 86528)
# Rows are taken from the smallest of these that has as many.
TOKENS = (11776, 65536, REPORTED[1])
WEIGHT_GRADIENT_ROWS = (1024, 2944, 8192, 16384)

GEMMS = "cuBLAS's GEMMs"
OP = "this op"
OP_0 = "this op, budget 0"
OP_ALL = "this op, all kept"
OP_TORCH = "this op, torch"
# The others return the gradient of the weight, where the op adds it to an fp32 main_grad: against
# them it is measured returning it, too.
OP_RETURNS = "this op, weight gradient returned"
OP_0_RETURNS = "this op, budget 0, weight gradient returned"
OURS = (OP, OP_0, OP_ALL, OP_TORCH, OP_RETURNS, OP_0_RETURNS)
SLIME = "slime, all tokens fp32"
