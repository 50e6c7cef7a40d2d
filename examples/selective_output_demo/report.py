# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The table: full and selected output side by side, and how far their values differ."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Callable, Dict, List, Tuple

import numpy
from rich.table import Table

from selective_output_demo.launcher import DemoError, Measurement
from selective_output_demo.worker import FORWARD, TENSOR_PARALLEL, TRAINING

GIB = 2**30


@dataclass
class Difference:
    """How far selected values are from full ones.

    Attributes:
        log_prob: Largest difference of a log-prob, by kind of step.
        gradient: Largest difference of an entry of any parameter's gradient.
        largest_gradient: Largest entry of any parameter's gradient.
        relative_gradient: Largest difference of an entry of a gradient, measured by the largest
            entry of the same parameter's gradient.
    """

    log_prob: Dict[str, float]
    gradient: float = 0.0
    largest_gradient: float = 0.0
    relative_gradient: float = 0.0


def compare_values(full: Path, selected: Path) -> Difference:
    """Compares the files that the workers of two ways left in their folders.

    Args:
        full: Folder of the full output's rank<r>.npz.
        selected: Folder of the selected output's.

    Raises:
        DemoError: A value is not finite or a gradient is zero, so that nothing was compared.
    """
    difference = Difference({FORWARD: 0.0, TRAINING: 0.0})
    for rank in range(TENSOR_PARALLEL):
        file = f"rank{rank}.npz"
        with numpy.load(full / file) as a, numpy.load(selected / file) as b:
            for name in a.files:
                expected, found = a[name], b[name]
                # A maximum would pass over NaN without a word.
                if not (numpy.isfinite(expected).all() and numpy.isfinite(found).all()):
                    raise DemoError(f"Rank {rank}: {name} holds values that are not finite.")
                largest = float(numpy.abs(expected - found).max())
                if name in difference.log_prob:
                    difference.log_prob[name] = max(difference.log_prob[name], largest)
                    continue
                magnitude = float(numpy.abs(expected).max())
                if magnitude == 0:
                    raise DemoError(f"Rank {rank}: the gradient of {name} is zero.")
                difference.gradient = max(difference.gradient, largest)
                difference.largest_gradient = max(difference.largest_gradient, magnitude)
                difference.relative_gradient = max(
                    difference.relative_gradient, largest / magnitude
                )
    return difference


def rounding(bf16: bool) -> float:
    """Returns what a sum over fewer rows, added up in another order, may differ by."""
    return 2.0**-7 if bf16 else 1e-5


def require_equal(difference: Difference, bf16: bool) -> None:
    """Accepts differences of a rounding, of gradients relative to the parameter's largest entry.

    Raises:
        DemoError: A difference is larger than that.
    """
    allowed = rounding(bf16)
    for name, value in (
        *((f"log-probs ({kind})", value) for kind, value in difference.log_prob.items()),
        ("gradients, relative to the parameter's largest,", difference.relative_gradient),
    ):
        if value > allowed:
            raise DemoError(
                f"Full and selected output disagree: {name} differ by {value:.1e}; rounding "
                f"explains {allowed:.1e}."
            )


def make_table(
    tokens: int, trained: int, full: Measurement, selected: Measurement, difference: Difference
) -> Table:
    """Lays out both ways, forward only and training.

    Args:
        tokens: Number T of packed tokens.
        trained: Number N of rows whose log-probs are used.
        full: Measurement of the full output.
        selected: Measurement of the selected output.
        difference: How far their values differ.
    """
    table = Table(
        title="Full output (as usual) against output_row_selector",
        caption="Bytes of both tensor-parallel ranks together. Peak: the most that was ever "
        "resident, libraries and model included; idle: the same before the first step. Time: the "
        "median step. max |Δ|: the largest difference of any value; of the gradients, whose "
        f"largest is {difference.largest_gradient:.1e}, at most "
        f"{difference.relative_gradient:.1e} of their parameter's largest.",
    )
    table.add_column("")
    for kind in (FORWARD, TRAINING):
        table.add_column(f"{kind}\nfull", justify="right")
        table.add_column("\nselected", justify="right", style="bold")

    def add_row(label: str, forward: Tuple[str, str], training: Tuple[str, str]) -> None:
        table.add_row(label, *forward, *training)

    def add_sizes(label: str, forward: Tuple[float, float], training: Tuple[float, float]) -> None:
        add_row(label, with_ratio(*forward), with_ratio(*training))

    def both(of: Callable[[Measurement, str], float]) -> List[Tuple[float, float]]:
        return [(of(full, kind), of(selected, kind)) for kind in (FORWARD, TRAINING)]

    add_row("packed tokens T", *[(f"{tokens:,}", f"{tokens:,}")] * 2)
    add_row("trained tokens N", *[(f"{trained:,}", f"{trained:,}")] * 2)
    add_row("rows projected", *[(f"{tokens:,}", f"{trained:,}")] * 2)
    add_sizes("fp32 logits, GiB", *both(lambda way, kind: way.logits_bytes / GIB))
    add_sizes("peak, GiB", *both(lambda way, kind: way.peak_bytes[kind] / GIB))
    add_sizes(
        "above idle, GiB", *both(lambda way, kind: (way.peak_bytes[kind] - way.idle_bytes) / GIB)
    )
    add_sizes("time a step, s", *both(lambda way, kind: median(way.seconds[kind])))
    log_probs = [("", f"{difference.log_prob[kind]:.1e}") for kind in (FORWARD, TRAINING)]
    add_row("max |Δ| log-prob", *log_probs)
    add_row("max |Δ| gradient", ("", ""), ("", f"{difference.gradient:.1e}"))
    return table


def with_ratio(full: float, selected: float) -> Tuple[str, str]:
    """Formats a full and a selected figure, the latter with how many times smaller it is."""
    return f"{full:.2f}", f"{selected:.2f} ({full / selected:.1f}×)"
