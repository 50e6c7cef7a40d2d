# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Random calls of `linear_log_prob`: a number decides on all of the arguments."""

import contextlib
from dataclasses import dataclass, field, replace
from typing import Dict, List, Optional, Tuple
from unittest import mock

import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.fusions.linear_log_prob import KeepSet, chunking, function, linear_log_prob
from tests.unit_tests.fusions.reference import Outcome, Rows
from tests.unit_tests.harness.models import device

IMPLS = ("torch", "triton")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HUGE = 2**40

# Rows N, rounded up to a multiple of the ranks, hidden size, and columns of a rank. None is a power
# of two.
SHAPES = {
    "one row": (1, 24, 300),
    # With so many rows, 16-bit products on a CPU take columns in pairs.
    "odd": (21, 23, 37),
    "small": (6, 16, 75),
    "medium": (13, 24, 300),
    # More than one block of either kernel.
    "wide": (3, 24, 4500),
}
OPTIONS: Dict[str, tuple] = dict(
    dtype=("fp32", "bf16", "fp16"),
    logits_dtype=("fp32", "match"),
    shape=("one row", "odd", "medium", "wide"),
    temperature=("one", "float", "rows"),
    entropy=(False, "no_grad", True),
    keep=(None, "unmasked", "target", "unmasked, entropy", "target, entropy"),
    bias=(False, True),
    scale=(1.0, 0.7),
    softcap=(None, 4.0),
    # Columns: all in the vocabulary, the last ones not, all of the last rank not.
    padding=("none", "some", "last rank"),
    uneven=(False, True),
    ignored=(False, True),
    # What backward finds of the logits: all in one chunk, all in several, some, none.
    work=("kept", "kept chunks", "partly kept", "again"),
    frozen=((), ("hidden",), ("weight",), ("bias",), ("hidden", "weight")),
    strides=("none", "transposed", "sliced", "expanded"),
    upstream=("both", "log_prob", "entropy"),
)


@dataclass
class Problem:
    """Operands of a call, unsharded, and everything else about it."""

    hidden: Tensor
    weight: Tensor
    bias: Optional[Tensor]
    rows: Rows
    keep: Optional[KeepSet]
    grad_log_prob: Optional[Tensor]
    grad_entropy: Optional[Tensor]
    # Columns of each rank.
    shards: List[int]
    options: dict = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows of all ranks."""
        return self.hidden.size(0)

    def bounds(self, rank: int) -> Tuple[int, int]:
        """First column of a rank, and its end."""
        start = sum(self.shards[:rank])
        return start, start + self.shards[rank]

    def arguments(self) -> dict:
        """Keyword arguments of the call that are the same on every rank."""
        return dict(
            temperature=self.rows.temperature,
            entropy=self.options["entropy"],
            keep=self.keep,
            logit_scale=self.rows.scale,
            logit_softcap=self.rows.softcap,
            vocab_size=self.rows.vocab_size,
            ignore_index=self.rows.ignore_index,
            logits_dtype=self.options["logits_dtype"],
        )


class Draw:
    """Random numbers of a seed, made on the CPU and put on the device."""

    def __init__(self, seed: int):
        self._generator = torch.Generator().manual_seed(seed)

    def integer(self, low: int, high: int) -> int:
        """From `low` up to and with `high`."""
        return int(torch.randint(low, high + 1, (), generator=self._generator))

    def choice(self, values):
        """One of them."""
        return values[self.integer(0, len(values) - 1)]

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Of mean 0 and standard deviation 1."""
        return torch.randn(shape, generator=self._generator).to(dtype).to(device())

    def uniform(self, *shape: int) -> Tensor:
        """From 0 to 1."""
        return torch.rand(shape, generator=self._generator).to(device())

    def integers(self, high: int, *shape: int) -> Tensor:
        """Below `high`."""
        return torch.randint(0, high, shape, generator=self._generator).to(device())


def draw_options(seed: int, **fixed) -> dict:
    """A value of each option; `fixed` ones are as given."""
    draw = Draw(seed)
    options = {name: draw.choice(values) for name, values in OPTIONS.items()}
    options.update(fixed)
    if options["frozen"] in (("bias",), ("hidden", "weight")):
        # Frozen, or the only one that is not.
        options["bias"] = True
    if options["upstream"] == "entropy":
        options["entropy"] = True
    return options


def draw_problem(seed: int, tp_size: int = 1, **fixed) -> Problem:
    """A problem of a seed, with some options fixed."""
    options = draw_options(seed, **fixed)
    draw = Draw(seed + 10**6)
    dtype = _DTYPES[options["dtype"]]
    num_rows, hidden_size, columns = SHAPES[options["shape"]]
    num_rows = -(-num_rows // tp_size) * tp_size
    shards = [columns] * tp_size
    if options["uneven"]:
        shards = [columns - 7 * rank for rank in range(tp_size)]
    total = sum(shards)
    vocab_size = total
    if options["padding"] == "some":
        vocab_size -= 5
    elif options["padding"] == "last rank":
        vocab_size -= shards[-1] if tp_size > 1 else 17

    hidden = _strided(draw, options, "hidden", num_rows, hidden_size, dtype)
    weight = _strided(draw, options, "weight", total, hidden_size, dtype)
    if options["strides"] != "expanded":
        # So large that a padding column which takes part takes over.
        weight[vocab_size:] *= 30
    targets = draw.integers(vocab_size, num_rows)
    if options["ignored"]:
        targets[draw.uniform(num_rows) < 0.3] = -100
    temperature = 1.0
    if options["temperature"] == "float":
        temperature = 0.6
    elif options["temperature"] == "rows":
        temperature = 0.4 + 1.2 * draw.uniform(num_rows)
    rows = Rows(
        targets,
        vocab_size,
        temperature,
        scale=options["scale"],
        softcap=options["softcap"],
        ignore_index=-100,
    )
    keep = None
    if options["keep"]:
        keep, rows = draw_keep_set(draw, rows, options["keep"])
    upstream = [_draw_upstream(draw, options, num_rows) for _ in range(2)]
    return Problem(
        hidden,
        weight,
        draw.normal(total, dtype=dtype) if options["bias"] else None,
        rows,
        keep,
        None if options["upstream"] == "entropy" else upstream[0],
        upstream[1] if options["entropy"] is True and options["upstream"] != "log_prob" else None,
        shards,
        options,
    )


def draw_keep_set(draw: Draw, rows: Rows, kind: str) -> Tuple[KeepSet, Rows]:
    """Random kept ids: none, a few, many, with duplicates, with and without the target."""
    kept = []
    for target in rows.targets.tolist():
        count = draw.choice((0, 1, 3, rows.vocab_size // 2, 2 * rows.vocab_size))
        ids = draw.integers(rows.vocab_size, count).tolist()
        if count > 1:
            ids[-1] = ids[0]
        if count and target >= 0 and draw.integer(0, 1):
            ids[0] = target
        kept.append(ids)
    lengths = torch.tensor([0] + [len(ids) for ids in kept])
    integer = draw.choice((torch.int32, torch.int64))
    ids = torch.tensor([i for row in kept for i in row], dtype=integer, device=device())
    empty, *entropy = kind.split(", ")
    keep = KeepSet(lengths.cumsum(0).to(integer).to(device()), ids, empty, bool(entropy))
    return keep, replace(rows, kept=kept, empty=empty, kept_entropy=bool(entropy))


def _strided(draw, options, name, rows, columns, dtype) -> Tensor:
    """An operand; rows of logits spread over some units."""
    size = 1.0 if name == "hidden" else columns**-0.5 * 1.5
    strides = options["strides"]
    if strides == "transposed":
        return (draw.normal(columns, rows) * size).to(dtype).t()
    if strides == "sliced":
        return (draw.normal(rows, 2 * columns) * size).to(dtype)[:, ::2]
    if strides == "expanded":
        # All rows of hidden states alike, or all elements of a row of the weight.
        base = draw.normal(*((1, columns) if name == "hidden" else (rows, 1)))
        return (base * size).to(dtype).expand(rows, columns)
    return (draw.normal(rows, columns) * size).to(dtype)


def _draw_upstream(draw, options, num_rows) -> Tensor:
    """An incoming gradient; expanded, strided, or with rows that nobody asks for."""
    strides = options["strides"]
    if strides == "expanded":
        return draw.normal(1).expand(num_rows)
    if strides == "sliced":
        return draw.normal(num_rows, 2)[:, 1]
    return draw.normal(num_rows) * (draw.uniform(num_rows) < 0.8)


@contextlib.contextmanager
def rows_a_chunk(rows: int, problem: Problem, columns: int):
    """Has the working memory hold so many rows of logits; yields the bytes of a row."""
    options = problem.options
    wide = options["logits_dtype"] == "fp32" or options["dtype"] == "fp32"
    row_bytes = -(-columns * (4 if wide else 2) // 128) * 128
    # Plans are remembered by their arguments, of which these are none.
    chunking.plan_chunks.cache_clear()
    try:
        with mock.patch.multiple(
            chunking,
            CHUNK_BYTES=64 * problem.num_rows + rows * row_bytes,
            _TILE_ROWS=1,
            _MAX_WORKING_CHUNKS=1,
            # Of so few elements, a product's start would cost more than all the rest.
            _PRODUCT_COST_BY_HIDDEN_SIZE=0,
        ):
            yield row_bytes
    finally:
        chunking.plan_chunks.cache_clear()


@contextlib.contextmanager
def work_of(problem: Problem, columns: int, plans: Optional[list] = None):
    """Sets chunks up as the problem's `work` says; yields the budget and lists the plans made."""
    work = problem.options["work"]

    def plan_chunks(*args, **kwargs):
        plan = chunking.plan_chunks(*args, **kwargs)
        if plans is not None:
            plans.append(plan)
        return plan

    with mock.patch.object(function, "plan_chunks", plan_chunks):
        if work == "kept":
            yield HUGE
            return
        rows = max(problem.num_rows // 4, 1)
        with rows_a_chunk(rows, problem, columns) as row_bytes:
            rows_in_budget = {"kept chunks": HUGE, "partly kept": problem.num_rows - 1, "again": 0}
            yield rows_in_budget[work] * row_bytes


@contextlib.contextmanager
def unwritten_memory_is_nan():
    """Has torch fill new memory with NaN, which whoever reads it before writing then returns."""
    # Warns of operators that are not deterministic instead of refusing them.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def call(problem: Problem, impl: str, sequence_parallel: bool = False, plans=None) -> Outcome:
    """Calls the op on this rank's part, backward included; gradients are those of that part."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    start, end = problem.bounds(rank)
    operands = {"hidden": problem.hidden, "weight": problem.weight[start:end], "bias": None}
    if sequence_parallel:
        operands["hidden"] = problem.hidden.chunk(len(problem.shards))[rank]
    if problem.bias is not None:
        operands["bias"] = problem.bias[start:end]
    leaves = {}
    for name, tensor in operands.items():
        if tensor is not None and name not in problem.options["frozen"]:
            leaves[name] = operands[name] = tensor.detach().requires_grad_()
    arguments = problem.arguments()
    if problem.options["uneven"]:
        arguments["vocab_start"] = start
    with unwritten_memory_is_nan(), work_of(problem, end - start, plans) as budget:
        results = linear_log_prob(
            operands["hidden"],
            operands["weight"],
            problem.rows.targets,
            bias=operands["bias"],
            logits_budget=budget,
            sequence_parallel=sequence_parallel,
            impl=impl,
            **arguments,
        )
    upstream = (problem.grad_log_prob, problem.grad_entropy)
    asked = [index for index, gradient in enumerate(upstream) if gradient is not None]
    with unwritten_memory_is_nan():
        gradients = torch.autograd.grad(
            [results[index] for index in asked],
            list(leaves.values()),
            [upstream[index] for index in asked],
        )
    return Outcome(*results, dict(zip(leaves, gradients)))
