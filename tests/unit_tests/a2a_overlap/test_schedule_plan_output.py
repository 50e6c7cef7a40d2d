# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The output of combined 1F1B's schedule plan against that of the normal forward.

A plan runs the same layers as `GPTModel.forward`, cut into nodes that are run one by one. Whatever
is asked of it, all rows or selected ones, fp32 or the model's precision, values and gradients have
the same bits.
"""

from functools import partial
from typing import Dict, List, Tuple

import pytest
import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from tests.unit_tests.harness.compare import assert_same_bits, assert_same_gradients
from tests.unit_tests.harness.models import (
    MASKS,
    SEQ_LENGTH,
    gradients,
    make_batch,
    make_config,
    make_gpt_model,
    weights_of_loss,
)
from tests.unit_tests.harness.ranks import Layout, call_all, run_on_ranks

_BATCH_SIZE = 2
_DENSE = {}
_MOE = dict(
    num_moe_experts=4,
    moe_ffn_hidden_size=24,
    moe_router_topk=2,
    moe_router_load_balancing_type="none",
    moe_token_dispatcher_type="alltoall",
)
_DENSE_MODELS = [
    pytest.param(Layout(), _DENSE, id="dense"),
    pytest.param(Layout(tp=2), dict(sequence_parallel=True), id="dense-tp2sp"),
]
# With one expert-parallel rank the all-to-all returns its input, which the plan then frees.
_MOE_LAYOUT = Layout(dp=2, ep=2)
_MOE_MODEL = pytest.param(_MOE_LAYOUT, _MOE, id="moe-ep2")
_MODELS = pytest.mark.parametrize("layout, settings", [*_DENSE_MODELS, _MOE_MODEL])


def _make_inputs() -> List[Tuple[Dict[str, Tensor], Tensor]]:
    """Micro-batches with a mask each, of unlike numbers of rows; other ones on other data ranks."""
    dp_rank = parallel_state.get_data_parallel_rank()
    builders = list(MASKS.values())
    return [
        (
            make_batch(_BATCH_SIZE, seed=100 * dp_rank + index),
            builders[(index + dp_rank) % len(builders)](_BATCH_SIZE, SEQ_LENGTH, 2),
        )
        for index in range(len(builders))
    ]


def _gradient_of(output: Tensor) -> Tensor:
    return weights_of_loss(output.shape).to(output.dtype)


def _run_forward(model, batch, **arguments):
    """Output and gradients of the model itself, bare or in its precision wrapper."""
    output = model(**batch, **arguments)
    output.backward(_gradient_of(output))
    found = gradients(model)
    return output, {name.removeprefix("module."): gradient for name, gradient in found.items()}


def _run_plan(model, batch, **arguments):
    """Output and gradients of the model's schedule plan."""
    run = TransformerModelChunkSchedulePlan.run
    plan = model.build_schedule_plan(**batch, **arguments)
    output = run(plan, None)
    run(None, plan, b_grad=_gradient_of(output))
    return output, gradients(model)


def _assert_same(planned, normal):
    assert_same_bits("logits", planned[0], normal[0])
    assert_same_gradients(planned[1], normal[1])


def _check_full_output(settings, tied):
    config = make_config(**settings)
    model = make_gpt_model(config, share_embeddings_and_output_weights=tied)
    batch, _ = _make_inputs()[0]
    normal = _run_forward(model, batch)
    assert normal[0].shape[:2] == (_BATCH_SIZE, SEQ_LENGTH)
    _assert_same(_run_plan(model, batch), normal)


def _check_selected_output(settings, tied):
    model = make_gpt_model(make_config(**settings), share_embeddings_and_output_weights=tied)

    def check(case):
        batch, mask = case
        planned = _run_plan(model, batch, output_row_selector=mask)
        normal = _run_forward(model, batch, output_row_selector=mask)
        assert planned[0].shape[:2] == (1, mask.sum())
        _assert_same(planned, normal)

    call_all(_make_inputs(), check)


def _check_output_dtype(settings):
    config = make_config(bf16=True, **settings)
    model = make_gpt_model(config)
    wrapped = Float16Module(config, model)
    (batch, mask), *_ = _make_inputs()

    def check(arguments):
        planned = _run_plan(model, batch, **arguments)
        upcast = arguments.get("fp32_output", True)
        assert planned[0].dtype is (torch.float32 if upcast else torch.bfloat16)
        _assert_same(planned, _run_forward(wrapped, batch, **arguments))

    selections = ({}, dict(output_row_selector=mask), dict(output_row_selector=mask & False))
    call_all(
        [
            dict(**selection, **dtype)
            for selection in selections
            for dtype in ({}, dict(fp32_output=True), dict(fp32_output=False))
        ],
        check,
    )


class TestSchedulePlanOutput:
    """One micro-batch, forward and then backward."""

    @_MODELS
    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_full_output(self, layout, settings, tied):
        """Upstream's plan leaves the decoder's final norm out after a dense last layer."""
        run_on_ranks(layout, _check_full_output, settings, tied)

    @_MODELS
    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_selected_output(self, layout, settings, tied):
        """A selector that the plan lost or applied twice gives other rows; no row is one too."""
        run_on_ranks(layout, _check_selected_output, settings, tied)

    @_MODELS
    def test_output_dtype(self, layout, settings):
        """Both schedules upcast unless told otherwise. The plan had no way to be told."""
        run_on_ranks(layout, _check_output_dtype, settings)


def _check_overlapped_micro_batches(settings):
    model = make_gpt_model(make_config(**settings))
    inputs = _make_inputs()
    run = TransformerModelChunkSchedulePlan.run

    # All plans exist before the first runs, each with rows of its own.
    plans = [model.build_schedule_plan(**batch, output_row_selector=mask) for batch, mask in inputs]
    planned, previous, gradient = [], None, None
    for plan in plans:
        planned.append(run(plan, previous, b_grad=gradient))
        previous, gradient = plan, _gradient_of(planned[-1])
    run(None, previous, b_grad=gradient)
    planned_gradients = gradients(model)

    for (batch, mask), rows in zip(inputs, planned):
        normal = model(**batch, output_row_selector=mask)
        normal.backward(_gradient_of(normal))
        assert_same_bits("logits", rows, normal)
    assert_same_gradients(planned_gradients, gradients(model))


def _run_schedule(overlap, select):
    """One step of upstream's schedule without pipelining: rows, what it returns, gradients."""
    config = make_config(
        bf16=True, overlap_moe_expert_parallel_comm=overlap, calculate_per_token_loss=True, **_MOE
    )
    model = Float16Module(config, make_gpt_model(config))
    rows, dtypes = [], set()

    def loss_func(mask, output):
        selected = output[0] if select else output[mask]
        rows.append(selected.detach().clone())
        dtypes.add(output.dtype)
        loss = (selected * _gradient_of(selected)).sum()
        return loss, mask.sum().int(), {"loss": loss.detach().clone()}

    def forward_step(data_iterator, model, return_schedule_plan=False):
        batch, mask = next(data_iterator)
        arguments = dict(output_row_selector=mask) if select else {}
        assert return_schedule_plan == overlap
        # The combined schedule hands over the unwrapped model.
        call = model.build_schedule_plan if overlap else model
        return call(**batch, **arguments), partial(loss_func, mask)

    inputs = _make_inputs()
    data = get_forward_backward_func(pp_size=1, vp_size=None)(
        forward_step_func=forward_step,
        data_iterator=iter(inputs),
        model=model,
        num_microbatches=len(inputs),
        seq_length=SEQ_LENGTH,
        micro_batch_size=_BATCH_SIZE,
        forward_only=False,
    )
    assert [len(selected) for selected in rows] == [mask.sum() for _, mask in inputs]
    assert dtypes == {torch.float32}
    return rows, data, gradients(model)


def _check_combined_schedule(select):
    rows, data, found = _run_schedule(overlap=True, select=select)
    expected_rows, expected_data, expected = _run_schedule(overlap=False, select=select)
    for planned, normal in zip(rows, expected_rows):
        assert_same_bits("logits", planned, normal)
    for planned, normal in zip(data, expected_data):
        assert_same_bits("loss", planned["loss"], normal["loss"])
    assert_same_gradients(found, expected)


class TestCombinedSchedule:
    """The backward of one micro-batch within the forward of the next."""

    @_MODELS
    def test_overlapped_micro_batches(self, layout, settings):
        """Rows kept anywhere but in the plan itself would be another micro-batch's."""
        run_on_ranks(layout, _check_overlapped_micro_batches, settings)

    @pytest.mark.parametrize("select", [False, True], ids=["full", "selected"])
    def test_upstream_schedule(self, select):
        """As training calls it: `forward_step` returns a plan, the loss is one more node."""
        run_on_ranks(_MOE_LAYOUT, _check_combined_schedule, select)
