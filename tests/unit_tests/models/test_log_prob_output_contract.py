# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""How `LogProbOutput` uses the output layer: hooks, threads, bias, frozen weights, what is sent."""

import threading
from unittest import mock

import pytest
import torch

from megatron.core.fusions.linear_log_prob import function, output_layer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from tests.unit_tests.harness.compare import assert_close, assert_same_bits, assert_same_gradients
from tests.unit_tests.harness.log_prob import draw_request, loss_of, model_outcome, true_outcome
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
)
from tests.unit_tests.harness.ranks import Layout, run_on_ranks

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


def _check_hooks(sequence_parallel, tied):
    config = make_config(sequence_parallel=sequence_parallel)
    model = make_gpt_model(config, share_embeddings_and_output_weights=tied)
    head, calls = model.output_layer, []
    head.register_forward_pre_hook(lambda *args: calls.append("before forward"))
    head.register_forward_hook(lambda *args: calls.append("after forward"))
    head.register_full_backward_pre_hook(lambda *args: calls.append("before backward"))
    head.register_full_backward_hook(lambda *args: calls.append("after backward"))
    for mask in (None, *MASKS):
        calls.clear()
        model_outcome(model, make_batch(2), _request(mask))
        assert calls == ["before forward", "after forward", "before backward", "after backward"]
        assert "_forward_impl" not in vars(head)


def _check_layer_after_failures(tied):
    model = make_gpt_model(make_config(), share_embeddings_and_output_weights=tied)
    batch, request = make_batch(2), _request()
    full, expected = model(**batch), model_outcome(model, batch, request)

    class Failure(Exception):
        pass

    def fail(*args, **kwargs):
        raise Failure

    head = model.output_layer
    for place in (head.register_forward_pre_hook, head.register_forward_hook):
        hook = place(fail)
        with pytest.raises(Failure):
            model(**batch, **request.call_arguments()[1])
        hook.remove()
        assert "_forward_impl" not in vars(head)
    with mock.patch.object(output_layer, "run_linear_log_prob", fail), pytest.raises(Failure):
        model(**batch, **request.call_arguments()[1])
    assert "_forward_impl" not in vars(head)
    assert_same_bits("logits", model(**batch), full)
    _assert_same_outcome("values", model_outcome(model, batch, request), expected)


def _check_threads():
    model = make_gpt_model(make_config())
    head, batch, request = model.output_layer, make_batch(2), _request()
    hidden = torch.randn(3, 2, HIDDEN_SIZE, device=device())
    expected_logits, _ = head(hidden)
    expected = model(**batch, **request.call_arguments()[1])
    inside, done, results = threading.Event(), threading.Event(), []

    def wait_inside(module, args):
        if threading.current_thread() is thread:
            inside.set()
            assert done.wait(20)

    thread = threading.Thread(
        target=lambda: results.append(model(**batch, **request.call_arguments()[1]))
    )
    hook = head.register_forward_pre_hook(wait_inside)
    thread.start()
    assert inside.wait(20)
    # The other thread is within its call.
    try:
        logits, _ = head(hidden)
        other = model(**batch, **request.call_arguments()[1])
        logits_afterwards, _ = head(hidden)
    finally:
        done.set()
        thread.join()
    hook.remove()
    assert_same_bits("logits", logits, expected_logits)
    assert_same_bits("logits after a call of this thread", logits_afterwards, expected_logits)
    assert_same_bits("values of this thread", other, expected)
    assert_same_bits("values of the other thread", results[0], expected)
    assert "_forward_impl" not in vars(head)


class TestOutputLayerCall:
    """The output layer is called, once, with its product replaced for that call and thread."""

    @_TP_AND_SP
    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_hooks_fire_once(self, tp_size, sequence_parallel, tied):
        """Forward, backward and their pre-hooks, whatever is selected; DDP lives in them."""
        run_on_ranks(Layout(tp=tp_size), _check_hooks, sequence_parallel, tied)

    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_layer_is_itself_after_an_exception(self, tied):
        """In a hook, or in the product: the next call returns the same logits as ever."""
        run_on_ranks(Layout(tp=2), _check_layer_after_failures, tied)

    def test_other_threads_get_logits(self):
        """While one thread is within its call, another has logits and log-probabilities."""
        run_on_ranks(Layout(), _check_threads)


def _check_bias(sequence_parallel):
    config = make_config(sequence_parallel=sequence_parallel)
    model = make_gpt_model(config)
    torch.manual_seed(5)
    model.output_layer = ColumnParallelLinear(
        HIDDEN_SIZE,
        VOCAB_SIZE,
        config=config,
        init_method=lambda weight: torch.nn.init.normal_(weight, std=0.2),
        bias=True,
        gather_output=False,
    ).to(device())
    with torch.no_grad():
        model.output_layer.bias.normal_()
    for mask in (None, "random", "empty"):
        request, batch = _request(mask, softcap=5.0), make_batch(2)
        expected = true_outcome(model, batch, request)
        assert "output_layer.bias" in expected.gradients
        _assert_close_outcome(model_outcome(model, batch, request), expected)


def _check_frozen_head(sequence_parallel, tied):
    config = make_config(sequence_parallel=sequence_parallel)
    model = make_gpt_model(config, share_embeddings_and_output_weights=tied)
    head = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    trained = [name for name, value in model.named_parameters() if value is not head]
    head.requires_grad_(False)
    batch = make_batch(2)

    def outcome(values, rows):
        loss_of(values, rows).backward()
        assert head.grad is None
        head.grad = torch.zeros_like(head)
        found = gradients(model)
        return {name: found[name] for name in trained}

    for mask in ("random", "empty"):
        request = _request(mask)
        logits = gather_from_tensor_model_parallel_region(model(**batch))
        expected = outcome(request.true_values(logits), request.rows)
        with mock.patch.object(function, "WeightGradient", side_effect=AssertionError):
            output = model(**batch, **request.call_arguments()[1])
            found = outcome(output[0], request.rows)
        for name, gradient in found.items():
            assert_close(name, gradient, expected[name], eps=3e-6)


def _check_accumulation(tied):
    model = make_gpt_model(make_config(), share_embeddings_and_output_weights=tied)
    requests = [
        _request(mask, seed) for seed, mask in enumerate(("random", "empty", None, "holes"))
    ]
    batches = [make_batch(2, seed=seed) for seed in range(len(requests))]
    alone = [true_outcome(model, *pair).gradients for pair in zip(batches, requests)]
    losses = []
    for batch, request in zip(batches, requests):
        output = model(**batch, **request.call_arguments()[1])
        losses.append(loss_of(output.flatten(0, 1), request.rows))
    # In another order than forward, as pipeline schedules have it.
    for loss in losses[::-1]:
        loss.backward()
    for name, gradient in gradients(model).items():
        assert_close(name, gradient, sum(found[name] for found in alone), eps=5e-6)


def _check_second_backward(sequence_parallel):
    model = make_gpt_model(make_config(sequence_parallel=sequence_parallel))
    request = _request()
    loss = loss_of(model(**make_batch(2), **request.call_arguments()[1])[0], request.rows)
    loss.backward(retain_graph=True)
    first = gradients(model)
    loss.backward()
    assert_same_gradients(gradients(model), first)


def _check_recompute(sequence_parallel):
    found = {}
    for name, settings in {
        "none": {},
        "selective": dict(recompute_granularity="selective"),
        "full": dict(
            recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        ),
    }.items():
        model = make_gpt_model(make_config(sequence_parallel=sequence_parallel, **settings))
        found[name] = [
            model_outcome(model, make_batch(2), _request(mask))
            for mask in ("random", "empty", None)
        ]
    for name in ("selective", "full"):
        for outcome, expected in zip(found[name], found["none"]):
            _assert_same_outcome(f"values with {name} recompute", outcome, expected)


def _check_freed_output(sequence_parallel):
    model = make_gpt_model(make_config(sequence_parallel=sequence_parallel))
    for mask in ("random", "full", "empty", None):
        batch, request = make_batch(2), _request(mask)
        expected = model_outcome(model, batch, request)
        output = model(**batch, **request.call_arguments()[1])
        loss = loss_of(output.flatten(0, 1), request.rows)
        output.untyped_storage().resize_(0)
        loss.backward()
        assert_same_gradients(gradients(model), expected.gradients)


class TestTraining:
    """What trainers do to layers and outputs."""

    @_TP_AND_SP
    def test_bias(self, tp_size, sequence_parallel):
        """A bias of the layer counts and gets its gradient."""
        run_on_ranks(Layout(tp=tp_size), _check_bias, sequence_parallel)

    @_TP_AND_SP
    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_frozen_head(self, tp_size, sequence_parallel, tied):
        """No gradient and no memory for one; that of all else is right."""
        run_on_ranks(Layout(tp=tp_size), _check_frozen_head, sequence_parallel, tied)

    @pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
    def test_micro_batches_accumulate(self, tied):
        """Several forward passes before the first backward, one of no row among them."""
        run_on_ranks(Layout(tp=2), _check_accumulation, tied)

    @pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp2", "tp2sp"])
    def test_second_backward(self, sequence_parallel):
        """Through a graph that is retained: the same bits, though backward works in place."""
        run_on_ranks(Layout(tp=2), _check_second_backward, sequence_parallel)

    @pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp2", "tp2sp"])
    def test_activation_recompute(self, sequence_parallel):
        """Recomputed layers get the same gradient to start from."""
        run_on_ranks(Layout(tp=2), _check_recompute, sequence_parallel)

    @pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp2", "tp2sp"])
    def test_output_may_be_freed_before_backward(self, sequence_parallel):
        """Schedules release the output's storage; nothing that backward needs may be there."""
        run_on_ranks(Layout(tp=2), _check_freed_output, sequence_parallel)
