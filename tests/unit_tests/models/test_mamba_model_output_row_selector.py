# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""`MambaModel(output_row_selector=mask)` against the rows of the full output.

The decoder is a hybrid stack of attention and MLP layers: the mixer of a Mamba layer needs a CUDA
extension, and the output stage, which this is about, does not know what made its input.
"""

import math

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.models.common.output_row_selector import OutputRowSelectorError
from megatron.core.models.common.selective_output import find_unsupported_setting
from megatron.core.transformer.module import Float16Module
from tests.unit_tests.harness.compare import assert_close, assert_same_bits, assert_same_gradients
from tests.unit_tests.harness.mamba import PATTERN, make_mamba_model
from tests.unit_tests.harness.models import (
    HIDDEN_SIZE,
    MASKS,
    SEQ_LENGTH,
    VOCAB_SIZE,
    device,
    gradients,
    make_batch,
    make_config,
    rows_of_this_rank,
    weights_of_loss,
)
from tests.unit_tests.harness.pairwise import all_pairs, full_product
from tests.unit_tests.harness.ranks import Layout, call_all, run_on_ranks
from tests.unit_tests.harness.record import RecordOps


def _make_config(**settings):
    return make_config(num_layers=len(PATTERN), **settings)


_PARALLEL_SIZES = ((1, False), (2, False), (2, True))
_OPTIONS = dict(
    parallel=_PARALLEL_SIZES,
    batch_size=(1, 2, 3),
    mask=tuple(MASKS),
    tied=(False, True),
    wrapped_in_bf16=(False, True),
)


def _backward(model, rows, mask):
    weights = weights_of_loss((*mask.shape, rows.size(-1)))[mask]
    (rows * weights).sum().backward()
    return gradients(model)


def _check_parity(sequence_parallel, cases):
    models = {}

    def model_of(tied, bf16):
        if (tied, bf16) not in models:
            config = _make_config(sequence_parallel=sequence_parallel, bf16=bf16)
            model = make_mamba_model(config, share_embeddings_and_output_weights=tied)
            models[tied, bf16] = Float16Module(config, model) if bf16 else model
        return models[tied, bf16]

    def check(case):
        model = model_of(case["tied"], case["wrapped_in_bf16"])
        batch = make_batch(case["batch_size"])
        mask = MASKS[case["mask"]](case["batch_size"], SEQ_LENGTH, 2)
        full = model(**batch)[mask]
        full_gradients = _backward(model, full, mask)
        logits = model(**batch, output_row_selector=mask)
        assert logits.shape == (1, mask.sum(), full.size(-1))
        assert logits.dtype is torch.float32
        found = _backward(model, logits[0], mask)
        # Sums over fewer rows have another order; in bf16 each is rounded to 2**-9.
        eps = 2e-2 if case["wrapped_in_bf16"] else 2e-6
        assert_close("logits", logits[0], full, eps=eps)
        assert found.keys() == full_gradients.keys()
        for name, gradient in found.items():
            assert_close(name, gradient, full_gradients[name], eps=eps)

    call_all(cases, check)


def _cases(choose, parallel):
    cases = choose(_OPTIONS, lambda **case: True)
    return [case for case in cases if case["parallel"] == parallel]


_PARALLEL = pytest.mark.parametrize("parallel", _PARALLEL_SIZES, ids=["tp1", "tp2", "tp2sp"])


class TestParity:
    """`logits[0]` equals `full_logits[mask]`, and so do the gradients of a loss on either."""

    @_PARALLEL
    def test_every_pair_of_options(self, parallel):
        """Every two options of the product meet in one case."""
        tp_size, sequence_parallel = parallel
        cases = _cases(all_pairs, parallel)
        run_on_ranks(Layout(tp=tp_size), _check_parity, sequence_parallel, cases)

    @pytest.mark.full
    @_PARALLEL
    def test_full_product(self, parallel):
        """Every combination."""
        tp_size, sequence_parallel = parallel
        cases = _cases(full_product, parallel)
        run_on_ranks(Layout(tp=tp_size), _check_parity, sequence_parallel, cases, time_limit=240)


def _check_unselected_rows(sequence_parallel):
    model = make_mamba_model(_make_config(sequence_parallel=sequence_parallel))
    batch = make_batch(2)
    for name, build in MASKS.items():
        mask = build(2, SEQ_LENGTH, 2)
        keep = rows_of_this_rank(mask, sequence_parallel).unsqueeze(-1)

        def run_with(fill):
            hook = model.decoder.register_forward_hook(
                lambda module, args, output: output.where(keep, fill).contiguous()
            )
            logits = model(**batch, output_row_selector=mask)
            hook.remove()
            return logits, _backward(model, logits[0], mask)

        logits, expected = run_with(0.0)
        spoilt, spoilt_gradients = run_with(math.nan)
        assert_same_bits(f"logits with NaN in the rows outside {name}", spoilt, logits)
        assert_same_gradients(spoilt_gradients, expected)


def _check_size_of_projection(sequence_parallel):
    model = make_mamba_model(_make_config(sequence_parallel=sequence_parallel))
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    inputs = []
    model.output_layer.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    for name, build in MASKS.items():
        mask = build(2, SEQ_LENGTH, 2)
        inputs.clear()
        model(**make_batch(2), output_row_selector=mask)
        ranks = tp_size if sequence_parallel else 1
        rows = max(math.ceil(mask.sum().item() / ranks), 1)
        assert [hidden.numel() for hidden in inputs] == [rows * HIDDEN_SIZE], name


def _check_gathered_output():
    model = make_mamba_model(_make_config(), parallel_output=True)
    batch, mask = make_batch(2), MASKS["holes"](2, SEQ_LENGTH, 2)
    whole = model(**batch, output_row_selector=mask, runtime_gather_output=True)
    assert whole.shape == (1, mask.sum(), VOCAB_SIZE)
    expected = model(**batch, runtime_gather_output=True)[mask]
    assert_close("logits", whole[0], expected, eps=2e-6)


def _check_stage_without_head():
    model = make_mamba_model(_make_config(), post_process=False)
    batch, mask = make_batch(2), MASKS["holes"](2, SEQ_LENGTH, 2)
    assert_same_bits("hidden states", model(**batch, output_row_selector=mask), model(**batch))


class TestOutputStage:
    """What the output layer is given, and where there is none."""

    @_PARALLEL
    def test_unselected_rows_are_not_read(self, parallel):
        """Padding may hold anything; `0 * NaN` of a row that counts for nothing is NaN."""
        tp_size, sequence_parallel = parallel
        run_on_ranks(Layout(tp=tp_size), _check_unselected_rows, sequence_parallel)

    @_PARALLEL
    def test_only_selected_rows_are_projected(self, parallel):
        """Rows selected after the projection of all have the same values and save nothing."""
        tp_size, sequence_parallel = parallel
        run_on_ranks(Layout(tp=tp_size), _check_size_of_projection, sequence_parallel)

    def test_gathered_output(self):
        """`runtime_gather_output` reaches the output layer."""
        run_on_ranks(Layout(tp=2), _check_gathered_output)

    def test_stage_without_head(self):
        """A stage that sends hidden states on sends all of them."""
        run_on_ranks(Layout(), _check_stage_without_head)


def _check_refusals(sequence_parallel):
    model = make_mamba_model(_make_config(sequence_parallel=sequence_parallel))
    batch, mask = make_batch(2), MASKS["random"](2, SEQ_LENGTH, 2)
    assert find_unsupported_setting(model) is None

    def assert_refused(setting, **arguments):
        with RecordOps() as record, pytest.raises(OutputRowSelectorError) as raised:
            model(**batch, **{"output_row_selector": mask, **arguments})
        assert raised.value.setting == setting and setting in str(raised.value), raised.value
        assert not record.collectives
        return raised.value

    assert_refused("labels", labels=batch["input_ids"])
    assert_refused("inference_context", inference_context=object())
    assert_refused("inference_context", inference_params=object())
    for unsuitable in (mask[:1], mask.t(), mask.flatten(), mask.float(), mask.long() * 2):
        assert_refused("mask", output_row_selector=unsuitable)
    # No rank is left waiting in a collective that another did not join.
    model(**batch, output_row_selector=mask)

    model.config.config_logger_dir = "logs"
    assert str(assert_refused("config_logger_dir")) == str(find_unsupported_setting(model))
    model.config.config_logger_dir = ""
    model.output_layer = torch.nn.Linear(HIDDEN_SIZE, 1, device=device())
    assert str(assert_refused("output_layer")) == str(find_unsupported_setting(model))


class TestRefusals:
    """The same as GPTModel's, since the functions are."""

    @pytest.mark.parametrize("sequence_parallel", [False, True])
    def test_named_error_before_any_collective(self, sequence_parallel):
        """Labels, inference, unsuitable masks and settings of the model."""
        run_on_ranks(Layout(tp=2), _check_refusals, sequence_parallel)
