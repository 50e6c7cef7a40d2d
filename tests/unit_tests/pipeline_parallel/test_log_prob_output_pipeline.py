# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""`LogProbOutput` through upstream's pipeline schedules, 1F1B with and without interleaving.

The reference is the same split model under the same schedule with full logits, of whose rows the
loss takes log_softmax in fp64. Every chunk is wrapped in DDP, and `finalize_model_grads` is the
schedule's, as in training.
"""

from functools import partial

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.module import Float16Module
from tests.unit_tests.harness.compare import assert_close, assert_same_bits
from tests.unit_tests.harness.log_prob import draw_request, loss_of
from tests.unit_tests.harness.models import (
    MASKS,
    SEQ_LENGTH,
    gradients,
    make_batch,
    make_config,
    make_gpt_model,
)
from tests.unit_tests.harness.ranks import Layout, run_on_ranks

_SHAPE = (2, SEQ_LENGTH)
# One micro-batch each, of unlike numbers of rows; one has none, None is a call without a selector.
_STEP = ("random", "empty", "full", None)
_LAYOUTS = pytest.mark.parametrize(
    "tp_size, sequence_parallel", [(1, False), (2, True)], ids=["tp1", "tp2sp"]
)
_SCHEDULES = pytest.mark.parametrize("interleaved", [False, True], ids=["1f1b", "interleaved"])
_TIED = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def _micro_batches(masks):
    """Input and request of each micro-batch."""
    found = []
    for seed, name in enumerate(masks):
        mask = None if name is None else MASKS[name](*_SHAPE, 2)
        options = dict(entropy=True, temperature="of tokens", ignored=True)
        found.append((make_batch(2, seed=seed), draw_request(seed, mask, _SHAPE, **options)))
    return found


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

    def run(self, micro_batches, fused, **kwargs):
        """Runs one step; returns its forward data, all values and the finished gradients."""
        every_value = []

        def loss_func(request, output, non_loss_data=False):
            if fused:
                assert output.dtype is torch.float32
                values = output.flatten(0, 1)
            else:
                values = request.true_values(gather_from_tensor_model_parallel_region(output))
            every_value.append(values.detach().clone())
            if non_loss_data:
                return values
            rows = request.rows.sum().int()
            return loss_of(values, request.rows).float(), rows, {"rows": rows}

        def forward_step(data_iterator, model):
            batch, request = next(data_iterator)
            arguments = request.call_arguments()[1] if fused else {}
            return model(**batch, **arguments), partial(loss_func, request)

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        iterators = [iter(micro_batches) for _ in self.chunks]
        data = self.run_schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(iterators) > 1 else self.chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=SEQ_LENGTH,
            micro_batch_size=2,
            **{"forward_only": False, **kwargs},
        )
        found = {
            f"chunk {index}: {name.replace('module.', '')}": gradient
            for index, chunk in enumerate(self.chunks)
            for name, gradient in gradients(chunk).items()
        }
        return data, every_value, found


def _assert_same_step(actual, reference, eps=5e-6, peer=None):
    """Compares values and gradients of two runs; `peer` is a third, see `assert_close`."""
    (_, values, found), (_, expected_values, expected) = actual, reference
    _, peer_values, peer_gradients = peer or (None, [None] * len(values), {})
    for index, (got, due, other) in enumerate(
        zip(values, expected_values, peer_values, strict=True)
    ):
        assert_close(f"values of micro-batch {index}", got, due, eps=eps, peer=other)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        other = peer_gradients.get(name)
        assert_close(name, gradient, expected[name], eps=eps, peer=other)


def _check_parity(sequence_parallel, interleaved, tied):
    pipeline = _Pipeline(sequence_parallel, interleaved, tied)
    for masks in (_STEP, ("empty",) * 4, ("holes",) * 4):
        micro_batches = _micro_batches(masks)
        full = pipeline.run(micro_batches, fused=False)
        fused = pipeline.run(micro_batches, fused=True)
        on_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        assert len(fused[1]) == (len(masks) if on_last_stage else 0)
        _assert_same_step(fused, full)
        # A comparison of nothing with nothing would pass as well.
        not_zero = [name for name, gradient in full[2].items() if gradient.any()]
        assert bool(not_zero) == (masks[0] != "empty"), (masks, not_zero)
        if tied:
            _check_tied_gradient(fused[2])


def _check_tied_gradient(found):
    """The copies of first and last stage have one gradient, the sum of both uses."""
    (copy,) = (
        gradient
        for name, gradient in found.items()
        if "word_embeddings" in name or "output_layer" in name
    )
    group = parallel_state.get_pipeline_model_parallel_group()
    both = [torch.empty_like(copy) for _ in range(group.size())]
    torch.distributed.all_gather(both, copy, group=group)
    assert_same_bits("gradient of the last stage's copy", both[-1], both[0])


def _check_parity_in_bf16():
    wide, narrow = _Pipeline(False), _Pipeline(False, bf16=True)
    micro_batches = _micro_batches(_STEP)
    reference = wide.run(micro_batches, fused=False)
    full = narrow.run(micro_batches, fused=False)
    _assert_same_step(narrow.run(micro_batches, fused=True), reference, eps=4e-3, peer=full)


def _check_mean_over_micro_batches():
    pipeline = _Pipeline(False, calculate_per_token_loss=False)
    micro_batches = _micro_batches(_STEP)
    full = pipeline.run(micro_batches, fused=False)
    _assert_same_step(pipeline.run(micro_batches, fused=True), full)


def _check_freed_outputs():
    micro_batches = _micro_batches(_STEP)
    steps = {}
    for deallocate in (False, True):
        pipeline = _Pipeline(False, deallocate_pipeline_outputs=deallocate)
        steps[deallocate] = pipeline.run(micro_batches, fused=True)
    for (name, gradient), expected in zip(steps[True][2].items(), steps[False][2].values()):
        assert_same_bits(name, gradient, expected)


def _check_forward_only():
    pipeline = _Pipeline(True)
    micro_batches = _micro_batches(_STEP)
    expected = pipeline.run(micro_batches, fused=True)[1]
    for chunk in pipeline.chunks:
        chunk.eval()
    with torch.no_grad():
        data, values, found = pipeline.run(
            micro_batches, fused=True, forward_only=True, collect_non_loss_data=True
        )
    for index, (got, seen, due) in enumerate(zip(data, values, expected, strict=True)):
        # What the schedule hands back is still there afterwards.
        assert_same_bits(f"data of micro-batch {index}", got, seen)
        assert_same_bits(f"values of micro-batch {index}", got, due)
    assert not any(gradient.any() for gradient in found.values())


class TestSchedules:
    """A training step over two stages, of micro-batches with unlike numbers of rows."""

    @_LAYOUTS
    @_SCHEDULES
    @_TIED
    def test_step_equals_full_path(self, tp_size, sequence_parallel, interleaved, tied):
        """Values and finished gradients of every stage, also where a step selects nothing at all.

        A last stage that does not run backward where it has no row leaves the stage before it
        waiting for a gradient. The copies of a tied weight get one gradient, of both uses.
        """
        run_on_ranks(Layout(tp=tp_size, pp=2), _check_parity, sequence_parallel, interleaved, tied)

    def test_step_in_bf16_equals_full_path(self):
        """In Float16Module under DDP, as a trainer wraps it."""
        run_on_ranks(Layout(pp=2), _check_parity_in_bf16)

    def test_mean_over_micro_batches(self):
        """The schedule divides by a count of tokens that is 0 for one micro-batch."""
        run_on_ranks(Layout(pp=2), _check_mean_over_micro_batches)

    def test_deallocated_outputs(self):
        """`deallocate_pipeline_outputs` frees what was sent on; gradients keep their bits."""
        run_on_ranks(Layout(pp=2), _check_freed_outputs)

    def test_forward_only(self):
        """Log-probabilities of a frozen model: the bits of those in training."""
        run_on_ranks(Layout(tp=2, pp=2), _check_forward_only)
