# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The table: full and selected output side by side, and how far their values differ."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import List

import numpy
from rich.table import Table

from selective_output_demo.launcher import Measurement
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
    """
    difference = Difference(0.0, 0.0, 0.0)
    for rank in range(TENSOR_PARALLEL):
        file = f"rank{rank}.npz"
        with numpy.load(full / file) as a, numpy.load(selected / file) as b:
            for name in a.files:
                expected = a[name]
                largest = float(numpy.abs(expected - b[name]).max())
                if name == "log_probs":
                    difference.log_prob = max(difference.log_prob, largest)
                else:
                    magnitude = float(numpy.abs(expected).max())
                    difference.gradient = max(difference.gradient, largest)
                    difference.largest_gradient = max(difference.largest_gradient, magnitude)
    return difference


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
        title=f"T = {tokens:,} packed tokens, N = {trained:,} trained tokens ({trained / tokens:.0%})",
        caption="Memory and logits: both tensor-parallel ranks together. Peak: the most that was "
        "ever resident, Python and libraries included.",
    )
    table.add_column("")
    table.add_column("output")
    for heading in (
        "rows\nprojected",
        "fp32 logits\nMiB",
        "peak memory\nGiB",
        "above idle\nGiB",
        "time a step\ns (min–max)",
        "largest difference\nfrom full",
    ):
        table.add_column(heading, justify="right")
    differences = {
        FORWARD: f"log-prob {difference.log_prob:.1e}",
        TRAINING: f"gradient {difference.gradient:.1e}\n(of {difference.largest_gradient:.1e})",
    }
    for kind in (FORWARD, TRAINING):
        table.add_row(kind, "full", *format_cells(tokens, full, kind), "")
        cells = format_cells(trained, selected, kind)
        table.add_row("", "selected", *cells, differences[kind], style="bold")
        table.add_row("", "ratio", *format_ratios(full, selected, kind), "", end_section=True)
    return table


def format_cells(rows: int, measurement: Measurement, kind: str) -> List[str]:
    """Formats one way's figures, from rows projected to time."""
    seconds = measurement.seconds[kind]
    peak = measurement.peak_bytes[kind]
    return [
        f"{rows:,}",
        f"{measurement.logits_bytes / 2**20:,.0f}",
        f"{peak / GIB:.2f}",
        f"{(peak - measurement.idle_bytes) / GIB:.2f}",
        f"{median(seconds):.2f} ({min(seconds):.2f}–{max(seconds):.2f})",
    ]


def format_ratios(full: Measurement, selected: Measurement, kind: str) -> List[str]:
    """Formats how many times more the full output takes, from rows projected to time."""

    def ratio(value, other):
        return f"{value / other:.1f} ×"

    return [
        "",
        ratio(full.logits_bytes, selected.logits_bytes),
        ratio(full.peak_bytes[kind], selected.peak_bytes[kind]),
        ratio(
            full.peak_bytes[kind] - full.idle_bytes,
            selected.peak_bytes[kind] - selected.idle_bytes,
        ),
        ratio(median(full.seconds[kind]), median(selected.seconds[kind])),
    ]
