# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""`Float16Module(...)(output_row_selector=mask)`, around models that know the argument or do not.

Around a custom model provider's module the wrapper selects from the half-precision output itself.
It has nothing but a signature and a shape to tell the cases apart, so the shapes that look alike
are tried, and what is neither has to be refused.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.common.output_row_selector import (
    OutputRowSelector,
    OutputRowSelectorError,
)
from megatron.core.models.common.selective_output import find_unsupported_setting
from megatron.core.transformer.module import Float16Module
from tests.unit_tests.harness.compare import assert_same_bits, assert_same_gradients
from tests.unit_tests.harness.models import (
    HIDDEN_SIZE,
    MASKS,
    SEQ_LENGTH,
    VOCAB_SIZE,
    device,
    gradients,
    make_batch,
    make_config,
    make_gpt_model,
    weights_of_loss,
)
from tests.unit_tests.harness.ranks import Layout, call_all, run_on_ranks


class _CustomModel(torch.nn.Module):
    """A module of a model provider's own around a language model."""

    def __init__(self, language_model):
        super().__init__()
        self.language_model = language_model
        self.calls = []


class _TakesNoSelector(_CustomModel):
    """Its forward has neither the argument nor room for any keyword."""

    def forward(self, input_ids, position_ids, attention_mask):
        """All rows."""
        self.calls.append({})
        return self.language_model(input_ids, position_ids, attention_mask)


class _IgnoresKeywords(_CustomModel):
    """Takes any keyword and does nothing with it."""

    def forward(self, input_ids, position_ids, attention_mask, **kwargs):
        """All rows."""
        self.calls.append(kwargs)
        return self.language_model(input_ids, position_ids, attention_mask)


class _PassesKeywordsOn(_CustomModel):
    """Hands to the language model what it is given."""

    def forward(self, input_ids, position_ids, attention_mask, **kwargs):
        """What the language model makes of it."""
        self.calls.append(kwargs)
        return self.language_model(input_ids, position_ids, attention_mask, **kwargs)


class _NamesSelector(_CustomModel):
    """Has the argument."""

    def forward(self, input_ids, position_ids, attention_mask, output_row_selector=None):
        """What the language model makes of it."""
        self.calls.append(dict(output_row_selector=output_row_selector))
        return self.language_model(
            input_ids, position_ids, attention_mask, output_row_selector=output_row_selector
        )


_FULL_OUTPUT = (_TakesNoSelector, _IgnoresKeywords)
_SELECTED_OUTPUT = (_PassesKeywordsOn, _NamesSelector)


class _Returns(torch.nn.Module):
    """Returns something made beforehand."""

    def __init__(self, output):
        super().__init__()
        self.output = output
        self.calls = 0

    def forward(self, input_ids):
        """Counts its calls."""
        self.calls += 1
        return self.output


class _ReturnsWithKeywords(_Returns):
    """The same, of a forward that any keyword can be passed to."""

    def forward(self, input_ids, **kwargs):
        """Counts its calls."""
        return super().forward(input_ids)


class _ReturnsLoss(_Returns):
    """The same, of a forward that labels can be passed to by position."""

    def forward(self, input_ids, labels=None):
        """Counts its calls."""
        return super().forward(input_ids)


class _RowsOfLogits(TorchDispatchMode):
    """Notes of how many rows the logits are that operators return, by dtype."""

    def __init__(self):
        super().__init__()
        self.rows = {torch.float32: set(), torch.bfloat16: set()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.t.default:
            # The head's weight, as its product takes it.
            return result
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (self._columns(),):
                self.rows[tensor.dtype].add(tensor.numel() // self._columns())
        return result

    @staticmethod
    def _columns():
        return VOCAB_SIZE // parallel_state.get_tensor_model_parallel_world_size()


def _masks(batch_size):
    """Masks by name, one of them of as many rows as a sequence has tokens."""
    masks = {name: build(batch_size, SEQ_LENGTH, 2) for name, build in MASKS.items()}
    masks["whole sequence"] = torch.zeros(batch_size, SEQ_LENGTH, dtype=torch.bool)
    masks["whole sequence"][-1] = True
    return masks


def _cases():
    return [(batch_size, name) for batch_size in (1, 2, 3) for name in _masks(batch_size)]


def _selectors(mask, language_model):
    """The same selection as the wrapper may be given it."""
    output_layer = language_model.output_layer
    prebuilt = OutputRowSelector(
        mask, tp_group=output_layer.tp_group, sequence_parallel=output_layer.sequence_parallel
    )
    return {"mask": mask, "prebuilt": prebuilt, "integers": mask.long()}


def _backward(wrapped, rows, full_shape, mask):
    weights = weights_of_loss((*full_shape[:2], rows.size(-1)))[mask]
    (rows * weights.to(rows.dtype)).sum().backward()
    return gradients(wrapped)


def _make_wrapped(model_class, sequence_parallel=False):
    config = make_config(bf16=True, sequence_parallel=sequence_parallel)
    return Float16Module(config, model_class(make_gpt_model(config)))


def _check_full_output_is_selected_from(model_class, sequence_parallel):
    wrapped = _make_wrapped(model_class, sequence_parallel)

    def check(case):
        batch_size, name = case
        mask, batch = _masks(batch_size)[name], make_batch(batch_size)
        full = wrapped(**batch)
        expected = full[mask]
        expected_gradients = _backward(wrapped, expected, mask.shape, mask)
        for form, selector in _selectors(mask, wrapped.module.language_model).items():
            selected = wrapped(**batch, output_row_selector=selector)
            assert selected.shape == (1, mask.sum(), full.size(-1))
            assert_same_bits(f"logits of {form}", selected[0], expected)
            found = _backward(wrapped, selected[0], mask.shape, mask)
            assert_same_gradients(found, expected_gradients, ignore_sign_of_zero=True)

    call_all(_cases(), check)


def _check_selected_output_is_kept(model_class, sequence_parallel):
    wrapped = _make_wrapped(model_class, sequence_parallel)
    language_model = wrapped.module.language_model

    def check(case):
        batch_size, name = case
        mask, batch = _masks(batch_size)[name], make_batch(batch_size)
        expected = language_model(**batch, output_row_selector=mask).float()
        expected_gradients = _backward(wrapped, expected[0], mask.shape, mask)
        for form, selector in _selectors(mask, language_model).items():
            selected = wrapped(**batch, output_row_selector=selector)
            # As the caller gave it: a prebuilt one is there to be built once.
            assert wrapped.module.calls[-1]["output_row_selector"] is selector
            assert_same_bits(f"logits of {form}", selected, expected)
            found = _backward(wrapped, selected[0], mask.shape, mask)
            assert_same_gradients(found, expected_gradients)

    call_all(_cases(), check)


def _check_upcast_rows(model_class):
    wrapped = _make_wrapped(model_class)
    batch, all_rows = make_batch(2), 2 * SEQ_LENGTH
    with _RowsOfLogits() as full:
        wrapped(**batch)
    assert full.rows[torch.float32] == {all_rows}
    for name, mask in _masks(2).items():
        with _RowsOfLogits() as record:
            wrapped(**batch, output_row_selector=mask)
        assert record.rows[torch.float32] == {mask.sum().item()}, name
        if model_class in _SELECTED_OUTPUT and not mask.all():
            # Even of no row the output layer computes one.
            assert max(record.rows[torch.bfloat16]) == max(mask.sum().item(), 1), name


def _check_output_dtype(model_class):
    wrapped = _make_wrapped(model_class)
    batch = make_batch(2)
    for name, mask in _masks(2).items():
        wide = wrapped(**batch, output_row_selector=mask, fp32_output=True)
        narrow = wrapped(**batch, output_row_selector=mask, fp32_output=False)
        assert wide.dtype is torch.float32
        assert narrow.dtype is torch.bfloat16 and narrow.requires_grad
        assert_same_bits(f"logits of {name}", narrow.float(), wide)
        with _RowsOfLogits() as record:
            wrapped(**batch, output_row_selector=mask, fp32_output=False)
        assert not record.rows[torch.float32], name


def _check_call_without_selector(model_class):
    wrapped = _make_wrapped(model_class)
    batch = make_batch(2)
    expected = wrapped.module(**batch).float()
    assert_same_bits("logits", wrapped(**batch), expected)
    assert_same_bits("logits", wrapped(**batch, output_row_selector=None), expected)
    # Nothing is passed on: a module that checks its keywords would refuse None too.
    assert all(call.get("output_row_selector") is None for call in wrapped.module.calls)
    if model_class is not _NamesSelector:
        assert wrapped.module.calls == [{}] * 3


_TP_AND_SP = pytest.mark.parametrize(
    "tp_size, sequence_parallel", [(1, False), (2, True)], ids=["tp1", "tp2sp"]
)
_ALL_MODELS = pytest.mark.parametrize("model_class", _FULL_OUTPUT + _SELECTED_OUTPUT)


class TestWrappedModel:
    """The rows, whoever selects them, and what is upcast for them."""

    @_TP_AND_SP
    @pytest.mark.parametrize("model_class", _FULL_OUTPUT)
    def test_full_output_is_selected_from(self, model_class, tp_size, sequence_parallel):
        """The rows of the upcast full output, and the gradients through them, to the bit."""
        run_on_ranks(
            Layout(tp=tp_size), _check_full_output_is_selected_from, model_class, sequence_parallel
        )

    @_TP_AND_SP
    @pytest.mark.parametrize("model_class", _SELECTED_OUTPUT)
    def test_selected_output_is_kept(self, model_class, tp_size, sequence_parallel):
        """Selected rows selected from once more are other rows, or an index out of range."""
        run_on_ranks(
            Layout(tp=tp_size), _check_selected_output_is_kept, model_class, sequence_parallel
        )

    @_ALL_MODELS
    def test_only_selected_rows_are_upcast(self, model_class):
        """An fp32 copy of all rows is what runs out of memory, whatever is selected from it."""
        run_on_ranks(Layout(), _check_upcast_rows, model_class)

    @_ALL_MODELS
    def test_output_dtype(self, model_class):
        """`fp32_output=False` holds for selected rows too."""
        run_on_ranks(Layout(), _check_output_dtype, model_class)

    @_ALL_MODELS
    def test_call_without_selector(self, model_class):
        """A module that never heard of the argument must not be handed it."""
        run_on_ranks(Layout(), _check_call_without_selector, model_class)


def _make_half(output, model_class=_Returns, **settings):
    return Float16Module(make_config(bf16=True, **settings), model_class(output))


def _logits(*shape):
    return torch.randn(*shape, VOCAB_SIZE, device=device()).bfloat16()


def _check_other_stages():
    last_rank = parallel_state.is_pipeline_last_stage()
    tokens, mask = make_batch(2)["input_ids"], MASKS["holes"](2, SEQ_LENGTH, 2)
    # What a stage sends on; one of a shape that could be logits, and one that could not.
    for output in (_logits(2, SEQ_LENGTH), torch.randn(SEQ_LENGTH, 2, HIDDEN_SIZE).bfloat16()):
        for model_class in (_Returns, _ReturnsWithKeywords):
            stage = _make_half(output, model_class)
            if not last_rank:
                assert stage(tokens, output_row_selector=mask) is output
            # The first of two chunks on each rank: no last stage on any.
            chunk = _make_half(
                output, model_class, num_layers=4, virtual_pipeline_model_parallel_size=2
            )
            chunk.vp_stage = 0
            assert chunk(tokens, output_row_selector=mask) is output
    if last_rank:
        output = _logits(2, SEQ_LENGTH)
        chunk = _make_half(output, num_layers=4, virtual_pipeline_model_parallel_size=2)
        for chunk.vp_stage, wrapped in ((1, chunk), (None, _make_half(output))):
            selected = wrapped(tokens, output_row_selector=mask)
            assert_same_bits("logits", selected[0], output[mask].float())


class TestPipelineStages:
    """Logits come out of the last stage alone."""

    def test_other_stages_are_left_alone(self):
        """Hidden states selected from, or upcast, are not what the next stage waits for."""
        run_on_ranks(Layout(pp=2), _check_other_stages)


_BATCH_SIZE, _ROWS = 2, 16
_UNSUITABLE_OUTPUTS = {
    "tuple": lambda: (_logits(2, SEQ_LENGTH), None),
    "list": lambda: [_logits(2, SEQ_LENGTH)],
    "namespace": lambda: SimpleNamespace(logits=_logits(2, SEQ_LENGTH)),
    "nothing": lambda: None,
    "loss of each token": lambda: _logits(2, SEQ_LENGTH)[..., 0],
    "loss": lambda: _logits(2, SEQ_LENGTH).sum(),
    "positions first": lambda: _logits(SEQ_LENGTH, 2),
    "other length": lambda: _logits(2, SEQ_LENGTH + 1),
    "shard of the sequence": lambda: _logits(2, SEQ_LENGTH // 2),
    "one sequence": lambda: _logits(1, SEQ_LENGTH),
    "rows without a batch": lambda: _logits(_ROWS),
    "a row too many": lambda: _logits(1, _ROWS + 1),
    "rows first": lambda: _logits(_ROWS, 1),
}


def _assert_refused(setting, call):
    with pytest.raises(OutputRowSelectorError) as raised:
        call()
    assert raised.value.setting == setting, raised.value
    assert setting in str(raised.value)
    return raised.value


def _check_unsuitable_outputs(model_class):
    tokens = make_batch(_BATCH_SIZE)["input_ids"]
    mask = torch.zeros(_BATCH_SIZE, SEQ_LENGTH, dtype=torch.bool)
    mask[:, : _ROWS // 2] = True
    assert mask.sum() == _ROWS

    def check(name):
        wrapped = _make_half(_UNSUITABLE_OUTPUTS[name](), model_class)
        # Without a selector it is nobody's business.
        wrapped(tokens)
        call = partial(wrapped, tokens, output_row_selector=mask)
        assert model_class.__name__ in str(_assert_refused("model", call))

    call_all(list(_UNSUITABLE_OUTPUTS), check)


def _check_output_of_as_many_rows():
    # The logits of the last token alone, and a mask that selects another one.
    tokens, mask = make_batch(1)["input_ids"], MASKS["one_row"](1, SEQ_LENGTH, 2)
    wrapped = _make_half(_logits(1, 1))
    _assert_refused("model", partial(wrapped, tokens, output_row_selector=mask))


def _check_refused_calls():
    batch, mask = make_batch(2), MASKS["random"](2, SEQ_LENGTH, 2)

    def check(model_class):
        config = make_config(bf16=True)
        for argument, setting in (
            ("labels", "labels"),
            ("inference_context", "inference_context"),
            ("inference_params", "inference_context"),
        ):
            if model_class is None:
                wrapped = Float16Module(config, make_gpt_model(config))
                call = partial(wrapped, **batch)
            else:
                wrapped = _make_half(_logits(2, SEQ_LENGTH), model_class)
                call = partial(wrapped, batch["input_ids"])
            _assert_refused(
                setting, partial(call, output_row_selector=mask, **{argument: batch["input_ids"]})
            )
            assert not getattr(wrapped.module, "calls", 0)
        wrapped = _make_half(_logits(2, SEQ_LENGTH), model_class or _ReturnsWithKeywords)
        for selector in (mask.flatten(), mask.float(), mask.long() * 2, mask.tolist()):
            call = partial(wrapped, batch["input_ids"], output_row_selector=selector)
            _assert_refused("mask", call)
            assert not wrapped.module.calls

    call_all([None, _ReturnsWithKeywords, _Returns], check)
    wrapped = _make_half(_logits(2, SEQ_LENGTH), _ReturnsLoss)
    call = partial(wrapped, batch["input_ids"], batch["input_ids"], output_row_selector=mask)
    _assert_refused("labels", call)
    assert not wrapped.module.calls


class TestRefusals:
    """What cannot be told for sure is refused, and names what is at fault."""

    @pytest.mark.parametrize("model_class", [_Returns, _ReturnsWithKeywords])
    def test_unsuitable_outputs(self, model_class):
        """Rows taken from an output of another layout are wrong ones, without an error."""
        run_on_ranks(Layout(), _check_unsuitable_outputs, model_class)

    def test_output_of_as_many_rows_from_one_that_cannot_select(self):
        """A forward that was given no selector has selected nothing, however many rows it has."""
        run_on_ranks(Layout(), _check_output_of_as_many_rows)

    def test_arguments_of_the_call(self):
        """Before the module is called, which may run for minutes and join collectives."""
        run_on_ranks(Layout(), _check_refused_calls)


def _bare(model):
    return model


def _in_ddp(model):
    config = getattr(model, "config", None) or make_config()
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def _check_settings_of_wrapped_models():
    config = make_config(bf16=True)
    for model_class in (*_FULL_OUTPUT, _PassesKeywordsOn):
        wrapped = Float16Module(config, model_class(make_gpt_model(make_config())))
        assert find_unsupported_setting(wrapped) is None
        assert find_unsupported_setting(_in_ddp(wrapped)) is None
    # The wrapper does not hide what is inside.
    model = make_gpt_model(make_config())
    for wrapped in (model, Float16Module(config, model), _in_ddp(Float16Module(config, model))):
        model.config.config_logger_dir = ""
        assert find_unsupported_setting(wrapped) is None
        model.config.config_logger_dir = "logs"
        assert find_unsupported_setting(wrapped).setting == "config_logger_dir"


def _check_settings_of_bare_models(wrap):
    for model_class in (*_FULL_OUTPUT, _PassesKeywordsOn):
        found = find_unsupported_setting(wrap(model_class(make_gpt_model(make_config()))))
        assert found is not None and found.setting == "model", f"{model_class.__name__}: {found}"
        assert model_class.__name__ in str(found)


class TestFindUnsupportedSetting:
    """Asking beforehand gives the answer of the call."""

    def test_of_wrapped_models(self):
        """A caller that falls back where it need not has lost."""
        run_on_ranks(Layout(), _check_settings_of_wrapped_models)

    def test_of_bare_models(self):
        """Nothing selects from the output of one that does not name the argument."""
        run_on_ranks(Layout(), _check_settings_of_bare_models, _bare)

    def test_of_models_in_data_parallelism_alone(self):
        """A model in fp32 has a wrapper, and still nothing that selects from its output."""
        run_on_ranks(Layout(), _check_settings_of_bare_models, _in_ddp)
