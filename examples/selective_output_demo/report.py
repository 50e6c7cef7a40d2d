# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The table: full and selected output side by side, and how far their values differ."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import List, Tuple

import numpy
from rich.table import Table

from selective_output_demo.launcher import DemoError, Measurement
from selective_output_demo.worker import FORWARD, TENSOR_PARALLEL, TRAINING

GIB = 2**30


@dataclass
class Difference:
    """How far selected values are from full ones.

    Attributes:
        log_prob: Largest difference of a log-prob.
        gradient: Largest difference of an entry of any parameter's gradient.
        largest_gradient: Largest entry of any parameter's gradient, to judge the difference by.
    """

    log_prob: float
    gradient: float
    largest_gradient: float


def compare_values(full: Path, selected: Path) -> Difference:
    """Compares the files that the workers of two ways left in their folders.

    Args:
        full: Folder of the full output's rank<r>.npz.
        selected: Folder of the selected output's.

    Raises:
        DemoError: A value is not finite or all gradients are zero, so that nothing was compared.
    """
    difference = Difference(0.0, 0.0, 0.0)
    for rank in range(TENSOR_PARALLEL):
        file = f"rank{rank}.npz"
        with numpy.load(full / file) as a, numpy.load(selected / file) as b:
            for name in a.files:
                expected, found = a[name], b[name]
                # A maximum would pass over NaN without a word.
                if not (numpy.isfinite(expected).all() and numpy.isfinite(found).all()):
                    raise DemoError(f"Rank {rank}: {name} holds values that are not finite.")
                largest = float(numpy.abs(expected - found).max())
                if name == "log_probs":
                    difference.log_prob = max(difference.log_prob, largest)
                else:
                    magnitude = float(numpy.abs(expected).max())
                    difference.gradient = max(difference.gradient, largest)
                    difference.largest_gradient = max(difference.largest_gradient, magnitude)
    if difference.largest_gradient == 0:
        raise DemoError("All gradients are zero.")
    return difference


def require_equal(difference: Difference, bf16: bool) -> None:
    """Accepts differences of a rounding, since a sum over fewer rows may be added up in another order.

    Raises:
        DemoError: The difference is larger than that.
    """
    rounding = 2.0**-7 if bf16 else 1e-5
    if difference.log_prob > rounding:
        raise DemoError(
            f"Log-probs differ by {difference.log_prob:.1e}; rounding explains {rounding:.1e}."
        )
    if difference.gradient > rounding * difference.largest_gradient:
        raise DemoError(
            f"Gradients differ by {difference.gradient:.1e}; rounding explains "
            f"{rounding * difference.largest_gradient:.1e}."
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
        caption="Memory and logits: both tensor-parallel ranks together. Peak: the most that was "
        "ever resident, libraries and model included; idle: the same before the first step. Time: "
        "the median. Differences: the largest of any value; the largest gradient is "
        f"{difference.largest_gradient:.1e}.",
    )
    table.add_column("")
    for kind in (FORWARD, TRAINING):
        table.add_column(f"{kind}\nfull", justify="right")
        table.add_column("\nselected", justify="right", style="bold")

    def add_row(label: str, *values_by_kind: Tuple[str, str]) -> None:
        table.add_row(label, *(cell for pair in values_by_kind for cell in pair))

    kinds = (FORWARD, TRAINING)
    add_row("packed tokens T", *[(f"{tokens:,}", f"{tokens:,}")] * 2)
    add_row("trained tokens N", *[(f"{trained:,}", f"{trained:,}")] * 2)
    add_row("rows projected", *[(f"{tokens:,}", f"{trained:,}")] * 2)
    logits = with_ratio(full.logits_bytes / GIB, selected.logits_bytes / GIB)
    add_row("fp32 logits, GiB", *[logits] * 2)
    add_row(
        "peak, GiB",
        *(
            with_ratio(full.peak_bytes[kind] / GIB, selected.peak_bytes[kind] / GIB)
            for kind in kinds
        ),
    )
    add_row(
        "above idle, GiB",
        *(with_ratio(above_idle(full, kind), above_idle(selected, kind)) for kind in kinds),
    )
    add_row(
        "time a step, s",
        *(with_ratio(median(full.seconds[kind]), median(selected.seconds[kind])) for kind in kinds),
    )
    add_row(
        "  its range",
        *((spread(full.seconds[kind]), spread(selected.seconds[kind])) for kind in kinds),
    )
    log_prob, gradient = f"{difference.log_prob:.1e}", f"{difference.gradient:.1e}"
    add_row("log-probs off by", ("", log_prob), ("", log_prob))
    add_row("gradients off by", ("", ""), ("", gradient))
    return table


def above_idle(measurement: Measurement, kind: str) -> float:
    """Returns what the steps of one kind added to the peak, in GiB."""
    return (measurement.peak_bytes[kind] - measurement.idle_bytes) / GIB


def with_ratio(full: float, selected: float) -> Tuple[str, str]:
    """Formats a full and a selected figure, the latter with how many times smaller it is."""
    return f"{full:.2f}", f"{selected:.2f} ({full / selected:.1f} ×)"


def spread(seconds: List[float]) -> str:
    """Formats the range of durations."""
    return f"{min(seconds):.2f}–{max(seconds):.2f}"
