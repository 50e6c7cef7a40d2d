# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""`LogProbOutput` in training steps with Megatron's own DDP, optimizers and schedule.

The reference is the same training with full logits, of whose rows the loss takes log_softmax in
fp64. Data-parallel ranks have their own micro-batches, so one may select nothing where another
does.
"""

import contextlib
from functools import partial

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.module import Float16Module
from tests.unit_tests.harness.compare import assert_close
from tests.unit_tests.harness.log_prob import draw_request, loss_of
from tests.unit_tests.harness.models import (
    MASKS,
    SEQ_LENGTH,
    make_batch,
    make_config,
    make_gpt_model,
)
from tests.unit_tests.harness.pairwise import all_pairs, full_product
from tests.unit_tests.harness.ranks import Layout, run_on_ranks
from tests.unit_tests.harness.training import FusedKernels, installed, types_as_on_cuda

_SHAPE = (2, SEQ_LENGTH)
# Masks of the micro-batches of each step, of the even and of the odd data-parallel ranks; None is
# a call without a selector.
_STEPS = (
    # Nothing is selected on one rank, in the first step, after which DDP knows how often each
    # gradient is ready, ...
    (("random", "empty", "holes"), ("one_row", "random", None)),
    # ... in a micro-batch on all ranks, the last one, whose gradients are sent as they come, ...
    (("holes", "random", "empty"), ("empty", "full", "empty")),
    # ... on one rank in a whole step, and in a whole step at all.
    (("empty", "empty", "empty"), ("random", "holes", "last_shard")),
    (("empty", "empty", "empty"), ("empty", "empty", "empty")),
)
_OPTIONS = dict(
    sequence_parallel=(False, True),
    tied=(False, True),
    optimizer=("plain", "distributed", "distributed, overlapped gather"),
    fusion=(False, True),
)


def _requests(step):
    """The requests of this data-parallel rank, with what seeds the input of each."""
    dp_rank = parallel_state.get_data_parallel_rank()
    for index, name in enumerate(_STEPS[step][dp_rank % 2]):
        seed = 100 * step + 10 * index + dp_rank
        mask = None if name is None else MASKS[name](*_SHAPE, 2)
        yield seed, draw_request(
            seed, mask, _SHAPE, entropy=True, temperature="of tokens", ignored=True
        )


class _Trainer:
    """A model in DDP with overlapped gradient reduction, and its optimizer."""

    def __init__(self, sequence_parallel, tied, optimizer="plain", fusion=False, bf16=False):
        self.config = make_config(
            sequence_parallel=sequence_parallel,
            bf16=bf16,
            gradient_accumulation_fusion=fusion,
            calculate_per_token_loss=True,
            finalize_model_grads_func=finalize_model_grads,
        )
        distributed = optimizer != "plain"
        model = make_gpt_model(self.config, share_embeddings_and_output_weights=tied)
        # The weights of a model in fp32 too, so that it is the truth of one in bf16.
        model = model.bfloat16().to(torch.bfloat16 if bf16 else torch.float32)
        self.model = DistributedDataParallel(
            self.config,
            DistributedDataParallelConfig(
                # With bf16 main_grad is too.
                grad_reduce_in_fp32=not bf16,
                overlap_grad_reduce=True,
                use_distributed_optimizer=distributed,
                overlap_param_gather="gather" in optimizer,
                # Less than the head's weight has elements: untied, it gets a bucket of its own.
                bucket_size=1000,
            ),
            Float16Module(self.config, model) if bf16 else model,
        )
        self.config.no_sync_func = self.model.no_sync
        self.head = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        (bucket,) = self.model.param_to_bucket_group[self.head].buckets
        assert tied or set(bucket.params) == {self.head}
        with types_as_on_cuda():
            self.optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    optimizer="adam",
                    lr=0.05,
                    # Not so small that the sign of a tiny gradient decides on a step.
                    adam_eps=0.1,
                    clip_grad=0.5,
                    bf16=bf16,
                    params_dtype=self.config.params_dtype,
                    use_distributed_optimizer=distributed,
                    overlap_param_gather="gather" in optimizer,
                ),
                [self.model],
            )

    def backward(self, step, fused):
        """Forward and backward of a step; returns its values and the reduced gradients."""
        every_value = []

        def loss_func(request, output):
            if fused:
                values = output.flatten(0, 1)
            else:
                values = request.true_values(gather_from_tensor_model_parallel_region(output))
            every_value.append(values.detach().clone())
            return loss_of(values, request.rows).float(), request.rows.sum().int(), {}

        def forward_step(data_iterator, model):
            seed, request = next(data_iterator)
            arguments = request.call_arguments()[1] if fused else {}
            return model(**make_batch(2, seed=seed), **arguments), partial(loss_func, request)

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func(pp_size=1, vp_size=None)(
            forward_step_func=forward_step,
            data_iterator=_requests(step),
            model=self.model,
            num_microbatches=len(_STEPS[step][0]),
            seq_length=SEQ_LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        # A hook that did not run has left the gather of its module's weight unfinished.
        assert all(group.param_gather_handle is None for group in self.model.bucket_groups)
        named = self.model.named_parameters()
        return every_value, {
            name.replace("module.", ""): parameter.main_grad.clone() for name, parameter in named
        }

    def step(self):
        """The optimizer's step; returns the norm of the gradients."""
        with types_as_on_cuda():
            successful, norm, _ = self.optimizer.step()
        assert successful
        return norm

    def parameters(self):
        """Copies of the parameters, which an overlapped gather may not have brought yet."""
        if self.model.use_forward_hook:
            self.model.start_param_sync(force_sync=True)
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


def _assert_all_close(what, actual, expected, eps, peer=None):
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        other = peer[name] if peer else None
        assert_close(f"{what} {name}", value, expected[name], eps=eps, peer=other)


def _assert_head_is_left_alone(trainer, kernels):
    """The op has products of its own: no kernel is given the head's gradient, all else is."""
    addresses = {address for _, address, _ in kernels.calls}
    assert addresses and trainer.head.main_grad.data_ptr() not in addresses


def _check_training(sequence_parallel, tied, optimizer, fusion):
    reference = _Trainer(sequence_parallel, tied, optimizer)
    kernels = FusedKernels()
    with installed(kernels) if fusion else contextlib.nullcontext():
        trainer = _Trainer(sequence_parallel, tied, optimizer, fusion)
        start = trainer.parameters()
        for step in range(len(_STEPS)):
            full, full_gradients = reference.backward(step, fused=False)
            values, found = trainer.backward(step, fused=True)
            norm, full_norm = trainer.step(), reference.step()
            for index, (got, due) in enumerate(zip(values, full, strict=True)):
                assert_close(f"step {step}: values of micro-batch {index}", got, due, eps=1e-5)
            _assert_all_close(f"step {step}: gradient of", found, full_gradients, eps=2e-5)
            assert norm == pytest.approx(full_norm, rel=2e-5), f"norm of step {step}"
    parameters = trainer.parameters()
    _assert_all_close("after training,", parameters, reference.parameters(), eps=1e-5)
    for name, value in parameters.items():
        assert not torch.equal(value, start[name]), f"{name} was not trained"
    if fusion:
        _assert_head_is_left_alone(trainer, kernels)


def _cases(choose):
    return choose(_OPTIONS, lambda **case: True)


def _name(case):
    names = dict(
        sequence_parallel=("no sp", "sp"), tied=("untied", "tied"), fusion=("not fused", "fused")
    )
    return ", ".join(names[key][value] if key in names else value for key, value in case.items())


class TestTraining:
    """Parameters after steps in which ranks, micro-batches and whole steps select nothing."""

    @pytest.mark.parametrize("case", _cases(all_pairs), ids=_name)
    def test_equals_full_path(self, case):
        """Values, reduced gradients, their norm and the trained parameters, at DP 2 and TP 2.

        DDP sends a bucket once each gradient in it was ready as often as in the first step, and
        asserts that it was. A head that is left out where there is no row, that says its gradient
        is in `main_grad` where it is not, or whose hook did not run, fails here.
        """
        run_on_ranks(Layout(tp=2, dp=2), _check_training, **case)

    @pytest.mark.full
    @pytest.mark.parametrize("case", _cases(full_product), ids=_name)
    def test_equals_full_path_in_full_product(self, case):
        """Every combination."""
        run_on_ranks(Layout(tp=2, dp=2), _check_training, **case)


def _check_bf16_gradients(sequence_parallel, tied):
    reference = _Trainer(sequence_parallel, tied)
    peer = _Trainer(sequence_parallel, tied, bf16=True)
    kernels = FusedKernels()
    with installed(kernels):
        trainer = _Trainer(sequence_parallel, tied, fusion=True, bf16=True)
        for step in range(len(_STEPS)):
            _, expected = reference.backward(step, fused=False)
            _, full = peer.backward(step, fused=False)
            _, found = trainer.backward(step, fused=True)
            assert all(gradient.dtype is torch.bfloat16 for gradient in found.values())
            _assert_all_close(f"step {step}: gradient of", found, expected, eps=4e-3, peer=full)
    _assert_head_is_left_alone(trainer, kernels)


class TestFusedWeightGradient:
    """`gradient_accumulation_fusion`, see also the cases of training that have it."""

    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_gradient_in_bf16(self, tied):
        """A main_grad of 16 bits gets one addition a micro-batch."""
        run_on_ranks(Layout(tp=2, dp=2), _check_bf16_gradients, True, tied)
