# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""What `LogProbOutput` refuses: by name, on every rank alike, before the head sends anything.

Every rank runs the same cases, so one that raised where another went on would hang.
"""

import re

import pytest
import torch

from megatron.core.fusions.linear_log_prob import KeepSet
from megatron.core.fusions.linear_log_prob.output_layer import (
    LinearLogProbError,
    find_unsupported_output_layer,
)
from megatron.core.models.common.log_prob_output import LogProbOutput
from tests.unit_tests.harness.log_prob import call_arguments
from tests.unit_tests.harness.models import (
    HIDDEN_SIZE,
    MASKS,
    SEQ_LENGTH,
    VOCAB_SIZE,
    device,
    make_batch,
    make_config,
    make_gpt_model,
    rows_of_this_rank,
)
from tests.unit_tests.harness.ranks import Layout, run_on_ranks
from tests.unit_tests.harness.record import RecordOps
from tests.unit_tests.harness.unsupported_heads import UNSUPPORTED_SETTINGS

_SHAPE = (2, SEQ_LENGTH)
_TOKENS = 2 * SEQ_LENGTH
_SP = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp2", "tp2sp"])


def _assert_refused(setting, call, error=LinearLogProbError, sent=()):
    """Asserts that a call raises the same on every rank, and what it had sent before."""
    with RecordOps() as record, pytest.raises(error) as raised:
        call()
    text = str(raised.value)
    names = tuple(collective.name for collective in record.collectives)
    assert names == sent, (setting, text, names)
    if error is LinearLogProbError:
        assert raised.value.setting == setting, raised.value
    assert setting in text
    # A function's text has its address.
    text = re.sub("0x[0-9a-f]+", "0x", text)
    texts = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(texts, text)
    assert texts == [text] * len(texts)
    return raised.value


def _head_alone(sequence_parallel, tied=False):
    """A model whose decoder is an identity, and a call of it on any decoder output."""
    config = make_config(sequence_parallel=sequence_parallel)
    model = make_gpt_model(config, share_embeddings_and_output_weights=tied)
    model.decoder.forward = lambda hidden_states, **kwargs: hidden_states
    rows = rows_of_this_rank(torch.ones(_SHAPE, dtype=torch.bool), sequence_parallel)
    hidden = torch.randn(*rows.shape, HIDDEN_SIZE, device=device(), requires_grad=True)

    def call(*args, **kwargs):
        _, arguments = call_arguments(*args, **kwargs)
        return model(None, None, None, decoder_input=hidden, **arguments)

    return model, call


def _check_settings(sequence_parallel, tied):
    targets = torch.zeros(_SHAPE).long()
    for name, (setting, change) in UNSUPPORTED_SETTINGS.items():
        model, call = _head_alone(sequence_parallel, tied)
        assert LogProbOutput.find_unsupported_setting(model) is None, name
        call(targets)
        change(model)
        found = LogProbOutput.find_unsupported_setting(model)
        error = _assert_refused(setting, lambda: call(targets))
        assert str(error) == str(found)
        if setting != "scale_logits":
            weight = model.shared_embedding_or_output_weight() if tied else None
            of_layer = find_unsupported_output_layer(model.output_layer, weight)
            assert str(of_layer) == str(found)


def _check_subclass_of_nothing():
    model, call = _head_alone(False)
    head = model.output_layer
    head.__class__ = type("Named", (type(head),), {})
    assert LogProbOutput.find_unsupported_setting(model) is None
    call(torch.zeros(_SHAPE).long())
    model.post_process = False
    del model.output_layer
    assert LogProbOutput.find_unsupported_setting(model) is None


def _check_constructor():
    for targets in (
        torch.zeros(_SHAPE),
        torch.zeros(_SHAPE, dtype=torch.int16),
        torch.zeros(_SHAPE).bool(),
        [[0] * SEQ_LENGTH] * 2,
        torch.zeros(_TOKENS).long(),
        torch.zeros(*_SHAPE, 1).long(),
        None,
    ):
        with pytest.raises(LinearLogProbError) as raised:
            LogProbOutput(targets)
        assert raised.value.setting == "targets"


class _Calls:
    """Calls that can't be honoured, of N selected rows."""

    def __init__(self, selected):
        self.targets = torch.zeros(_SHAPE).long()
        self.selected = selected

    def offsets(self, rows):
        """Of a keep set of so many rows, without ids."""
        return KeepSet(torch.zeros(rows + 1).long(), torch.zeros(0).long())

    def named(self):
        """Those whose error is a LinearLogProbError: setting, targets, options."""
        targets, n = self.targets, self.selected
        wrong = [targets[:1], targets[:, ::2], targets.t(), targets.repeat(1, 2)]
        yield from (("targets", wrong_targets, {}) for wrong_targets in wrong)
        for shape in ((n + 1,), (_TOKENS + 1,), (n, 1), _SHAPE[::-1], (1,), ()):
            yield "temperature", targets, dict(temperature=torch.ones(shape))
        for rows in (n + 1, n - 1, _TOKENS + 1, 1):
            yield "keep", targets, dict(keep=self.offsets(rows))

    def other(self):
        """Those that the op refuses: error, argument, targets, options."""
        targets = self.targets
        out_of_range = targets + VOCAB_SIZE
        yield ValueError, "targets", out_of_range, {}
        yield ValueError, "targets", targets + VOCAB_SIZE - 7, dict(vocab_size=VOCAB_SIZE - 7)
        yield ValueError, "targets", targets - 1, {}
        for temperature in (0.0, -1.0, float("nan")):
            yield ValueError, "temperature", targets, dict(temperature=temperature)
        zeros = torch.zeros(_SHAPE)
        yield ValueError, "temperature", targets, dict(temperature=zeros)
        yield TypeError, "temperature", targets, dict(temperature=targets + 1)
        yield TypeError, "temperature", targets, dict(temperature="1")
        graph = torch.ones(_SHAPE, requires_grad=True)
        yield ValueError, "temperature", targets, dict(temperature=graph)
        yield TypeError, "keep", targets, dict(keep=torch.ones(_SHAPE).bool())
        ids = KeepSet(torch.arange(_TOKENS + 1), torch.full((_TOKENS,), VOCAB_SIZE))
        yield ValueError, "keep", targets, dict(keep=ids)
        falling = KeepSet(torch.arange(_TOKENS + 1).flip(0), torch.zeros(_TOKENS).long())
        yield ValueError, "keep", targets, dict(keep=falling)
        yield ValueError, "entropy", targets, dict(entropy="yes")
        yield ValueError, "vocab_size", targets, dict(vocab_size=VOCAB_SIZE + 1)
        yield ValueError, "logit_softcap", targets, dict(logit_softcap=0.0)
        yield ValueError, "logits_dtype", targets, dict(logits_dtype="bf16")
        yield ValueError, "logits_budget", targets, dict(logits_budget=-1)
        yield ValueError, "impl", targets, dict(impl="quack")
        yield TypeError, "ignore_index", targets, dict(ignore_index=None)


def _check_calls(sequence_parallel, mask):
    model, call = _head_alone(sequence_parallel)
    mask = None if mask is None else MASKS[mask](*_SHAPE, 2)
    calls = _Calls(_TOKENS if mask is None else int(mask.sum()))
    # The selector has exchanged its rows when what belongs to rows is looked at.
    sent = ("alltoall_base",) if sequence_parallel and mask is not None else ()
    for setting, targets, options in calls.named():
        _assert_refused(setting, lambda: call(targets, mask, **options), sent=sent)
    for error, setting, targets, options in calls.other():
        _assert_refused(setting, lambda: call(targets, mask, **options), error, sent)
    assert "_forward_impl" not in vars(model.output_layer)
    # No rank is left waiting in a collective that another did not join.
    call(calls.targets, mask).sum().backward()


def _check_scatter():
    _, call = _head_alone(False)
    targets = torch.zeros(_SHAPE).long()
    processor, _ = call_arguments(targets)
    _assert_refused("output_row_selector", lambda: processor.scatter(torch.zeros(3)))
    model = make_gpt_model(make_config())
    processor, arguments = call_arguments(targets)
    output = model(**make_batch(2), **arguments)
    _assert_refused("output_row_selector", lambda: processor.scatter(output[0]))


class TestRefusals:
    """The error names the setting at fault."""

    @_SP
    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_settings_of_the_model(self, sequence_parallel, tied):
        """A caller can ask beforehand, and gets the very text that the call raises."""
        run_on_ranks(Layout(tp=2), _check_settings, sequence_parallel, tied)

    def test_harmless_subclass_and_stage_without_head(self):
        """What overrides nothing is taken; a stage without an output layer has none to refuse."""
        run_on_ranks(Layout(tp=2), _check_subclass_of_nothing)

    def test_targets_of_the_constructor(self):
        """Other types, dtypes and dimensions, before any model is called."""
        run_on_ranks(Layout(tp=2), _check_constructor)

    @_SP
    @pytest.mark.parametrize("mask", [None, "random"])
    def test_arguments_of_the_call(self, sequence_parallel, mask):
        """Shapes, lengths and values, with and without a selector."""
        run_on_ranks(Layout(tp=2), _check_calls, sequence_parallel, mask)

    def test_scatter_without_selector(self):
        """There is nothing to scatter, before and after a call."""
        run_on_ranks(Layout(tp=2), _check_scatter)
