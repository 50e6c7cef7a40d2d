# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""`LogProbOutput` through GPTModel against fp64 log_softmax of the model's own full logits.

Values and the gradient of every parameter, over parallel sizes, batch sizes, masks and precision,
and over every option of the processor. What rows that aren't selected have for targets and
temperatures is nonsense throughout: see `tests.unit_tests.harness.log_prob`.
"""

import copy
from dataclasses import dataclass

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.transformer.module import Float16Module
from tests.unit_tests.harness.attention import ReferenceAttention, tokens_of_cp_rank
from tests.unit_tests.harness.compare import assert_close
from tests.unit_tests.harness.log_prob import (
    REQUEST_OPTIONS,
    draw_request,
    model_outcome,
    true_outcome,
)
from tests.unit_tests.harness.models import (
    MASKS,
    SEQ_LENGTH,
    make_batch,
    make_config,
    make_gpt_model,
)
from tests.unit_tests.harness.pairwise import all_pairs, full_product
from tests.unit_tests.harness.ranks import Layout, call_all, run_on_ranks

_PARALLEL = {
    "tp1": (Layout(), False),
    "tp2": (Layout(tp=2), False),
    "tp2sp": (Layout(tp=2), True),
    "tp4sp": (Layout(tp=4), True),
    "tp2sp-cp2": (Layout(tp=2, cp=2), True),
}
_MODEL_OPTIONS = dict(
    parallel=tuple(_PARALLEL),
    batch_size=(1, 2),
    mask=(None, *MASKS),
    tied=(False, True),
    precision=("fp32", "bf16"),
)
# With bf16 an ulp of it, on top of what full logits are off.
_EPS = {"fp32": 1e-5, "bf16": 2**-7}
# What is left in a gradient of 1 - p, of rows that keep little more than their target.
_CANCELLED = 2e-6


@dataclass(frozen=True)
class _Case:
    """A model, a micro-batch and a request; `seed` draws the request's numbers."""

    seed: int
    batch_size: int
    mask: str
    tied: bool
    precision: str
    options: tuple

    @classmethod
    def of(
        cls,
        seed,
        parallel=None,
        batch_size=2,
        mask="random",
        tied=False,
        precision="fp32",
        **options,
    ):
        """A case of options that may be left out."""
        return cls(seed, batch_size, mask, tied, precision, tuple(options.items()))


def _random_case(seed: int) -> _Case:
    generator = torch.Generator().manual_seed(seed)

    def choose(values):
        return values[int(torch.randint(0, len(values), (), generator=generator))]

    every = {**_MODEL_OPTIONS, **REQUEST_OPTIONS, "mask": (None, *MASKS, "drawn", "drawn")}
    # The interpreter takes its time.
    every["impl"] = ("torch",) * 4 + ("triton",)
    return _Case.of(seed, **{name: choose(values) for name, values in every.items()})


class _ParityOfOneLayout:
    """Compares answers with the truth; keeps models between cases."""

    def __init__(self, sequence_parallel: bool):
        self.sequence_parallel = sequence_parallel
        self.models = {}

    def check(self, case: _Case) -> None:
        """Values and every gradient of one case."""
        key = case.tied, case.precision
        if key not in self.models:
            self.models[key] = self._make_models(*key)
        model, wide = self.models[key]
        batch, mask = self._local_input(case)
        shape = tuple(batch["input_ids"].shape)
        request = draw_request(case.seed, mask, shape, **dict(case.options))

        found = model_outcome(model, batch, request)
        expected = true_outcome(wide, batch, request)
        peer = true_outcome(model, batch, request, torch.float32)
        eps = _EPS[case.precision]
        for column, name in enumerate(("log_prob", "entropy")[: request.columns]):
            other = peer.values[:, column]
            due = expected.values[:, column]
            # Logits are of the order of 1; what is left of them may be next to nothing.
            assert_close(name, found.values[:, column], due, eps=eps, peer=other, atol=eps)
        assert found.gradients.keys() == expected.gradients.keys()
        for name, gradient in found.gradients.items():
            due, other = expected.gradients[name], peer.gradients[name]
            assert_close(name, gradient, due, eps=eps, peer=other, atol=_CANCELLED)

    def _local_input(self, case: _Case):
        """This context-parallel rank's part of a micro-batch, and of the mask."""
        tp_size = parallel_state.get_tensor_model_parallel_world_size()
        cp_size = parallel_state.get_context_parallel_world_size()
        batch = make_batch(case.batch_size, seed=case.seed)
        shape = (case.batch_size, SEQ_LENGTH)
        mask = None
        if case.mask == "drawn":
            generator = torch.Generator().manual_seed(case.seed + 1000)
            likely = torch.rand(case.batch_size, 1, generator=generator)
            mask = torch.rand(shape, generator=generator) < likely
        elif case.mask is not None:
            mask = MASKS[case.mask](*shape, tp_size)
        if cp_size == 1:
            return batch, mask
        cp_rank = parallel_state.get_context_parallel_rank()
        tokens = tokens_of_cp_rank(torch.tensor([0, SEQ_LENGTH]), cp_size, cp_rank, zigzag=True)
        batch = dict(
            input_ids=batch["input_ids"][:, tokens],
            position_ids=batch["position_ids"][:, tokens],
            attention_mask=None,
        )
        return batch, None if mask is None else mask[:, tokens]

    def _make_models(self, tied: bool, precision: str):
        """The model, and one in fp32 of the same weights, which may be itself."""
        kwargs = dict(share_embeddings_and_output_weights=tied)
        if parallel_state.get_context_parallel_world_size() > 1:
            kwargs["core_attention"] = ReferenceAttention
        wide = make_gpt_model(make_config(sequence_parallel=self.sequence_parallel), **kwargs)
        if precision == "fp32":
            return wide, wide
        config = make_config(sequence_parallel=self.sequence_parallel, bf16=True)
        model = make_gpt_model(config, **kwargs).bfloat16()
        wide.load_state_dict(copy.deepcopy(model.state_dict()))
        return Float16Module(config, model), wide


def _check_parity(sequence_parallel, cases):
    call_all(cases, _ParityOfOneLayout(sequence_parallel).check)


def _model_cases(choose, parallel):
    """The cases of one layout; a choice of pairs is one over all layouts together."""
    cases = choose(_MODEL_OPTIONS, lambda **case: True)
    return [
        _Case.of(index, **{"entropy": True, **case})
        for index, case in enumerate(cases)
        if case["parallel"] == parallel
    ]


def _option_cases(choose):
    options = dict(REQUEST_OPTIONS, mask=(None, "random", "full"))
    cases = choose(options, lambda **case: True)
    return [_Case.of(index, **case) for index, case in enumerate(cases)]


class TestParity:
    """Log-probability, entropy and gradients are those of the full logits' rows."""

    @pytest.mark.parametrize("parallel", _PARALLEL)
    def test_every_pair_of_model_options(self, parallel):
        """Every two of parallel size, batch size, mask, tied weights and precision meet.

        The mask may select nothing, on some or all ranks of context parallelism, and then every
        gradient is zero to the bit; None is no selector at all.
        """
        layout, sequence_parallel = _PARALLEL[parallel]
        cases = _model_cases(all_pairs, parallel)
        run_on_ranks(layout, _check_parity, sequence_parallel, cases)

    @pytest.mark.parametrize("parallel", ["tp1", "tp2sp"])
    def test_every_pair_of_request_options(self, parallel):
        """Every two options of the processor meet, with and without a selector."""
        layout, sequence_parallel = _PARALLEL[parallel]
        run_on_ranks(layout, _check_parity, sequence_parallel, _option_cases(all_pairs))

    @pytest.mark.parametrize(
        "parallel, count", [("tp1", 24), ("tp2", 12), ("tp2sp", 20), ("tp4sp", 8), ("tp2sp-cp2", 6)]
    )
    def test_random_configurations(self, parallel, count):
        """All options drawn together, masks too."""
        layout, sequence_parallel = _PARALLEL[parallel]
        seeds = range(1000 * len(parallel), 1000 * len(parallel) + count)
        run_on_ranks(layout, _check_parity, sequence_parallel, [_random_case(s) for s in seeds])

    @pytest.mark.full
    @pytest.mark.parametrize("parallel", _PARALLEL)
    def test_full_product_of_model_options(self, parallel):
        """Every combination."""
        layout, sequence_parallel = _PARALLEL[parallel]
        cases = _model_cases(full_product, parallel)
        run_on_ranks(layout, _check_parity, sequence_parallel, cases, time_limit=240)

    @pytest.mark.full
    @pytest.mark.parametrize("parallel", _PARALLEL)
    def test_random_configurations_at_length(self, parallel):
        """More of them."""
        layout, sequence_parallel = _PARALLEL[parallel]
        cases = [_random_case(seed) for seed in range(100, 300)]
        run_on_ranks(layout, _check_parity, sequence_parallel, cases, time_limit=300)
