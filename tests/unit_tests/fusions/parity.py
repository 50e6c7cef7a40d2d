# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Holds a call of `linear_log_prob` against the reference, within an error budget.

An error may be three times that of plain torch in the same dtype, plus what roundings may do where
plain torch happens to be lucky, as with a single row:

    results     8 ulps of the logits' dtype, relative to the largest logit or log(vocabulary)
    gradients   the same, since a logit's error is a probability's relative error, and an ulp of
                the gradient's dtype, relative to the largest gradient; and, relative to its
                largest term, twice an ulp of the logits' dtype and the fp32 rounding of the largest
                logit, for terms that cancel: the target's 1 - p, of logits projected again
"""

import math

import torch
from torch import Tensor

from tests.unit_tests.fusions.problems import Problem
from tests.unit_tests.fusions.reference import Outcome, plain_torch, truth
from tests.unit_tests.harness.compare import assert_close


def assert_right(
    problem: Problem, outcome: Outcome, rank: int = 0, sequence_parallel: bool = False
) -> None:
    """Asserts values and the gradients of a rank's part."""
    operands = (
        problem.hidden,
        problem.weight,
        problem.bias,
        problem.rows,
        problem.grad_log_prob,
        problem.grad_entropy,
    )
    expected = truth(*operands)
    fp32_logits = problem.options["logits_dtype"] == "fp32"
    peer = plain_torch(*operands, shards=problem.shards, fp32_logits=fp32_logits)
    dtype = problem.hidden.dtype
    ulp = torch.finfo(torch.float32 if fp32_logits else dtype).eps
    eps = 8 * ulp * max(_largest_logit(problem), math.log(problem.rows.vocab_size))

    _assert_results("log_prob", outcome.log_prob, expected.log_prob, peer.log_prob, eps)
    if problem.options["entropy"] is False:
        assert outcome.entropy is None
    else:
        assert outcome.entropy.requires_grad == (problem.options["entropy"] is True)
        _assert_results("entropy", outcome.entropy, expected.entropy, peer.entropy, eps)
    assert outcome.gradients.keys() == expected.gradients.keys() - {*problem.options["frozen"]}
    # Of this rank's part, but relative to all of it.
    size = len(problem.shards)
    for name, gradient in outcome.gradients.items():
        assert gradient.dtype is dtype
        due, of_peer = expected.gradients[name], peer.gradients[name]
        largest = due.abs().max().item()
        part = slice(*problem.bounds(rank))
        if name == "hidden":
            shard = problem.num_rows // size
            part = slice(rank * shard, (rank + 1) * shard) if sequence_parallel else slice(None)
        _assert_exact_zeros(problem, name, gradient, part.start or 0)
        budget = (eps + torch.finfo(dtype).eps) * largest
        cancelling = ulp + torch.finfo(torch.float32).eps * _largest_logit(problem)
        budget += 2 * cancelling * _largest_term(problem, name)
        due, of_peer = due[part], of_peer[part]
        assert_close(f"gradient of {name}", gradient, due, eps=0.0, peer=of_peer, atol=budget)


def _assert_exact_zeros(problem: Problem, name: str, gradient: Tensor, start: int) -> None:
    """Padding columns and ignored rows take no part at all."""
    if name == "hidden":
        ignored = problem.rows.targets == problem.rows.ignore_index
        left_out = gradient[ignored[start : start + len(gradient)]]
    else:
        left_out = gradient[max(problem.rows.vocab_size - start, 0) :]
    assert not left_out.any(), f"gradient of {name} is not 0 for what takes no part"


def _assert_results(name: str, actual: Tensor, due: Tensor, peer: Tensor, eps: float) -> None:
    assert actual.dtype is torch.float32
    assert_close(name, actual, due, eps=0.0, peer=peer, atol=eps)


def _largest_logit(problem: Problem) -> float:
    x = torch.nn.functional.linear(
        problem.hidden.double(),
        problem.weight.double(),
        None if problem.bias is None else problem.bias.double(),
    )
    return problem.rows.logits(x).abs().max().item() / _lowest_temperature(problem)


def _lowest_temperature(problem: Problem) -> float:
    temperature = problem.rows.temperature
    return temperature if isinstance(temperature, float) else temperature.min().item()


def _largest_term(problem: Problem, name: str) -> float:
    """Upper bound of what one logit's own term adds to an element of a gradient."""
    largest = 0.0
    if problem.grad_log_prob is not None:
        largest = problem.grad_log_prob.abs().max().item()
    if problem.grad_entropy is not None:
        # Times p * (log p + entropy).
        largest += problem.grad_entropy.abs().max().item() * math.log(problem.rows.vocab_size)
    factor = {"hidden": problem.weight, "weight": problem.hidden}.get(name)
    if factor is not None:
        largest *= factor.abs().max().item()
    return largest * problem.rows.scale / _lowest_temperature(problem)
