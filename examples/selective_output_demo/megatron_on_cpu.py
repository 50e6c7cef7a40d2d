# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""A Megatron GPTModel without a GPU: the few things it takes from CUDA or from GPU-only packages.

Everything else is Megatron's own: embedding, tensor and sequence parallel layers, rotary
embedding, MLP, residuals, output layer, precision wrapper.
"""

import time

import torch
import torch.nn.functional as F


def use_cpu_as_device() -> None:
    """Answers Megatron's question for the current CUDA device with the CPU."""
    torch.cuda.current_device = lambda: "cpu"


def bf16_is_fast() -> bool:
    """Says whether this CPU multiplies bfloat16 matrices at least as fast as float32 ones."""

    def seconds(dtype: torch.dtype) -> float:
        a, b = torch.ones(512, 256, dtype=dtype), torch.ones(256, 4096, dtype=dtype)
        durations = []
        for _ in range(5):
            start = time.perf_counter()
            a @ b
            durations.append(time.perf_counter() - start)
        return min(durations)

    return seconds(torch.bfloat16) <= seconds(torch.float32)


class RMSNorm(torch.nn.Module):
    """RMS norm with sequence parallelism; Megatron's is Transformer Engine's or apex's.

    Args:
        config (TransformerConfig): The model's configuration.
        hidden_size (int): Size of the last dimension.
        eps (float): Added to the mean square.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        # Tells Megatron that each rank holds a part of this parameter's gradient.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalises `hidden` [..., hidden_size] in its own dtype."""
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class PackedCausalAttention(torch.nn.Module):
    """Causal attention inside each episode of a packed sequence.

    Stands where Transformer Engine's attention does on a GPU: Megatron's own takes no packed
    sequences. Arguments beyond those that are used are what Megatron passes to any attention.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **kwargs):
        super().__init__()

    def forward(
        self, query, key, value, attention_mask, *, packed_seq_params, **kwargs
    ) -> torch.Tensor:
        """Attends.

        Args:
            query (Tensor): [T, heads on this rank, head size].
            key (Tensor): As `query`, with as many heads.
            value (Tensor): As `query`, with as many heads.
            attention_mask: Not used, the boundaries say it all.
            packed_seq_params (PackedSeqParams): Boundaries of the episodes in `cu_seqlens_q`.

        Returns:
            Tensor: [T, heads on this rank * head size].
        """
        boundaries = packed_seq_params.cu_seqlens_q.tolist()
        outputs = []
        for start, end in zip(boundaries, boundaries[1:]):
            q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
            outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1))
        return torch.cat(outputs).flatten(1)
