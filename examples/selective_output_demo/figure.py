# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The figure: peak memory and time against the share of trained tokens."""

from pathlib import Path
from statistics import median
from typing import Dict

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from selective_output_demo.launcher import Measurement
from selective_output_demo.worker import FORWARD, TRAINING

COLOURS = {FORWARD: "tab:blue", TRAINING: "tab:orange"}


def draw(
    path: Path, tokens: int, own_share: float, full: Measurement, selected: Dict[float, Measurement]
) -> None:
    """Writes the figure as PNG.

    Args:
        path: Where to write.
        tokens: Number of packed tokens.
        own_share: Share of tokens that the episodes train, between 0 and 1.
        full: Measurement of the full output, which no share changes.
        selected: Measurement of the selected output by share.
    """
    figure, (memory, time) = pyplot.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    figure.suptitle(
        f"Output rows of trained tokens only: real GPTModel, {tokens:,} packed tokens, "
        "vocabulary 152,064, TP 2 + sequence parallel, CPU"
    )
    for kind in (TRAINING, FORWARD):
        draw_lines(
            memory,
            kind,
            full.peak_bytes[kind] / 2**30,
            {share: m.peak_bytes[kind] / 2**30 for share, m in selected.items()},
        )
        draw_lines(
            time,
            kind,
            median(full.seconds[kind]),
            {share: median(m.seconds[kind]) for share, m in selected.items()},
        )
    memory.set_title("Peak memory, both ranks, libraries included")
    memory.set_ylabel("GiB")
    time.set_title("Time of a step (median)")
    time.set_ylabel("seconds")
    for axes in (memory, time):
        axes.axvline(100 * own_share, color="0.6", linewidth=1, linestyle=":")
        axes.annotate(
            f"these episodes: {own_share:.0%}",
            (100 * own_share, 0),
            xytext=(4, 4),
            textcoords="offset points",
            color="0.4",
        )
        axes.set_xlabel("share of trained tokens, %")
        axes.set_xlim(0, 103)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    handles, labels = memory.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw_lines(axes: Axes, kind: str, full: float, selected: Dict[float, float]) -> None:
    """Draws one kind of step: the full output as a level, the selected one by share."""
    colour = COLOURS[kind]
    axes.axhline(full, color=colour, linestyle="--", label=f"{kind}, full output")
    shares = sorted(selected)
    axes.plot(
        [100 * share for share in shares],
        [selected[share] for share in shares],
        color=colour,
        marker="o",
        label=f"{kind}, selected output",
    )
