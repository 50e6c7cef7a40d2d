# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""How GPTModel's output stage works on selected rows: what it reads, sends, calls and refuses."""

import math
from collections import Counter

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.models.common.output_row_selector import (
    OutputRowSelector,
    OutputRowSelectorError,
)
from megatron.core.models.common.selective_output import find_unsupported_setting
from megatron.core.transformer.enums import CudaGraphScope
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
    rows_of_this_rank,
    weights_of_loss,
)
from tests.unit_tests.harness.ranks import Layout, run_on_ranks
from tests.unit_tests.harness.record import RecordOps

_TP_AND_SP = pytest.mark.parametrize(
    "tp_size, sequence_parallel", [(1, False), (2, False), (2, True), (4, True)]
)


def _forward_backward(model, batch, selector):
    """Logits of the selected rows and the gradients of a loss on them."""
    logits = model(**batch, output_row_selector=selector)
    (logits * weights_of_loss(logits.shape)).sum().backward()
    return logits, gradients(model)


def _check_unselected_rows(sequence_parallel, tied):
    config = make_config(sequence_parallel=sequence_parallel)
    model = make_gpt_model(config, share_embeddings_and_output_weights=tied)
    batch = make_batch(2)
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    for name, build in MASKS.items():
        mask = build(2, SEQ_LENGTH, tp_size)
        keep = rows_of_this_rank(mask, sequence_parallel).unsqueeze(-1)

        def run_with(fill):
            hook = model.decoder.register_forward_hook(
                lambda module, args, output: output.where(keep, fill).contiguous()
            )
            result = _forward_backward(model, batch, mask)
            hook.remove()
            return result

        # A hook in the reference too: it changes the layout of the gradient that the final norm
        # gets, and with it the order of that norm's sums.
        logits, expected = run_with(0.0)
        for fill in (math.nan, 1e30, math.inf):
            spoilt, spoilt_gradients = run_with(fill)
            assert_same_bits(f"logits with {fill} in the rows outside {name}", spoilt, logits)
            assert_same_gradients(spoilt_gradients, expected)


class TestUnselectedRows:
    """Rows that are not selected are not read, whatever is in them."""

    @_TP_AND_SP
    @pytest.mark.parametrize("tied", [False, True])
    def test_nan_and_huge_values_change_no_bit(self, tp_size, sequence_parallel, tied):
        """Padding may hold anything. `0 * NaN` of a row that counts for nothing is NaN.

        With the empty mask every row is NaN, and all gradients are still exact zeros.
        """
        run_on_ranks(Layout(tp=tp_size), _check_unselected_rows, sequence_parallel, tied)


def _head_alone(model):
    """Makes the model's decoder an identity, so that `decoder_input` is the head's input."""
    model.decoder.forward = lambda hidden_states, **kwargs: hidden_states
    return model


def _collectives_of_head(model, mask, sequence_parallel):
    shape = (*rows_of_this_rank(mask, sequence_parallel).shape, HIDDEN_SIZE)
    hidden_states = torch.randn(shape, device=device(), requires_grad=True)
    with RecordOps() as record:
        logits = model(None, None, None, decoder_input=hidden_states, output_row_selector=mask)
        logits.backward(torch.ones_like(logits))
    return record.collectives


def _check_collectives(sequence_parallel):
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    model = _head_alone(make_gpt_model(make_config(sequence_parallel=sequence_parallel)))
    for batch_size in (1, 3):
        for name, build in MASKS.items():
            mask = build(batch_size, SEQ_LENGTH, tp_size)
            collectives = _collectives_of_head(model, mask, sequence_parallel)
            kinds = Counter(collective.name for collective in collectives)
            rows = max(int(mask.sum()), 1)
            if not sequence_parallel:
                assert kinds == {"allreduce": 1}, (name, kinds)
                assert collectives[0].elements == rows * HIDDEN_SIZE
                continue
            assert kinds["allgather_base"] == 2 and kinds["reduce_scatter_base"] == 1, (name, kinds)
            # Every row: the plain path, which sends no less and needs no exchange.
            assert kinds["alltoall_base"] == (0 if mask.all() else 2), (name, kinds)
            assert kinds.total() == (3 if mask.all() else 5), (name, kinds)
            bound = tp_size * math.ceil(rows / tp_size) * HIDDEN_SIZE
            largest = max(collectives, key=lambda collective: collective.elements)
            assert largest.elements <= bound, f"{name}: {largest} exceeds {bound}"
            assert all(collective.dtype is torch.float32 for collective in collectives)


class TestCollectives:
    """What the head sends in forward and backward follows N, not the number of tokens."""

    @pytest.mark.parametrize("tp_size", [2, 4])
    @pytest.mark.parametrize("sequence_parallel", [False, True])
    def test_number_and_size(self, tp_size, sequence_parallel):
        """With sequence parallelism two all-to-alls, two all-gathers and one reduce-scatter.

        Each of at most `tp * ceil(N / tp) * h` elements, also where one shard has all the rows;
        without it one all-reduce of `N * h`. No row at all costs what one row does, so that every
        rank is in the same collective as the others.
        """
        run_on_ranks(Layout(tp=tp_size), _check_collectives, sequence_parallel)


def _check_hooks_of_head(sequence_parallel):
    model = make_gpt_model(make_config(sequence_parallel=sequence_parallel))
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    calls = []
    model.output_layer.register_forward_pre_hook(lambda module, args: calls.append(args))
    for build in MASKS.values():
        calls.clear()
        model(**make_batch(2), output_row_selector=build(2, SEQ_LENGTH, tp_size))
        assert len(calls) == 1


def _check_recompute(sequence_parallel):
    selected = {}
    for name, settings in {
        "none": {},
        "selective": dict(recompute_granularity="selective"),
        "full": dict(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        ),
    }.items():
        model = make_gpt_model(make_config(sequence_parallel=sequence_parallel, **settings))
        selected[name] = [
            _forward_backward(model, make_batch(2), MASKS[mask](2, SEQ_LENGTH, 2))
            for mask in ("random", "empty")
        ]
    for name in ("selective", "full"):
        for (logits, found), (expected_logits, expected) in zip(selected[name], selected["none"]):
            assert_same_bits(f"logits with {name} recompute", logits, expected_logits)
            assert_same_gradients(found, expected)


def _check_gathered_output():
    parallel = make_gpt_model(make_config(), parallel_output=True)
    gathering = make_gpt_model(make_config(), parallel_output=False)
    batch, mask = make_batch(2), MASKS["holes"](2, SEQ_LENGTH, 2)
    expected = gathering(**batch)[mask]
    for logits in (
        gathering(**batch, output_row_selector=mask),
        parallel(**batch, output_row_selector=mask, runtime_gather_output=True),
    ):
        assert logits.shape == (1, mask.sum(), VOCAB_SIZE)
        torch.testing.assert_close(logits[0], expected, rtol=0, atol=1e-5)


class TestOutputLayerCall:
    """The output layer is called as it always is, once, on fewer rows."""

    @_TP_AND_SP
    def test_forward_pre_hook_fires_once(self, tp_size, sequence_parallel):
        """DDP's overlapped parameter gather waits in that hook; unfired, the weight is stale."""
        run_on_ranks(Layout(tp=tp_size), _check_hooks_of_head, sequence_parallel)

    @pytest.mark.parametrize("sequence_parallel", [False, True])
    def test_activation_recompute(self, sequence_parallel):
        """Recomputed layers give the head the same gradient to start from."""
        run_on_ranks(Layout(tp=2), _check_recompute, sequence_parallel)

    def test_gathered_output(self):
        """A head that gathers its output returns the whole vocabulary of the selected rows."""
        run_on_ranks(Layout(tp=2), _check_gathered_output)


def _check_accepted_masks(sequence_parallel):
    model = make_gpt_model(make_config(sequence_parallel=sequence_parallel))
    batch = make_batch(2)
    mask = MASKS["random"](2, SEQ_LENGTH, 2)
    prebuilt = OutputRowSelector(
        mask,
        tp_group=model.output_layer.tp_group,
        sequence_parallel=model.output_layer.sequence_parallel,
    )
    expected, expected_gradients = _forward_backward(model, batch, mask)
    assert expected.requires_grad
    with RecordOps() as record:
        for selector in (prebuilt, prebuilt, prebuilt):
            logits, found = _forward_backward(model, batch, selector)
            assert_same_bits("logits of a prebuilt selector", logits, expected)
            assert_same_gradients(found, expected_gradients)
    assert record.counts["nonzero"] == 1

    for other in (mask.to(device()), mask.long(), mask.to(device(), torch.uint8)):
        logits, found = _forward_backward(model, batch, other)
        assert_same_bits(f"logits of a mask of {other.dtype} on {other.device}", logits, expected)
        assert_same_gradients(found, expected_gradients)

    # A view of a larger tensor, as a slice of a batch of masks is.
    strided = mask.t().contiguous().t()
    assert not strided.is_contiguous()
    assert_same_bits("logits", model(**batch, output_row_selector=strided), expected)
    model.eval()
    with torch.no_grad():
        assert_same_bits("logits", model(**batch, output_row_selector=prebuilt), expected)


class TestAcceptedSelectors:
    """Every form of the same selection gives the same bits."""

    @pytest.mark.parametrize("tp_size, sequence_parallel", [(1, False), (2, True)])
    def test_same_bits(self, tp_size, sequence_parallel):
        """Integer or bool, here or on the device, prebuilt once for several forward passes."""
        run_on_ranks(Layout(tp=tp_size), _check_accepted_masks, sequence_parallel)


class _ValueHead(torch.nn.Linear):
    """A critic's head in the place of the output layer."""

    sequence_parallel = False

    def forward(self, hidden_states, weight=None, runtime_gather_output=None):
        """As an output layer is called."""
        return super().forward(hidden_states), None


def _config_setting(name, **values):
    def change(model):
        for field, value in values.items():
            setattr(model.config, field, value)

    return name, change


def _value_head(model):
    model.output_layer = _ValueHead(HIDDEN_SIZE, 1, device=device())


# Settings of a model, as changed on a built one: the refusal comes before any use of them.
_UNSUPPORTED_SETTINGS = dict(
    [
        _config_setting("config_logger_dir", config_logger_dir="logs"),
        _config_setting("defer_embedding_wgrad_compute", defer_embedding_wgrad_compute=True),
        _config_setting(
            "cuda_graph_impl",
            cuda_graph_impl="local",
            cuda_graph_scope=[CudaGraphScope.full_iteration],
        ),
        _config_setting("mtp_num_layers", mtp_num_layers=1),
        ("output_layer", _value_head),
    ]
)


def _assert_refused(setting, call):
    """Asserts that a call raises the named error before it joins any collective."""
    with RecordOps() as record, pytest.raises(OutputRowSelectorError) as raised:
        call()
    assert raised.value.setting == setting, raised.value
    assert setting in str(raised.value)
    assert not record.collectives
    return raised.value


def _check_unsupported_settings(sequence_parallel):
    batch, mask = make_batch(2), MASKS["random"](2, SEQ_LENGTH, 2)
    for setting, change in _UNSUPPORTED_SETTINGS.items():
        model = make_gpt_model(make_config(sequence_parallel=sequence_parallel))
        assert find_unsupported_setting(model) is None
        model(**batch, output_row_selector=mask)
        change(model)
        found = find_unsupported_setting(model)
        for call in (model, model.build_schedule_plan):
            error = _assert_refused(setting, lambda: call(**batch, output_row_selector=mask))
            assert str(error) == str(found)


def _check_refused_calls(sequence_parallel):
    model = make_gpt_model(make_config(sequence_parallel=sequence_parallel))
    batch, mask = make_batch(2), MASKS["random"](2, SEQ_LENGTH, 2)
    tp_group = model.output_layer.tp_group
    alone = torch.distributed.new_subgroups(1)[0]
    built_for_other_head = OutputRowSelector(
        mask, tp_group=tp_group, sequence_parallel=not sequence_parallel
    )
    built_for_other_group = OutputRowSelector(mask, tp_group=alone)
    twos = mask.long() * 2
    transposed = torch.ones(SEQ_LENGTH, 2, dtype=torch.bool)
    cases = [
        ("labels", dict(output_row_selector=mask, labels=batch["input_ids"])),
        ("inference_context", dict(output_row_selector=mask, inference_context=object())),
        ("mask", dict(output_row_selector=mask[:1])),
        ("mask", dict(output_row_selector=transposed)),
        ("mask", dict(output_row_selector=mask.flatten())),
        ("mask", dict(output_row_selector=mask.float())),
        ("mask", dict(output_row_selector=twos)),
        ("mask", dict(output_row_selector=mask.nonzero())),
        ("mask", dict(output_row_selector=mask.to("meta"))),
        ("mask", dict(output_row_selector=mask.tolist())),
        ("mask", dict(output_row_selector=OutputRowSelector(mask[:, ::2], tp_group=tp_group))),
        ("sequence_parallel", dict(output_row_selector=built_for_other_head)),
    ]
    if not sequence_parallel:
        cases.append(("tp_group", dict(output_row_selector=built_for_other_group)))
    else:
        # Nothing but the last case's mismatch with the head's own settings is left.
        cases[-2] = ("sequence_parallel", cases[-2][1])
    for setting, arguments in cases:
        for call in (model, model.build_schedule_plan):
            _assert_refused(setting, lambda: call(**{**batch, **arguments}))
    assert find_unsupported_setting(model) is None
    # No rank is left waiting in a collective that another did not join.
    model(**batch, output_row_selector=mask)


class TestRefusals:
    """What cannot be honoured raises its named error, on every rank, before any collective.

    Every rank runs the same cases, so one that raised where another went on would hang.
    """

    @pytest.mark.parametrize("sequence_parallel", [False, True])
    def test_settings_of_the_model(self, sequence_parallel):
        """A caller can ask beforehand, and gets the very error that the model would raise."""
        run_on_ranks(Layout(tp=2), _check_unsupported_settings, sequence_parallel)

    @pytest.mark.parametrize("sequence_parallel", [False, True])
    def test_arguments_of_the_call(self, sequence_parallel):
        """Labels, inference, and a mask that cannot be one of these tokens."""
        run_on_ranks(Layout(tp=2), _check_refused_calls, sequence_parallel)
