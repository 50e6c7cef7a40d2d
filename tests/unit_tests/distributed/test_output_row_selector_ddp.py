# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""`output_row_selector` in training steps with Megatron's own DDP, optimizers and schedule.

The reference is the same training with full output, of which the loss takes the rows of the mask.
Data-parallel ranks have their own micro-batches, so one may select nothing where another does.
"""

import contextlib
from functools import partial
from unittest import mock

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
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.module import Float16Module
from tests.unit_tests.harness.compare import assert_close
from tests.unit_tests.harness.models import (
    MASKS,
    SEQ_LENGTH,
    device,
    make_batch,
    make_config,
    make_gpt_model,
    weights_of_loss,
)
from tests.unit_tests.harness.pairwise import all_pairs, full_product
from tests.unit_tests.harness.ranks import Layout, run_on_ranks

_BATCH_SIZE = 2
# Masks of the three micro-batches of each step, of the even and of the odd data-parallel ranks.
_STEPS = (
    # Nothing is selected on one rank, in the first step, after which DDP knows how often each
    # gradient is ready, ...
    (("random", "empty", "holes"), ("one_row", "random", "full")),
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


def _masks(step):
    """The masks of this data-parallel rank, with what seeds the input of each."""
    dp_rank = parallel_state.get_data_parallel_rank()
    for index, name in enumerate(_STEPS[step][dp_rank % 2]):
        mask = MASKS[name](_BATCH_SIZE, SEQ_LENGTH, 2).to(device())
        yield mask, 100 * step + 10 * index + dp_rank


class _FusedKernels:
    """Stands in for apex's extension that adds a weight gradient to `main_grad`."""

    def __init__(self):
        self.calls = []

    def _accumulate(self, name, total_input, grad_output, main_grad):
        # What the kernels ask for.
        assert total_input.dim() == grad_output.dim() == 2
        assert total_input.is_contiguous() and grad_output.is_contiguous()
        assert len(total_input) == len(grad_output) > 0
        self.calls.append((name, main_grad.data_ptr(), len(total_input)))
        main_grad += (grad_output.t().float() @ total_input.float()).to(main_grad.dtype)

    def wgrad_gemm_accum_fp32(self, total_input, grad_output, main_grad):
        """Into a gradient of fp32."""
        assert main_grad.dtype is torch.float32
        self._accumulate("fp32", total_input, grad_output, main_grad)

    def wgrad_gemm_accum_fp16(self, total_input, grad_output, main_grad):
        """Into a gradient of the weight's own 16 bits."""
        assert main_grad.dtype is total_input.dtype
        self._accumulate("fp16", total_input, grad_output, main_grad)


@contextlib.contextmanager
def _kernels(kernels):
    """Has linear layers find these kernels, as if apex were installed."""
    with (
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", kernels, create=True),
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
    ):
        yield


@contextlib.contextmanager
def _types_as_on_cuda():
    """Optimizers sort parameters by the name of their type, and know those of CUDA."""
    name = torch.Tensor.type
    if device().type == "cuda":
        yield
        return

    def name_on_cuda(self, dtype=None, **kwargs):
        if dtype is not None:
            return name(self, dtype, **kwargs)
        return name(self).replace("torch.", "torch.cuda.")

    with mock.patch.object(torch.Tensor, "type", name_on_cuda):
        yield


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
                # With bf16 the gradient is too, for the other kernel.
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
        assert tied or bucket.params == {self.head}
        with _types_as_on_cuda():
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

    def backward(self, step, select):
        """Forward and backward of a step; returns its rows and the reduced gradients."""
        rows = []

        def loss_func(mask, output):
            selected = output[0] if select else output[mask]
            rows.append(selected.detach().clone())
            weights = weights_of_loss((*mask.shape, selected.size(-1)))[mask]
            return (selected * weights).sum(), mask.sum().int(), {}

        def forward_step(data_iterator, model):
            mask, seed = next(data_iterator)
            arguments = dict(output_row_selector=mask) if select else {}
            output = model(**make_batch(_BATCH_SIZE, seed=seed), **arguments)
            return output, partial(loss_func, mask)

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func(pp_size=1, vp_size=None)(
            forward_step_func=forward_step,
            data_iterator=_masks(step),
            model=self.model,
            num_microbatches=len(_STEPS[step][0]),
            seq_length=SEQ_LENGTH,
            micro_batch_size=_BATCH_SIZE,
        )
        # A hook that did not run has left the gather of its module's weight unfinished.
        assert all(group.param_gather_handle is None for group in self.model.bucket_groups)
        named = self.model.named_parameters()
        return rows, {name: parameter.main_grad.clone() for name, parameter in named}

    def step(self):
        """The optimizer's step; returns the norm of the gradients."""
        with _types_as_on_cuda():
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


def _check_training(sequence_parallel, tied, optimizer, fusion):
    reference = _Trainer(sequence_parallel, tied, optimizer)
    kernels = _FusedKernels()
    with _kernels(kernels) if fusion else contextlib.nullcontext():
        trainer = _Trainer(sequence_parallel, tied, optimizer, fusion)
        start = trainer.parameters()
        for step in range(len(_STEPS)):
            full_rows, full_gradients = reference.backward(step, select=False)
            rows, found = trainer.backward(step, select=True)
            norm, full_norm = trainer.step(), reference.step()
            for index, (got, due) in enumerate(zip(rows, full_rows, strict=True)):
                assert_close(f"step {step}: logits of micro-batch {index}", got, due, eps=1e-5)
            _assert_all_close(f"step {step}: gradient of", found, full_gradients, eps=1e-5)
            assert norm == pytest.approx(full_norm, rel=1e-5), f"norm of step {step}"
    parameters = trainer.parameters()
    _assert_all_close("after training,", parameters, reference.parameters(), eps=1e-5)
    for name, value in parameters.items():
        assert not torch.equal(value, start[name]), f"{name} was not trained"
    if fusion:
        _check_kernel_calls(trainer, kernels, "fp32")


def _check_kernel_calls(trainer, kernels, name):
    """The head's weight gradient is one call a micro-batch, of as many rows as are sent."""
    ranks = 1
    if trainer.config.sequence_parallel:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
    expected = [
        max(-(-int(mask.sum()) // ranks), 1) * ranks
        for step in range(len(_STEPS))
        for mask, _ in _masks(step)
    ]
    head = trainer.head.main_grad.data_ptr()
    calls = [(kernel, rows) for kernel, weight, rows in kernels.calls if weight == head]
    assert calls == [(name, rows) for rows in expected]


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
        """Losses, reduced gradients, their norm and the trained parameters, at DP 2 and TP 2.

        DDP sends a bucket once each gradient in it was ready as often as in the first step, and
        asserts that it was. A head that is left out where there is no row, or that is used past
        its module, whose hook waits for an overlapped gather of its weight, fails here.
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
    kernels = _FusedKernels()
    with _kernels(kernels):
        trainer = _Trainer(sequence_parallel, tied, fusion=True, bf16=True)
        for step in range(len(_STEPS)):
            _, expected = reference.backward(step, select=False)
            _, full = peer.backward(step, select=False)
            _, found = trainer.backward(step, select=True)
            assert all(gradient.dtype is torch.bfloat16 for gradient in found.values())
            found, full = (
                {name.replace("module.module.", "module."): value for name, value in x.items()}
                for x in (found, full)
            )
            _assert_all_close(f"step {step}: gradient of", found, expected, eps=4e-3, peer=full)
    _check_kernel_calls(trainer, kernels, "fp16")


class TestFusedWeightGradient:
    """`gradient_accumulation_fusion`, see also the cases of training that have it."""

    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_gradient_in_bf16(self, tied):
        """The kernel for 16 bits is given the rows that it would be for 32, never none."""
        run_on_ranks(Layout(tp=2, dp=2), _check_bf16_gradients, True, tied)
