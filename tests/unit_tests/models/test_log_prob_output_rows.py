# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Which rows `LogProbOutput` reads and sends, in what form it takes them, how it scales them."""

import math

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.models.common.output_row_selector import OutputRowSelector
from tests.unit_tests.harness.compare import assert_close, assert_same_bits, assert_same_gradients
from tests.unit_tests.harness.log_prob import (
    backward_of,
    call_arguments,
    draw_request,
    model_outcome,
    put_on_device,
    true_outcome,
)
from tests.unit_tests.harness.models import (
    HIDDEN_SIZE,
    MASKS,
    SEQ_LENGTH,
    device,
    make_batch,
    make_config,
    make_gpt_model,
    rows_of_this_rank,
)
from tests.unit_tests.harness.ranks import Layout, run_on_ranks
from tests.unit_tests.harness.record import RecordOps

_SHAPE = (2, SEQ_LENGTH)
_TP_AND_SP = pytest.mark.parametrize(
    "tp_size, sequence_parallel", [(1, False), (2, False), (2, True)], ids=["tp1", "tp2", "tp2sp"]
)


def _request(mask="random", seed=0, **options):
    mask = None if mask is None else MASKS[mask](*_SHAPE, 2)
    return draw_request(seed, mask, _SHAPE, **{"entropy": True, **options})


def _assert_same_outcome(what, actual, expected):
    assert_same_bits(what, actual.values, expected.values)
    assert_same_gradients(actual.gradients, expected.gradients)


def _assert_close_outcome(actual, expected, eps=3e-6):
    assert_close("values", actual.values, expected.values, eps=eps)
    for name, gradient in actual.gradients.items():
        assert_close(name, gradient, expected.gradients[name], eps=eps)


def _check_nan_rows(sequence_parallel, tied):
    config = make_config(sequence_parallel=sequence_parallel)
    model = make_gpt_model(config, share_embeddings_and_output_weights=tied)
    batch = make_batch(2)
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    for name, build in MASKS.items():
        mask = build(*_SHAPE, tp_size)
        request = draw_request(1, mask, _SHAPE, entropy=True, temperature="of tokens")
        keep = rows_of_this_rank(mask, sequence_parallel).unsqueeze(-1)

        def run_with(fill):
            hook = model.decoder.register_forward_hook(
                lambda module, args, output: output.where(keep, fill).contiguous()
            )
            result = model_outcome(model, batch, request)
            hook.remove()
            return result

        expected = run_with(0.0)
        for fill in (math.nan, math.inf):
            _assert_same_outcome(f"values with {fill} outside {name}", run_with(fill), expected)


class TestUnselectedRows:
    """Rows that are not selected are not read, whatever is in them."""

    @_TP_AND_SP
    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_nan_changes_no_bit(self, tp_size, sequence_parallel, tied):
        """Padding may hold anything; with the empty mask every row is NaN, all gradients zero."""
        run_on_ranks(Layout(tp=tp_size), _check_nan_rows, sequence_parallel, tied)


def _collectives_of_head(model, mask, sequence_parallel, entropy):
    rows = torch.ones(_SHAPE, dtype=torch.bool) if mask is None else mask
    shape = (*rows_of_this_rank(rows, sequence_parallel).shape, HIDDEN_SIZE)
    hidden = torch.randn(shape, device=device(), requires_grad=True)
    _, arguments = call_arguments(torch.zeros(_SHAPE).long(), mask, entropy=entropy)
    with RecordOps() as forward:
        output = model(None, None, None, decoder_input=hidden, **arguments)
    with RecordOps() as backward:
        output.sum().backward()
    return forward.collectives, backward.collectives


def _check_collectives(sequence_parallel):
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    model = make_gpt_model(make_config(sequence_parallel=sequence_parallel))
    # An identity, so that decoder_input is the head's input.
    model.decoder.forward = lambda hidden_states, **kwargs: hidden_states
    for name, build in (*MASKS.items(), (None, lambda *sizes: None)):
        mask = build(*_SHAPE, tp_size)
        for entropy in (False, True):
            forward, backward = _collectives_of_head(model, mask, sequence_parallel, entropy)
            sent = [[collective.name for collective in pass_] for pass_ in (forward, backward)]
            every = mask is None or bool(mask.all())
            rows = 2 * SEQ_LENGTH if every else max(int(mask.sum()), 1)
            if not sequence_parallel:
                assert sent == [["allgather_base"], ["allreduce"]], (name, sent)
            else:
                rows = -(-rows // tp_size) * tp_size
                exchange = [] if every else ["alltoall_base"]
                assert sent == [
                    exchange + ["allgather_base"] * 2,
                    ["allgather_base", "reduce_scatter_base"] + exchange,
                ], (name, sent)
            # The last one of forward is that of the statistics: 16 bytes a row and rank.
            assert forward[-1].elements <= 4 * rows * tp_size and forward[-1].dtype.itemsize == 4
            for collective in forward[:-1] + backward:
                assert collective.elements <= rows * HIDDEN_SIZE, (name, collective)


class TestCollectives:
    """What the head sends follows N, not the number of tokens."""

    @pytest.mark.parametrize("tp_size", [2, 4])
    @pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
    def test_number_and_size(self, tp_size, sequence_parallel):
        """Forward: the selector's exchange, the layer's gather, one of packed statistics.

        Backward: one gather, one reduce-scatter, one exchange. Without sequence parallelism one
        gather and one all-reduce. No row at all costs what one row does.
        """
        run_on_ranks(Layout(tp=tp_size), _check_collectives, sequence_parallel)


def _check_forms(sequence_parallel):
    model = make_gpt_model(make_config(sequence_parallel=sequence_parallel))
    head, batch = model.output_layer, make_batch(2)
    for options in (
        dict(temperature="of tokens", keep="of tokens, unmasked", ignored=True),
        dict(temperature="of rows", keep="of rows, target", ignored=True),
    ):
        request = _request(**options)
        expected = model_outcome(model, batch, request)
        for put in (
            put_on_device,
            lambda tensor: tensor if tensor.is_floating_point() else tensor.int(),
            # A view of a larger tensor, as a slice of a batch is.
            lambda tensor: torch.stack([tensor, tensor * 0], -1)[..., 0],
        ):
            _assert_same_outcome("values", model_outcome(model, batch, request, put), expected)
        prebuilt = OutputRowSelector(
            request.mask, tp_group=head.tp_group, sequence_parallel=head.sequence_parallel
        )
        for mask in (prebuilt, prebuilt, request.mask.long(), request.mask.to(device())):
            _, arguments = request.call_arguments(selector=mask)
            output = model(**batch, **arguments)
            found = backward_of(model, output[0], request.rows)
            _assert_same_outcome("values", found, expected)
        with torch.no_grad():
            output = model(**batch, **request.call_arguments()[1])
        assert not output.requires_grad
        assert_same_bits("values without gradients", output[0], expected.values)


class TestAcceptedForms:
    """Every form of the same request gives the same bits."""

    @pytest.mark.parametrize("tp_size, sequence_parallel", [(1, False), (2, True)])
    def test_same_bits(self, tp_size, sequence_parallel):
        """On the CPU or the device, int32, strided, a selector built before, no gradients."""
        run_on_ranks(Layout(tp=tp_size), _check_forms, sequence_parallel)


def _check_scale():
    config = make_config()
    scales = hasattr(config, "use_mup")
    if scales:
        config = make_config(use_mup=True, mup_base_hidden_size=HIDDEN_SIZE // 4)
        assert config.mup_output_mult == 0.25
    model = make_gpt_model(config)
    batch = make_batch(2)
    hidden = []
    hook = model.decoder.register_forward_hook(lambda *args: hidden.append(args[-1]))
    logits = model(**batch)
    hook.remove()
    unscaled, _ = model.output_layer(hidden[0])
    expected = unscaled.transpose(0, 1) * (0.25 if scales else 1.0)
    assert_close("logits", logits, expected, eps=1e-6)
    for mask in ("random", None):
        request = _request(mask, temperature="float", softcap=3.0)
        expected = true_outcome(model, batch, request)
        _assert_close_outcome(model_outcome(model, batch, request), expected)


class TestScale:
    """MuP, where core has it, scales logits; other models don't."""

    def test_scale_of_the_configuration(self):
        """Log-probabilities are those of the logits as the model returns them."""
        run_on_ranks(Layout(tp=2), _check_scale)
