# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Core attention in plain torch for packed sequences and context parallelism.

Megatron's own DotProductAttention has neither, and Transformer Engine's has no CPU. This one
gathers keys and values over the context-parallel group and masks by position, whatever the
layout; its test compares it with unpacked, unsharded attention.
"""

from typing import Optional

import torch
from torch import Tensor

from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule


def tokens_of_cp_rank(cu_seqlens: Tensor, cp_size: int, cp_rank: int, zigzag: bool) -> Tensor:
    """Which tokens of a stream of sequences a context-parallel rank holds, in its order.

    Args:
        cu_seqlens (Tensor): Bounds of the sequences in the whole stream, from 0.
        zigzag (bool): Two chunks of every sequence, one from each end, which balances causal
            attention; otherwise one piece of the whole stream.
    """
    total = int(cu_seqlens[-1])
    if not zigzag:
        return torch.arange(total).view(cp_size, -1)[cp_rank]
    pieces = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        chunks = torch.arange(start, end).view(2 * cp_size, -1)
        pieces += [chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]]
    return torch.cat(pieces)


class ReferenceAttention(MegatronModule):
    """Causal attention within each sequence; `[s, b, n, h]`, or `[t, n, h]` of packed input.

    Takes what Megatron hands to a core attention. The attention mask is not read.
    """

    zigzag = True

    def __init__(self, config, pg_collection, softmax_scale: Optional[float] = None, **_):
        super().__init__(config=config)
        self.softmax_scale = softmax_scale or config.kv_channels**-0.5
        # A model that is built unsharded beside sharded ones shares their groups.
        self.cp_group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask, packed_seq_params=None, **_
    ) -> Tensor:
        """Attention over the keys of all context-parallel ranks."""
        packed = packed_seq_params is not None
        if packed:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        cp_size, cp_rank = 1, 0
        if self.cp_group is not None:
            cp_size, cp_rank = self.cp_group.size(), self.cp_group.rank()
            key = gather_from_sequence_parallel_region(key, group=self.cp_group)
            value = gather_from_sequence_parallel_region(value, group=self.cp_group)
        if packed:
            cu_seqlens = packed_seq_params.cu_seqlens_q.long().cpu()
        else:
            cu_seqlens = torch.tensor([0, key.size(0)])
        tokens = [
            tokens_of_cp_rank(cu_seqlens, cp_size, rank, self.zigzag) for rank in range(cp_size)
        ]
        query_token, key_token = tokens[cp_rank], torch.cat(tokens)
        query_sequence = torch.bucketize(query_token, cu_seqlens, right=True)
        key_sequence = torch.bucketize(key_token, cu_seqlens, right=True)
        visible = (query_sequence[:, None] == key_sequence) & (query_token[:, None] >= key_token)

        heads_per_group = query.size(2) // key.size(2)
        key = key.repeat_interleave(heads_per_group, dim=2)
        value = value.repeat_interleave(heads_per_group, dim=2)
        # [s, b, n, h] => [b, n, s, h]
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        scores = (query @ key.transpose(-1, -2)).float() * self.softmax_scale
        scores = scores.masked_fill(~visible.to(scores.device), float("-inf"))
        context = scores.softmax(-1).to(value.dtype) @ value
        # [b, n, s, h] => [s, b, n * h]
        context = context.permute(2, 0, 1, 3).flatten(2)
        return context.squeeze(1) if packed else context


class ContiguousReferenceAttention(ReferenceAttention):
    """The layout in which each rank holds one piece of the stream."""

    zigzag = False
