# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""`output_row_selector` where a rank holds some tokens of a stream: context parallelism and THD.

Each context-parallel rank passes the mask of its own tokens and gets its own number of rows.
The core attention is the harness's, see `test_reference_attention.py`.
"""

from typing import Dict, List, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.models.common.output_row_selector import OutputRowSelectorError
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.unit_tests.harness.attention import (
    ContiguousReferenceAttention,
    ReferenceAttention,
    tokens_of_cp_rank,
)
from tests.unit_tests.harness.compare import assert_close
from tests.unit_tests.harness.models import (
    VOCAB_SIZE,
    device,
    gradients,
    make_config,
    make_gpt_model,
    weights_of_loss,
)
from tests.unit_tests.harness.ranks import Layout, call_all, run_on_ranks
from tests.unit_tests.harness.record import RecordOps


class _Episode(NamedTuple):
    """A prompt, then a response whose model-written tokens are 1 in the loss mask."""

    prompt_length: int
    loss_mask: List[int]

    def rows(self) -> List[int]:
        """Which tokens' logits predict a token of the loss: each is one before its token."""
        return [0] * (self.prompt_length - 1) + self.loss_mask + [0]


# Lengths are multiples of 2 * cp, as the zigzag layout asks: 8, 4, 8, and 4 of padding. The second
# one's response is another party's.
_EPISODES = (_Episode(3, [1, 1, 0, 1, 1]), _Episode(2, [0, 0]), _Episode(1, [1, 1, 1, 0, 0, 1, 1]))
_PADDING = 4
_BOUNDS = torch.tensor([0, 8, 12, 20, 24])
_TOKENS = 24


class _Stream:
    """Whole sequences, and the part of them that a context-parallel rank holds.

    Args:
        packed (bool): Episodes and padding in one sequence `[1, T]`; else two sequences.
        zigzag (bool): See `tokens_of_cp_rank`.
    """

    def __init__(self, packed: bool, zigzag: bool):
        self.packed = packed
        self.zigzag = zigzag
        self.batch_size = 1 if packed else 2
        self.cu_seqlens = _BOUNDS if packed else torch.tensor([0, _TOKENS])
        generator = torch.Generator().manual_seed(3)
        self.input_ids = torch.randint(
            0, VOCAB_SIZE, (self.batch_size, _TOKENS), generator=generator
        )
        spans = zip(self.cu_seqlens[:-1].tolist(), self.cu_seqlens[1:].tolist())
        position_ids = torch.cat([torch.arange(end - start) for start, end in spans])
        self.position_ids = position_ids.expand(self.batch_size, -1)

    def tokens(self, cp_rank: int, cp_size: int) -> Tensor:
        """Which tokens a rank holds."""
        return tokens_of_cp_rank(self.cu_seqlens, cp_size, cp_rank, self.zigzag)

    def batch(self, tokens: Tensor) -> Dict[str, Tensor]:
        """A model's input of these tokens."""
        batch = dict(
            input_ids=self.input_ids[:, tokens].to(device()),
            position_ids=self.position_ids[:, tokens].to(device()),
            attention_mask=None,
        )
        if self.packed:
            cu_seqlens = self.cu_seqlens.int().to(device())
            batch["packed_seq_params"] = PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_kv=cu_seqlens,
                max_seqlen_q=_TOKENS,
                max_seqlen_kv=_TOKENS,
            )
        return batch

    def masks(self, cp_size: int) -> Dict[str, Tensor]:
        """Masks over all tokens."""
        rows = sum((episode.rows() for episode in _EPISODES), []) + [0] * _PADDING
        loss_masks = torch.tensor(rows, dtype=torch.bool).expand(self.batch_size, -1).clone()
        # Sequences of a batch have unlike loss masks.
        loss_masks[1:] = loss_masks[1:].roll(3, dims=1)
        masks = {
            "of loss masks": loss_masks,
            "empty": torch.zeros_like(loss_masks),
            "full": torch.ones_like(loss_masks),
        }
        for rank in range(cp_size):
            alone = torch.zeros_like(loss_masks)
            alone[:, self.tokens(rank, cp_size)[1::3]] = True
            masks[f"on rank {rank} alone"] = alone
        return masks


def _rows_and_gradients(model, stream, tokens, mask, select):
    """Rows of these tokens that the mask selects, and the gradients of the loss on them."""
    local_mask = mask[:, tokens]
    batch = stream.batch(tokens)
    if select:
        rows = model(**batch, output_row_selector=local_mask.to(device())).squeeze(0)
    else:
        rows = model(**batch)[local_mask.to(device())]
    # A token has the same weights whichever rank holds it.
    weights = weights_of_loss((*mask.shape, rows.size(-1)))[:, tokens][local_mask]
    (rows * weights).sum().backward()
    return rows.detach(), gradients(model)


def _sum_of_parts(model, found, sequence_parallel):
    """Whole gradients: of norms every sequence-parallel rank has a part, of all every CP rank."""
    for name, parameter in model.named_parameters():
        if sequence_parallel and getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(
                found[name], group=parallel_state.get_tensor_model_parallel_group()
            )
        if model.config.context_parallel_size > 1:
            torch.distributed.all_reduce(
                found[name], group=parallel_state.get_context_parallel_group()
            )
    return found


def _check_parity(sequence_parallel, attention_class, packed):
    group = parallel_state.get_context_parallel_group()
    # Rotary embeddings of 0.16.1 know the zigzag layout only; learned ones take the position ids.
    kwargs = dict(
        core_attention=attention_class,
        position_embedding_type="rope" if attention_class.zigzag else "learned_absolute",
    )
    model = make_gpt_model(make_config(sequence_parallel=sequence_parallel), **kwargs)
    alone = ProcessGroupCollection.use_mpu_process_groups()
    alone.cp, _ = torch.distributed.new_subgroups(1)
    unsharded = make_gpt_model(
        make_config(sequence_parallel=sequence_parallel, context_parallel_size=1),
        pg_collection=alone,
        **kwargs,
    )
    stream = _Stream(packed, attention_class.zigzag)
    every_token = torch.arange(_TOKENS)
    tokens = stream.tokens(group.rank(), group.size())
    masks = stream.masks(group.size())

    def check(name):
        mask = masks[name]
        rows, found = _rows_and_gradients(model, stream, tokens, mask, select=True)
        local_rows, local = _rows_and_gradients(model, stream, tokens, mask, select=False)
        _, whole = _rows_and_gradients(unsharded, stream, every_token, mask, select=False)
        with torch.no_grad():
            whole_rows = unsharded(**stream.batch(every_token))[:, tokens][mask[:, tokens]]
        summed = {key: gradient.clone() for key, gradient in found.items()}
        summed = _sum_of_parts(model, summed, sequence_parallel)
        whole = _sum_of_parts(unsharded, whole, sequence_parallel)

        assert_close("logits", rows, local_rows, eps=1e-6)
        assert_close("logits, unsharded", rows, whole_rows, eps=2e-6)
        assert found.keys() == local.keys() == whole.keys()
        for key, gradient in found.items():
            assert_close(key, gradient, local[key], eps=1e-6)
            assert_close(f"{key}, unsharded", summed[key], whole[key], eps=5e-6)
        assert whole["output_layer.weight"].any() == mask.any()

    call_all(list(masks), check)


_ATTENTION = pytest.mark.parametrize(
    "attention_class",
    [ReferenceAttention, ContiguousReferenceAttention],
    ids=["zigzag", "contiguous"],
)


class TestContextParallel:
    """A rank's selected rows are those of its own full output, and of the unsharded model's."""

    @_ATTENTION
    @pytest.mark.parametrize("packed", [False, True], ids=["sequences", "thd"])
    @pytest.mark.parametrize(
        "tp_size, sequence_parallel",
        [(1, False), pytest.param(2, False, marks=pytest.mark.full), (2, True)],
        ids=["tp1", "tp2", "tp2sp"],
    )
    def test_rows_and_gradients(self, tp_size, sequence_parallel, attention_class, packed):
        """Ranks have unlike numbers of rows, one of them none, or none has any.

        A rank without a row takes part in the others' attention, in forward and backward: were
        its head left out, the others would wait for it.
        """
        run_on_ranks(
            Layout(tp=tp_size, cp=2), _check_parity, sequence_parallel, attention_class, packed
        )


class TestPackedSequences:
    """THD input without context parallelism, several episodes in a sequence of one `[1, T]`."""

    @pytest.mark.parametrize(
        "tp_size, sequence_parallel", [(1, False), (2, True)], ids=["tp1", "tp2sp"]
    )
    def test_rows_and_gradients(self, tp_size, sequence_parallel):
        """Rows are selected by loss masks of several turns; padding and prompts have none."""
        run_on_ranks(Layout(tp=tp_size), _check_parity, sequence_parallel, ReferenceAttention, True)


def _check_masks_of_other_tokens(packed):
    stream = _Stream(packed, zigzag=True)
    group = parallel_state.get_context_parallel_group()
    tokens = stream.tokens(group.rank(), group.size())
    model = make_gpt_model(make_config(), core_attention=ReferenceAttention)
    mask = stream.masks(group.size())["of loss masks"]
    with RecordOps() as record, pytest.raises(OutputRowSelectorError) as raised:
        model(**stream.batch(tokens), output_row_selector=mask)
    assert raised.value.setting == "mask"
    assert "this context-parallel rank" in str(raised.value)
    # Before attention gathers keys and values.
    assert not record.collectives
    model(**stream.batch(tokens), output_row_selector=mask[:, tokens])


class TestRefusals:
    """What is easily got wrong under context parallelism."""

    @pytest.mark.parametrize("packed", [False, True], ids=["sequences", "thd"])
    def test_mask_of_the_whole_stream(self, packed):
        """A mask that was not cut as the tokens were is refused on entry, on every rank."""
        run_on_ranks(Layout(cp=2), _check_masks_of_other_tokens, packed)
