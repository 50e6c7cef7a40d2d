# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""`LogProbOutput` in combined 1F1B's schedule plan against the normal forward pass: equal bits."""

from functools import partial

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from tests.unit_tests.harness.compare import assert_close, assert_same_bits, assert_same_gradients
from tests.unit_tests.harness.log_prob import (
    MODEL_SELECTS,
    Outcome,
    draw_request,
    loss_of,
    model_outcome,
    true_outcome,
)
from tests.unit_tests.harness.models import (
    MASKS,
    SEQ_LENGTH,
    gradients,
    make_batch,
    make_config,
    make_gpt_model,
)
from tests.unit_tests.harness.ranks import Layout, call_all, run_on_ranks

_SHAPE = (2, SEQ_LENGTH)
_MOE = dict(
    num_moe_experts=4,
    moe_ffn_hidden_size=24,
    moe_router_topk=2,
    moe_router_load_balancing_type="none",
    moe_token_dispatcher_type="alltoall",
)
# With one expert-parallel rank the all-to-all returns its input, which the plan then frees.
_MOE_LAYOUT = Layout(dp=2, ep=2)
_MODELS = pytest.mark.parametrize(
    "layout, settings",
    [
        pytest.param(Layout(), {}, id="dense"),
        pytest.param(Layout(tp=2), dict(sequence_parallel=True), id="dense-tp2sp"),
        pytest.param(_MOE_LAYOUT, _MOE, id="moe-ep2"),
    ],
)
_TIED = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
_run = TransformerModelChunkSchedulePlan.run


def _make_model(settings, tied=False, **overrides):
    # Upstream's plan leaves the norm out after a dense last layer, where that is not patched.
    final_norm = MODEL_SELECTS or bool(settings.get("num_moe_experts"))
    return make_gpt_model(
        make_config(**settings, **overrides),
        final_norm=final_norm,
        share_embeddings_and_output_weights=tied,
    )


def _make_inputs():
    """Micro-batches and requests of unlike numbers of rows; other ones on other data ranks."""
    dp_rank = parallel_state.get_data_parallel_rank()
    names = list(MASKS)
    options = dict(entropy=True, temperature="of tokens", ignored=True)
    for index in range(len(names)):
        seed = 100 * dp_rank + index
        mask = MASKS[names[(index + dp_rank) % len(names)]](*_SHAPE, 2)
        yield make_batch(2, seed=seed), draw_request(seed, mask, _SHAPE, **options)
    # Without a selector.
    keep = "of tokens, unmasked"
    yield make_batch(2, seed=50), draw_request(50 + dp_rank, None, _SHAPE, keep=keep, **options)


def _gradient_of(output, request):
    """The gradient of `loss_of` for the model's output."""
    leaf = output.detach().clone().requires_grad_()
    loss_of(leaf.flatten(0, 1), request.rows).backward()
    return leaf.grad


def _plan_outcome(model, batch, request):
    """Values and gradients of the model's schedule plan."""
    _, arguments = request.call_arguments()
    plan = model.build_schedule_plan(**batch, **arguments)
    output = _run(plan, None)
    assert output.dtype is torch.float32
    values = output.detach().flatten(0, 1).clone()
    gradient = _gradient_of(output, request)
    # What newer schedules do once the loss is computed.
    output.untyped_storage().resize_(0)
    _run(None, plan, b_grad=gradient)
    return Outcome(values, gradients(model))


def _assert_same_outcome(actual, expected):
    assert_same_bits("values", actual.values, expected.values)
    assert_same_gradients(actual.gradients, expected.gradients)


def _check_outcome(settings, tied):
    model = _make_model(settings, tied)

    def check(case):
        _assert_same_outcome(_plan_outcome(model, *case), model_outcome(model, *case))

    call_all(list(_make_inputs()), check)
    batch, request = next(_make_inputs())
    planned, expected = _plan_outcome(model, batch, request), true_outcome(model, batch, request)
    assert_close("values", planned.values, expected.values, eps=3e-6)
    for name, gradient in planned.gradients.items():
        assert_close(name, gradient, expected.gradients[name], eps=5e-6)


def _check_bf16(settings):
    model = _make_model(settings, bf16=True).bfloat16()
    wrapped = Float16Module(model.config, model)

    def check(case):
        _assert_same_outcome(_plan_outcome(model, *case), model_outcome(wrapped, *case))

    call_all(list(_make_inputs()), check)


def _check_overlapped_micro_batches(settings):
    model = _make_model(settings)
    inputs = list(_make_inputs())
    # All plans exist before the first runs, each with a processor of its own.
    plans = [
        model.build_schedule_plan(**batch, **request.call_arguments()[1])
        for batch, request in inputs
    ]
    planned, previous, gradient = [], None, None
    for plan, (_, request) in zip(plans, inputs):
        output = _run(plan, previous, b_grad=gradient)
        planned.append(output.detach().flatten(0, 1).clone())
        previous, gradient = plan, _gradient_of(output, request)
    _run(None, previous, b_grad=gradient)
    found = gradients(model)

    for (batch, request), values in zip(inputs, planned):
        normal = model(**batch, **request.call_arguments()[1]).flatten(0, 1)
        assert_same_bits("values", values, normal)
        loss_of(normal, request.rows).backward()
    assert_same_gradients(found, gradients(model))


def _run_schedule(overlap):
    """One step of upstream's schedule without pipelining: values, what it returns, gradients."""
    config = make_config(
        bf16=True, overlap_moe_expert_parallel_comm=overlap, calculate_per_token_loss=True, **_MOE
    )
    model = Float16Module(config, make_gpt_model(config))
    values = []

    def loss_func(request, output):
        assert isinstance(output, torch.Tensor) and output.dtype is torch.float32
        values.append(output.detach().clone())
        loss = loss_of(output.flatten(0, 1), request.rows)
        return loss, request.rows.sum().int(), {"loss": loss.detach().clone()}

    def forward_step(data_iterator, model, return_schedule_plan=False):
        batch, request = next(data_iterator)
        assert return_schedule_plan == overlap
        # The combined schedule hands over the unwrapped model.
        call = model.build_schedule_plan if overlap else model
        return call(**batch, **request.call_arguments()[1]), partial(loss_func, request)

    inputs = list(_make_inputs())
    data = get_forward_backward_func(pp_size=1, vp_size=None)(
        forward_step_func=forward_step,
        data_iterator=iter(inputs),
        model=model,
        num_microbatches=len(inputs),
        seq_length=SEQ_LENGTH,
        micro_batch_size=2,
        forward_only=False,
    )
    return values, data, gradients(model)


def _check_combined_schedule():
    values, data, found = _run_schedule(overlap=True)
    expected_values, expected_data, expected = _run_schedule(overlap=False)
    for planned, normal in zip(values, expected_values, strict=True):
        assert_same_bits("values", planned, normal)
    for planned, normal in zip(data, expected_data, strict=True):
        assert_same_bits("loss", planned["loss"], normal["loss"])
    assert_same_gradients(found, expected)


class TestSchedulePlan:
    """A plan's output and gradients, with the output's storage gone before backward."""

    @_MODELS
    @_TIED
    def test_one_micro_batch(self, layout, settings, tied):
        """Every mask and none; a tied weight counts once each from head and embedding."""
        run_on_ranks(layout, _check_outcome, settings, tied)

    @_MODELS
    def test_bf16(self, layout, settings):
        """The output is fp32 in both schedules, and of the same bits."""
        run_on_ranks(layout, _check_bf16, settings)

    @_MODELS
    def test_overlapped_micro_batches(self, layout, settings):
        """The backward of one micro-batch within the forward of the next."""
        run_on_ranks(layout, _check_overlapped_micro_batches, settings)

    def test_upstream_schedule(self):
        """As training calls it: `forward_step` returns a plan, the loss is one more node."""
        run_on_ranks(_MOE_LAYOUT, _check_combined_schedule)
