# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""`output_processor` beside `output_row_selector`, both arguments of the model."""

import pytest
import torch

from megatron.core.fusions.linear_log_prob.output_layer import LinearLogProbError
from megatron.core.models.common.log_prob_output import LogProbOutput
from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from megatron.core.models.common.output_row_selector import (
    OutputRowSelector,
    OutputRowSelectorError,
)
from megatron.core.models.common.selective_output import find_unsupported_setting
from megatron.core.transformer.module import Float16Module
from tests.unit_tests.harness.compare import assert_same_bits, assert_same_gradients
from tests.unit_tests.harness.log_prob import backward_of, draw_request, model_outcome
from tests.unit_tests.harness.models import (
    MASKS,
    SEQ_LENGTH,
    make_batch,
    make_config,
    make_gpt_model,
    rows_of_this_rank,
)
from tests.unit_tests.harness.ranks import Layout, run_on_ranks
from tests.unit_tests.harness.record import RecordOps
from tests.unit_tests.harness.unsupported_heads import UNSUPPORTED_SETTINGS

_SHAPE = (2, SEQ_LENGTH)
_TARGETS = torch.zeros(_SHAPE).long()
_SP = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp2", "tp2sp"])


def _mask(name="random"):
    return MASKS[name](*_SHAPE, 2)


def _calls_of(model):
    """Both ways to run a model, of which the second does nothing yet when it returns."""
    return {"forward": model, "plan": model.build_schedule_plan}


def _assert_refused(call, error, setting, **arguments):
    """Asserts that a call raises the named error before it joins any collective."""
    with RecordOps() as record, pytest.raises(error) as raised:
        call(**{**make_batch(2), **arguments})
    assert raised.value.setting == setting, raised.value
    assert not record.collectives
    return str(raised.value)


def _check_settings(sequence_parallel, tied):
    for name, (setting, change) in UNSUPPORTED_SETTINGS.items():
        # What Float16Module wants; the weights' own dtype is not asked for.
        config = make_config(sequence_parallel=sequence_parallel, bf16=True)
        model = make_gpt_model(config, share_embeddings_and_output_weights=tied)
        processor = LogProbOutput(_TARGETS)
        assert find_unsupported_setting(model, LogProbOutput) is None
        assert find_unsupported_setting(Float16Module(config, model), processor) is None
        change(model)
        found = find_unsupported_setting(model, LogProbOutput)
        assert found.setting == setting
        assert str(find_unsupported_setting(Float16Module(config, model), processor)) == str(found)
        for call in _calls_of(model).values():
            text = _assert_refused(
                call, type(found), setting, output_row_selector=_mask(), output_processor=processor
            )
            assert text == str(found)
        # Without the processor it is the selector's own settings that count.
        of_selector = find_unsupported_setting(model)
        assert of_selector is None or str(of_selector) == str(found), name


def _check_refused_calls(sequence_parallel):
    model = make_gpt_model(make_config(sequence_parallel=sequence_parallel))
    mask = _mask()
    arguments = dict(output_row_selector=mask, output_processor=LogProbOutput(_TARGETS))
    for call in _calls_of(model).values():
        _assert_refused(call, OutputRowSelectorError, "labels", labels=_TARGETS, **arguments)
        _assert_refused(
            call,
            OutputRowSelectorError,
            "inference_context",
            inference_context=object(),
            **arguments,
        )
        _assert_refused(
            call, OutputRowSelectorError, "mask", **{**arguments, "output_row_selector": mask[:1]}
        )
    both = LogProbOutput(_TARGETS, output_row_selector=mask)
    with pytest.raises(LinearLogProbError, match="one of them") as raised:
        model(**make_batch(2), output_row_selector=mask, output_processor=both)
    assert raised.value.setting == "output_row_selector"
    model(**make_batch(2), **arguments)


class TestRefusals:
    """A model with a selector says what it refuses on entry, in both schedules."""

    @_SP
    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_settings_of_the_model(self, sequence_parallel, tied):
        """`find_unsupported_setting` with the processor says what the model raises on entry."""
        run_on_ranks(Layout(tp=2), _check_settings, sequence_parallel, tied)

    @_SP
    def test_arguments_of_the_call(self, sequence_parallel):
        """Labels, inference, a mask of other tokens, and a selector in both places."""
        run_on_ranks(Layout(tp=2), _check_refused_calls, sequence_parallel)


def _run_plan(model, batch, **arguments):
    run = TransformerModelChunkSchedulePlan.run
    plan = model.build_schedule_plan(**batch, **arguments)
    return run(plan, None)


def _check_other_processor(sequence_parallel):
    model = make_gpt_model(make_config(sequence_parallel=sequence_parallel))
    hidden, seen = [], []
    hook = model.decoder.register_forward_hook(lambda *args: hidden.append(args[-1]))

    def processor(**keywords):
        seen.append(keywords)
        return keywords["hidden_states"].float().sum(-1, keepdim=True)

    batch, context = make_batch(2), object()
    keywords = dict(output_processor=processor, output_processor_context=context)
    for name in (None, *MASKS):
        mask = None if name is None else _mask(name)
        selection = {} if name is None else dict(output_row_selector=mask)
        hidden.clear(), seen.clear()
        output = model(**batch, **keywords, **selection)
        (given,) = seen
        assert torch.equal(output, given["hidden_states"].sum(-1, keepdim=True))
        assert given["context"] is context
        assert given["output_layer"] is model.output_layer
        assert given["config"] is model.config
        assert given["input_ids"] is batch["input_ids"]
        assert given["labels"] is None
        assert {"output_weight", "scale_logits", "runtime_gather_output"} <= given.keys()
        if mask is None:
            assert "output_row_selector" not in given
            assert given["hidden_states"] is hidden[0]
            continue
        selector = given["output_row_selector"]
        assert isinstance(selector, OutputRowSelector)
        assert torch.equal(selector.mask, mask)
        if not sequence_parallel and mask.any() and not mask.all():
            rows = rows_of_this_rank(mask, False)
            in_row_order = hidden[0].transpose(0, 1)[rows.t()]
            assert torch.equal(given["hidden_states"].squeeze(1), in_row_order)
        assert_same_bits("rows", given["hidden_states"], selector.compact(hidden[0]))
    hook.remove()


class TestOtherProcessors:
    """Any processor gets the compact rows, and what they are."""

    @_SP
    def test_keywords(self, sequence_parallel):
        """Upstream's, and `output_row_selector` where there is one; what it returns is returned."""
        run_on_ranks(Layout(tp=2), _check_other_processor, sequence_parallel)


def _check_both_places(sequence_parallel, tied):
    config = make_config(sequence_parallel=sequence_parallel)
    model = make_gpt_model(config, share_embeddings_and_output_weights=tied)
    batch = make_batch(2)
    for seed, name in enumerate(MASKS):
        request = draw_request(seed, _mask(name), _SHAPE, entropy=True, temperature="of tokens")
        expected = model_outcome(model, batch, request)
        processor = LogProbOutput(
            request.targets.masked_fill(~request.mask, -5),
            temperature=request.temperature,
            entropy=True,
            output_row_selector=request.mask,
        )
        output = model(**batch, output_processor=processor)
        assert output.shape == (1, request.mask.sum(), 2)
        assert torch.equal(processor.scatter(output[0])[request.mask], output[0])
        found = backward_of(model, output[0], request.rows)
        assert_same_bits("values", found.values, expected.values)
        assert_same_gradients(found.gradients, expected.gradients)


class TestSelectorOfTheProcessor:
    """A selector given to `LogProbOutput` does what one given to the model does."""

    @_SP
    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_same_bits(self, sequence_parallel, tied):
        """What runs on unpatched models of megatron-core 0.18 and newer."""
        run_on_ranks(Layout(tp=2), _check_both_places, sequence_parallel, tied)
