# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The figure: peak memory and time against the share of trained tokens."""

from pathlib import Path
from statistics import median
from typing import Dict

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from selective_output_demo.launcher import Measurement
from selective_output_demo.worker import FORWARD, TRAINING

COLOURS = {TRAINING: "tab:orange", FORWARD: "tab:blue"}


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
    figure, both_axes = pyplot.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    figure.suptitle(
        f"Output rows of trained tokens only: GPTModel, {tokens:,} packed tokens, "
        "vocabulary 152,064, TP 2 + sequence parallel, CPU"
    )
    panels = (
        (
            "Peak memory, both ranks, libraries included",
            "GiB",
            lambda m, k: m.peak_bytes[k] / 2**30,
        ),
        ("Time of a step (median)", "seconds", lambda m, k: median(m.seconds[k])),
    )
    shares = sorted(selected)
    for axes, (title, unit, value) in zip(both_axes, panels):
        for kind, colour in COLOURS.items():
            level = value(full, kind)
            axes.axhline(level, color=colour, linestyle="--", label=f"{kind}, full output")
            axes.plot(
                [100 * share for share in shares],
                [value(selected[share], kind) for share in shares],
                color=colour,
                marker="o",
                label=f"{kind}, selected output",
            )
        axes.axvline(100 * own_share, color="0.6", linewidth=1, linestyle=":")
        axes.annotate(
            f"these episodes: {own_share:.0%}",
            (100 * own_share, 0),
            xytext=(4, 4),
            textcoords="offset points",
            color="0.4",
        )
        axes.set(title=title, ylabel=unit, xlabel="share of trained tokens, %", xlim=(0, 103))
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    handles, labels = both_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, format="png", dpi=150)
    pyplot.close(figure)
