# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""`output_row_selector` through upstream's pipeline schedules, 1F1B with and without interleaving.

The reference is the same split model under the same schedule with full output, of which the loss
takes the rows of the mask. Every chunk is wrapped in DDP, and `finalize_model_grads` is the
schedule's, as in training.
"""

from dataclasses import dataclass
from functools import partial
from typing import Dict, List, Union

import pytest
import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.common.output_row_selector import (
    OutputRowSelector,
    OutputRowSelectorError,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from tests.unit_tests.harness.compare import assert_close, assert_same_bits
from tests.unit_tests.harness.models import (
    HIDDEN_SIZE,
    MASKS,
    SEQ_LENGTH,
    device,
    gradients,
    make_batch,
    make_config,
    make_gpt_model,
    weights_of_loss,
)
from tests.unit_tests.harness.ranks import Layout, run_on_ranks
from tests.unit_tests.harness.record import RecordOps

_BATCH_SIZE = 2
# One micro-batch each, of unlike numbers of rows; one has none.
_STEP = ("random", "empty", "full", "one_row")
_LAYOUTS = pytest.mark.parametrize(
    "tp_size, sequence_parallel", [(1, False), (2, True)], ids=["tp1", "tp2sp"]
)
_SCHEDULES = pytest.mark.parametrize("interleaved", [False, True], ids=["1f1b", "interleaved"])


@dataclass
class _MicroBatch:
    """What one forward step takes from the data iterator."""

    batch: Dict[str, Tensor]
    mask: Tensor
    selector: Union[Tensor, OutputRowSelector]


def _micro_batches(masks) -> List[_MicroBatch]:
    micro_batches = []
    for seed, name in enumerate(masks):
        mask = MASKS[name](_BATCH_SIZE, SEQ_LENGTH, 2).to(device())
        micro_batches.append(_MicroBatch(make_batch(_BATCH_SIZE, seed=seed), mask, mask))
    return micro_batches


class _Pipeline:
    """This rank's chunks of a model, and runs of upstream's schedule over them."""

    def __init__(self, sequence_parallel, interleaved=False, tied=False, bf16=False, **settings):
        vp_size = 2 if interleaved else None
        pp_size = parallel_state.get_pipeline_model_parallel_world_size()
        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        settings = dict(pipeline_dtype=torch.float32, calculate_per_token_loss=True) | settings
        config = make_config(
            num_layers=pp_size * (vp_size or 1),
            sequence_parallel=sequence_parallel,
            virtual_pipeline_model_parallel_size=vp_size,
            # With two stages the next one is the previous one too, and batched calls of upstream's
            # interleaved schedule would take a gradient for an activation.
            overlap_p2p_comm=interleaved and pp_size == 2,
            batch_p2p_comm=not (interleaved and pp_size == 2),
            finalize_model_grads_func=finalize_model_grads,
            bf16=bf16,
            **settings,
        )
        self.chunks = []
        for vp_stage in range(vp_size or 1):
            stage = vp_stage * pp_size + pp_rank
            model = make_gpt_model(
                config,
                pre_process=stage == 0,
                post_process=stage == config.num_layers - 1,
                share_embeddings_and_output_weights=tied,
                # No two stages have the same weights.
                seed=7 + stage,
                **(dict(vp_stage=vp_stage) if interleaved else {}),
            )
            # The weights of a model in fp32 too, so that it is the truth of one in bf16.
            model = model.bfloat16().to(torch.bfloat16 if bf16 else torch.float32)
            if bf16:
                model = Float16Module(config, model)
            ddp_config = DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, overlap_grad_reduce=True
            )
            self.chunks.append(DistributedDataParallel(config, ddp_config, model))
        config.no_sync_func = [chunk.no_sync for chunk in self.chunks]
        if not interleaved:
            (config.no_sync_func,) = config.no_sync_func
        self.run_schedule = get_forward_backward_func(pp_size=pp_size, vp_size=vp_size)
        # Of the last run: what chunks without and with a head returned, with what they did for it.
        self.outputs, self.logits, self.counts = [], [], []

    def run(self, micro_batches, select, **kwargs):
        """Runs one step; returns its forward data, all rows and the finished gradients."""
        rows, self.outputs, self.logits, self.counts = [], [], [], []

        def loss_func(mask, output, non_loss_data=False):
            selected = output[0] if select else output[mask]
            rows.append(selected.detach().clone())
            if non_loss_data:
                return selected
            weights = weights_of_loss((*mask.shape, selected.size(-1)))[mask]
            return (selected * weights).sum(), mask.sum().int(), {"rows": mask.sum()}

        def forward_step(data_iterator, model):
            micro_batch = next(data_iterator)
            arguments = dict(output_row_selector=micro_batch.selector) if select else {}
            with RecordOps() as record:
                output = model(**micro_batch.batch, **arguments)
            (self.logits if _has_head(model) else self.outputs).append(output)
            self.counts.append((_has_head(model), record.counts))
            return output, partial(loss_func, micro_batch.mask)

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        iterators = [iter(micro_batches) for _ in self.chunks]
        data = self.run_schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(iterators) > 1 else self.chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=SEQ_LENGTH,
            micro_batch_size=_BATCH_SIZE,
            **kwargs,
        )
        found = {
            f"chunk {index}: {name.replace('module.', '')}": gradient
            for index, chunk in enumerate(self.chunks)
            for name, gradient in gradients(chunk).items()
        }
        return data, rows, found


def _has_head(model) -> bool:
    while not hasattr(model, "post_process"):
        model = model.module
    return model.post_process


def _assert_same_step(actual, reference, eps=1e-6, peer=None):
    """Compares rows and gradients of two runs; `peer` is a third, see `assert_close`."""
    (_, rows, found), (_, expected_rows, expected) = actual, reference
    _, peer_rows, peer_gradients = peer or (None, [None] * len(rows), {})
    assert len(rows) == len(expected_rows)
    for index, (got, due, other) in enumerate(zip(rows, expected_rows, peer_rows)):
        assert_close(f"logits of micro-batch {index}", got, due, eps=eps, peer=other)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        other = peer_gradients.get(name)
        assert_close(name, gradient, expected[name], eps=eps, peer=other)


def _check_parity(sequence_parallel, interleaved, tied):
    pipeline = _Pipeline(sequence_parallel, interleaved, tied)
    for masks in (_STEP, ("empty",) * 4, ("holes",) * 4):
        micro_batches = _micro_batches(masks)
        full = pipeline.run(micro_batches, select=False)
        selected = pipeline.run(micro_batches, select=True)
        on_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        assert len(selected[1]) == (len(masks) if on_last_stage else 0)
        _assert_same_step(selected, full)
        # A comparison of nothing with nothing would pass as well.
        not_zero = [name for name, gradient in full[2].items() if gradient.any()]
        assert bool(not_zero) == (masks[0] != "empty"), (masks, not_zero)
        if tied:
            _check_tied_gradient(selected[2])


def _check_tied_gradient(found):
    """The copies of first and last stage have one gradient, the sum of both uses."""
    copies = [
        gradient
        for name, gradient in found.items()
        if "word_embeddings" in name or "output_layer" in name
    ]
    assert len(copies) == 1
    group = parallel_state.get_pipeline_model_parallel_group()
    both = [torch.empty_like(copies[0]) for _ in range(group.size())]
    torch.distributed.all_gather(both, copies[0], group=group)
    assert_same_bits("gradient of the last stage's copy", both[-1], both[0])


def _check_parity_in_bf16(sequence_parallel):
    wide = _Pipeline(sequence_parallel)
    narrow = _Pipeline(sequence_parallel, bf16=True)
    micro_batches = _micro_batches(_STEP)
    reference = wide.run(micro_batches, select=False)
    full = narrow.run(micro_batches, select=False)
    selected = narrow.run(micro_batches, select=True)
    assert all(logits.dtype is torch.float32 for logits in narrow.logits)
    assert all(output.dtype is torch.bfloat16 for output in narrow.outputs)
    _assert_same_step(selected, reference, eps=1e-3, peer=full)


def _check_mean_over_micro_batches():
    pipeline = _Pipeline(False, calculate_per_token_loss=False)
    micro_batches = _micro_batches(_STEP)
    full = pipeline.run(micro_batches, select=False)
    _assert_same_step(pipeline.run(micro_batches, select=True), full)


class TestSchedules:
    """A training step over several stages, of micro-batches with unlike numbers of rows."""

    @_LAYOUTS
    @_SCHEDULES
    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_step_equals_full_path(self, tp_size, sequence_parallel, interleaved, tied):
        """Rows and finished gradients of every stage, also where a step selects nothing at all.

        A last stage that does not run backward where it has no row leaves the stage before it
        waiting for a gradient. The copies of a tied weight get one gradient, of both uses.
        """
        run_on_ranks(Layout(tp=tp_size, pp=2), _check_parity, sequence_parallel, interleaved, tied)

    def test_step_in_bf16_equals_full_path(self):
        """In Float16Module under DDP, as a trainer wraps it: hidden states go on in bf16.

        Only the last stage upcasts, and its selected rows only.
        """
        run_on_ranks(Layout(pp=2), _check_parity_in_bf16, False)

    def test_mean_over_micro_batches(self):
        """The schedule divides by a count of tokens that is 0 for one micro-batch."""
        run_on_ranks(Layout(pp=2), _check_mean_over_micro_batches)


def _check_stage_without_head(sequence_parallel, interleaved):
    pipeline = _Pipeline(sequence_parallel, interleaved)
    micro_batches = _micro_batches(_STEP)
    # Twice: the first run fills caches.
    for _ in range(2):
        pipeline.run(micro_batches, select=False, forward_only=True)
        full = list(pipeline.counts)

    def check_run(expected_of_head):
        pipeline.run(micro_batches, select=True, forward_only=True)
        assert len(pipeline.counts) == len(full)
        for (has_head, counts), (_, without_selector) in zip(pipeline.counts, full):
            if has_head:
                assert counts["nonzero"] == expected_of_head, counts
            else:
                more, fewer = counts - without_selector, without_selector - counts
                assert not more and not fewer, f"more: {more}, fewer: {fewer}"

    check_run(1)
    check_run(1)
    # Made where the batch is, before it is known which stage uses it, and used twice.
    for micro_batch in micro_batches:
        micro_batch.selector = OutputRowSelector(
            micro_batch.mask, sequence_parallel=sequence_parallel
        )
    check_run(1)
    check_run(0)


class TestStageWithoutHead:
    """A stage without the output layer takes the argument and does nothing about it."""

    @_LAYOUTS
    @_SCHEDULES
    def test_no_operator_more(self, tp_size, sequence_parallel, interleaved):
        """Index work there would be a wait for the device on every stage for every micro-batch."""
        run_on_ranks(
            Layout(tp=tp_size, pp=2), _check_stage_without_head, sequence_parallel, interleaved
        )


def _check_bad_masks(sequence_parallel):
    pipeline = _Pipeline(sequence_parallel)
    (chunk,) = pipeline.chunks
    (micro_batch,) = _micro_batches(["random"])
    mask = micro_batch.mask
    shards = parallel_state.get_tensor_model_parallel_world_size() if sequence_parallel else 1
    group = parallel_state.get_tensor_model_parallel_group()
    received = torch.zeros(SEQ_LENGTH // shards, _BATCH_SIZE, HIDDEN_SIZE, device=device())
    bad_masks = {
        "transposed": mask.t(),
        "of one sequence": mask[:1],
        "flat": mask.flatten(),
        "of weights": mask.float(),
        "of indices": mask.nonzero(),
        "of other integers": (mask.long() * 2).cpu(),
        "list": mask.tolist(),
        "prebuilt, of half the tokens": OutputRowSelector(mask[:, ::2], tp_group=group),
    }
    for what, bad in bad_masks.items():
        # As the schedule calls a stage: each has what the stage before it sent.
        chunk.module.set_input_tensor([None if chunk.module.pre_process else received])
        with RecordOps() as record, pytest.raises(OutputRowSelectorError) as raised:
            chunk(**micro_batch.batch, output_row_selector=bad)
        # The prebuilt one meets the head's own setting first.
        assert raised.value.setting in ("mask", "sequence_parallel"), (what, raised.value)
        assert not record.collectives, (what, record.collectives)
    # Nothing is left over, on any rank, of the calls that failed.
    micro_batches = _micro_batches(_STEP)
    full = pipeline.run(micro_batches, select=False)
    _assert_same_step(pipeline.run(micro_batches, select=True), full)


class TestRefusals:
    """A mask that is none of these tokens is refused by the first stage as by the last."""

    @_LAYOUTS
    def test_every_stage_raises_before_it_communicates(self, tp_size, sequence_parallel):
        """A stage that lets it pass goes on to send to one that has raised, and hangs."""
        run_on_ranks(Layout(tp=tp_size, pp=2), _check_bad_masks, sequence_parallel)


def _check_freed_outputs(sequence_parallel, interleaved):
    micro_batches = _micro_batches(_STEP)
    steps = {}
    for deallocate in (False, True):
        pipeline = _Pipeline(sequence_parallel, interleaved, deallocate_pipeline_outputs=deallocate)
        steps[deallocate] = pipeline.run(micro_batches, select=True)
        for output in pipeline.outputs:
            assert (output.numel() == 1) == deallocate
        for micro_batch, logits in zip(micro_batches, pipeline.logits):
            assert logits.size(1) == micro_batch.mask.sum()
        # Freed after use, not before it.
        full = pipeline.run(micro_batches, select=False)
        _assert_same_step(steps[deallocate], full)
    for (name, gradient), expected in zip(steps[True][2].items(), steps[False][2].values()):
        assert_same_bits(name, gradient, expected)


def _check_forward_only(interleaved, deallocate):
    pipeline = _Pipeline(False, interleaved, deallocate_pipeline_outputs=deallocate)
    micro_batches = _micro_batches(_STEP)
    expected = pipeline.run(micro_batches, select=False)[1]
    for chunk in pipeline.chunks:
        chunk.eval()
    with torch.no_grad():
        data, rows, found = pipeline.run(
            micro_batches, select=True, forward_only=True, collect_non_loss_data=True
        )
    assert len(data) == len(rows) == len(expected)
    for index, (got, seen, due) in enumerate(zip(data, rows, expected)):
        # What the schedule hands back is still there after it has freed what it sent.
        assert_same_bits(f"data of micro-batch {index}", got, seen)
        assert_close(f"logits of micro-batch {index}", got, due, eps=1e-6)
    assert not any(gradient.any() for gradient in found.values())


def _stages(interleaved):
    """Four where chunks are interleaved, for which upstream's schedule waits for what it sends.

    Two need it to overlap, and then it frees memory that gloo still sends from; CUDA keeps such
    memory until its stream is done with it.
    """
    return Layout(pp=4 if interleaved else 2)


class TestDeallocatedOutputs:
    """`deallocate_pipeline_outputs` frees what a stage has sent on."""

    @_SCHEDULES
    def test_training_step(self, interleaved):
        """The schedule asserts that what it frees is no view, and runs backward without its data.

        The last stage's own output is the loss; the logits that it was made of stay whole.
        """
        run_on_ranks(_stages(interleaved), _check_freed_outputs, False, interleaved)

    @_SCHEDULES
    @pytest.mark.parametrize("deallocate", [False, True])
    def test_forward_only(self, interleaved, deallocate):
        """Log-probs of a frozen model are collected from the rows, one tensor a micro-batch."""
        run_on_ranks(_stages(interleaved), _check_forward_only, interleaved, deallocate)
