# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The stand-in core attention against unpacked, unsharded attention.

Tests of packed input and context parallelism rest on it: were a key of another sequence or of a
later position visible, they would compare two wrong models with each other.
"""

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from tests.unit_tests.harness.attention import (
    ContiguousReferenceAttention,
    ReferenceAttention,
    tokens_of_cp_rank,
)
from tests.unit_tests.harness.compare import assert_close
from tests.unit_tests.harness.models import device, make_config
from tests.unit_tests.harness.ranks import Layout, run_on_ranks

# Divisible by 2 * cp each, as the zigzag layout asks, and of unlike lengths.
_LENGTHS = (8, 4, 12)


def _dense_causal(query, key, value):
    """Attention over one whole sequence `[s, n, d]` by torch's own function, in fp64."""
    query, key, value = (x.transpose(0, 1).double() for x in (query, key, value))
    context = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return context.transpose(0, 1).flatten(1)


def _check_attention(attention_class, packed):
    group = parallel_state.get_context_parallel_group()
    config = make_config(num_query_groups=2)
    lengths = _LENGTHS if packed else (sum(_LENGTHS),)
    cu_seqlens = torch.tensor((0, *lengths)).cumsum(0)
    # Four query heads on two key heads.
    whole = [
        torch.randn(sum(lengths), heads, 10, device=device(), requires_grad=True)
        for heads in (4, 2, 2)
    ]
    tokens = tokens_of_cp_rank(cu_seqlens, group.size(), group.rank(), attention_class.zigzag).to(
        device()
    )
    parallel_state_groups = type("Groups", (), {"cp": group})
    attention = attention_class(config, pg_collection=parallel_state_groups)
    if packed:
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens.int().to(device()),
            cu_seqlens_kv=cu_seqlens.int().to(device()),
        )
        context = attention(*(x[tokens] for x in whole), None, packed_seq_params=params)
    else:
        context = attention(*(x[tokens].unsqueeze(1) for x in whole), None).squeeze(1)

    spans = list(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()))
    query, key, value = whole[0], *(x.repeat_interleave(2, dim=1) for x in whole[1:])
    expected = torch.cat([_dense_causal(query[a:b], key[a:b], value[a:b]) for a, b in spans])
    assert_close("context", context, expected[tokens], eps=2e-6)

    weights = torch.randn(expected.shape, device=device())
    expected_gradients = torch.autograd.grad((expected * weights).sum(), whole)
    gradients = torch.autograd.grad((context * weights[tokens]).sum(), whole)
    for name, gradient, expected_gradient in zip("qkv", gradients, expected_gradients):
        # Each rank's loss is over its own tokens, and so is its part of the gradient.
        torch.distributed.all_reduce(gradient, group=group)
        assert_close(f"gradient of {name}", gradient, expected_gradient, eps=2e-6)


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("attention_class", [ReferenceAttention, ContiguousReferenceAttention])
@pytest.mark.parametrize("packed", [False, True])
def test_matches_unpacked_unsharded_attention(cp_size, attention_class, packed):
    """Values and gradients of what a rank holds are those of whole sequences."""
    run_on_ranks(Layout(cp=cp_size), _check_attention, attention_class, packed)
