# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""`GPTModel(output_row_selector=mask)` against the rows of the full output.

Parity of values and of every parameter's gradient over parallel sizes, batch sizes, masks, tied
weights and precision; then the promises that parity alone does not show: what is never read, what
is sent, and what a training step with several micro-batches comes to.
"""

import copy

import pytest
import torch

from megatron.core.transformer.module import Float16Module
from tests.unit_tests.harness.compare import assert_close
from tests.unit_tests.harness.models import (
    MASKS,
    SEQ_LENGTH,
    gradients,
    make_batch,
    make_config,
    make_gpt_model,
    weights_of_loss,
)
from tests.unit_tests.harness.pairwise import all_pairs, full_product
from tests.unit_tests.harness.ranks import Layout, call_all, run_on_ranks

_PARALLEL_SIZES = ((1, False), (2, False), (2, True), (4, False), (4, True))
_OPTIONS = dict(
    parallel=_PARALLEL_SIZES,
    batch_size=(1, 2, 3),
    mask=tuple(MASKS),
    tied=(False, True),
    precision=("fp32", "bf16", "bf16 in Float16Module"),
)


class _ParityOfOneLayout:
    """Compares selected with full output; keeps models and full outputs between cases."""

    def __init__(self, tp_size: int, sequence_parallel: bool):
        self.tp_size = tp_size
        self.sequence_parallel = sequence_parallel
        self.models = {}
        self.full_outputs = {}

    def check(self, case: dict) -> None:
        """Values and every gradient of one case."""
        key = case["tied"], case["precision"]
        if key not in self.models:
            self.models[key] = self._make_models(*key)
        model, wide = self.models[key]
        batch = make_batch(case["batch_size"])
        mask = MASKS[case["mask"]](case["batch_size"], SEQ_LENGTH, self.tp_size)

        full, full_gradients = self._rows_of_full_output(key, "model", model, batch, mask)
        selected = model(**batch, output_row_selector=mask.to(batch["input_ids"].device))
        assert selected.shape == (1, mask.sum(), full.size(-1))
        assert selected.dtype == full.dtype
        selected_gradients = self._backward(model, selected[0], mask)

        if case["precision"] == "fp32":
            reference, reference_gradients, peer, eps = full, full_gradients, {}, 1e-6
        else:
            reference, reference_gradients = self._rows_of_full_output(
                key, "wide", wide, batch, mask
            )
            peer, eps = dict(full_gradients, logits=full), 1e-3
        assert_close("logits", selected[0], reference, eps=eps, peer=peer.get("logits"))
        assert selected_gradients.keys() == reference_gradients.keys()
        for name, gradient in selected_gradients.items():
            assert_close(name, gradient, reference_gradients[name], eps=eps, peer=peer.get(name))

    def _make_models(self, tied: bool, precision: str):
        bf16 = precision != "fp32"
        config = make_config(sequence_parallel=self.sequence_parallel, bf16=bf16)
        model = make_gpt_model(config, share_embeddings_and_output_weights=tied)
        if not bf16:
            return model, None
        model = model.bfloat16()
        wide = make_gpt_model(
            make_config(sequence_parallel=self.sequence_parallel),
            share_embeddings_and_output_weights=tied,
        )
        wide.load_state_dict(copy.deepcopy(model.state_dict()))
        return (Float16Module(config, model) if "Module" in precision else model), wide

    def _rows_of_full_output(self, key, role, model, batch, mask):
        """The selected rows of the full output, cut out of it, and the gradients through them."""
        key = (*key, role, len(batch["input_ids"]))
        if key not in self.full_outputs:
            self.full_outputs[key] = model(**batch)
        rows = self.full_outputs[key][mask]
        return rows, self._backward(model, rows, mask)

    @staticmethod
    def _backward(model, rows, mask):
        weights = weights_of_loss((*mask.shape, rows.size(-1)))[mask]
        (rows * weights.to(rows.dtype)).sum().backward(retain_graph=True)
        names = gradients(model)
        return {name.removeprefix("module."): gradient for name, gradient in names.items()}


def _check_parity(sequence_parallel, cases):
    from megatron.core import parallel_state

    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    call_all(cases, _ParityOfOneLayout(tp_size, sequence_parallel).check)


def _cases(choose, parallel):
    """The cases of one layout; a choice of pairs is one over all layouts together."""
    cases = choose(_OPTIONS, lambda **case: True)
    return [case for case in cases if case["parallel"] == parallel]


class TestParity:
    """`logits[0]` equals `full_logits[mask]`, and so do the gradients of a loss on either."""

    @pytest.mark.parametrize("parallel", _PARALLEL_SIZES)
    def test_every_pair_of_options(self, parallel):
        """Every two options of the product meet in one case."""
        tp_size, sequence_parallel = parallel
        cases = _cases(all_pairs, parallel)
        run_on_ranks(Layout(tp=tp_size), _check_parity, sequence_parallel, cases)

    @pytest.mark.full
    @pytest.mark.parametrize("parallel", _PARALLEL_SIZES)
    def test_full_product(self, parallel):
        """Every combination."""
        tp_size, sequence_parallel = parallel
        cases = _cases(full_product, parallel)
        run_on_ranks(Layout(tp=tp_size), _check_parity, sequence_parallel, cases, time_limit=240)
