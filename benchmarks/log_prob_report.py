# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""What `linear_log_prob.csv` says: goals reached or not, README's table, plots."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional, Tuple

from log_prob_cases import (
    BACKWARD,
    ENTROPY_GRADIENT,
    FORWARD,
    GEMMS,
    JOBS,
    OP,
    OP_0,
    OP_0_RETURNS,
    OP_ALL,
    OP_RETURNS,
    OP_TORCH,
    OURS,
    REPORTED,
    SHAPES,
    SLIME,
    Shape,
)

Key = Tuple[str, str, str, int, int, int, int]


class Table:
    """The CSV's rows; where something was measured again, the last of it."""

    def __init__(self, path: Path):
        self._rows: Dict[Key, Dict[str, str]] = {}
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row["ms_p50"]:  # else it was skipped, and the note says why
                    numbers = [
                        int(row[name]) for name in ("tokens", "rows", "hidden_size", "vocab")
                    ]
                    self._rows[(row["provider"], row["job"], row["entropy"], *numbers)] = row

    def select(self, **wanted) -> List[Dict[str, str]]:
        """Rows whose columns are as given, by number of rows."""
        found = [
            row
            for row in self._rows.values()
            if all(row[name] == str(value) for name, value in wanted.items())
        ]
        return sorted(found, key=lambda row: int(row["rows"]))

    def one(self, **wanted) -> Optional[Dict[str, str]]:
        """The first such row, or None."""
        return next(iter(self.select(**wanted)), None)


def _of(shape: Shape) -> Dict[str, int]:
    return dict(hidden_size=shape.hidden_size, vocab=shape.vocab)


@dataclass(frozen=True)
class Goal:
    """A figure to reach.

    Attributes:
        name (str): What it is.
        where (str): Shape, job, rows.
        value (float): As measured.
        limit (float): What it must not exceed; with `at_least`, what it must reach.
        at_least (bool): Which of the two.
    """

    name: str
    where: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def reached(self) -> bool:
        """Whether it is."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def goals(table: Table) -> Iterator[Goal]:
    """Every goal that the CSV has figures for."""
    for shape in SHAPES.values():
        for row in table.select(**_of(shape)):
            if row["provider"] in (OP, OP_0, OP_ALL):
                yield from _against_gemms(row, shape)
                yield from _peak(row, shape)
                yield from _errors(row, shape)
            # Against the others as they do it, which is to return the gradient of the weight.
            if row["provider"] in (OP_RETURNS, OP_0_RETURNS) or (
                row["provider"] == OP and row["job"] == FORWARD
            ):
                yield from _against_peers(table, row, shape)
    shape = SHAPES["qwen3.5-9b"]
    for job in JOBS:
        wanted = dict(tokens=11776, rows=2944, job=job, **_of(shape))
        theirs = table.one(provider=SLIME, **wanted)
        ours = table.one(provider=OP, entropy=theirs["entropy"], **wanted) if theirs else None
        if ours:
            times = float(theirs["ms_p50"]) / float(ours["ms_p50"])
            where = f"{shape.label}, 2,944 of 11,776, {job}, {OP}"
            yield Goal("times as fast as slime's way", where, times, 5, at_least=True)


def _where(row: Dict[str, str], shape: Shape) -> str:
    entropy = {"none": ", no entropy", "value": "", "gradient": ""}[row["entropy"]]
    name = row["provider"]
    return f"{shape.label}, N = {int(row['rows']):,}, {row['job']}{entropy}, {name}"


def _against_gemms(row: Dict[str, str], shape: Shape) -> Iterator[Goal]:
    if int(row["rows"]) < 2048 or not row["ratio"] or row["provider"] == OP_0:
        return
    wide = shape.hidden_size >= 4096
    if row["job"] == FORWARD:
        name, limit = "time / cuBLAS's forward GEMM", 1.10 if wide else 1.16
    elif row["rows_kept"] == row["rows"]:
        name, limit = "time / three GEMMs, all kept", 1.10 if wide else 1.15
    elif row["rows_kept"] == "0":
        name, limit = "time / four GEMMs, nothing kept", 1.08 if wide else 1.12
    else:
        name, limit = "time / GEMMs, some kept", 1.08 if wide else 1.12
    yield Goal(name, _where(row, shape), float(row["ratio"]), limit)


def _peers(table: Table, row: Dict[str, str], shape: Shape) -> List[Dict[str, str]]:
    """Peers that did the same job on the same rows, the entropy included."""
    wanted = {name: row[name] for name in ("job", "entropy", "tokens", "rows")}
    return [
        other
        for other in table.select(same_job="yes", **wanted, **_of(shape))
        if other["provider"] not in (*OURS, SLIME) and not other["provider"].startswith(GEMMS)
    ]


def _against_peers(table: Table, row: Dict[str, str], shape: Shape) -> Iterator[Goal]:
    peers = _peers(table, row, shape)
    if int(row["rows"]) < 256 or not peers:
        return
    best = min(peers, key=lambda other: float(other["ms_p50"]))
    ratio = float(row["ms_p50"]) / float(best["ms_p50"])
    where = f"{_where(row, shape)}; {best['provider']}"
    yield Goal("time / fastest peer", where, ratio, 1.0)
    if row["provider"] == OP_0_RETURNS:
        best = min(peers, key=lambda other: float(other["peak_gib"]))
        where = f"{_where(row, shape)}; {best['provider']}"
        peak = float(row["peak_gib"])
        yield Goal("peak in GiB, budget 0, best peer's", where, peak, float(best["peak_gib"]))


def _peak(row: Dict[str, str], shape: Shape) -> Iterator[Goal]:
    peak, rows = float(row["peak_gib"]), int(row["rows"])
    where = _where(row, shape)
    if row["job"] == FORWARD:
        if (int(row["tokens"]), rows) == REPORTED[1:]:
            yield Goal("peak in GiB, #1767", where, peak, 0.3)
        return
    if row["provider"] == OP_ALL:
        return
    limit = int(row["budget"]) / 2**30 + 0.25 + rows * shape.hidden_size * 2 / 2**30
    yield Goal("peak in GiB / budget + 0.25 + dhidden", where, peak, round(limit, 4))


def _errors(row: Dict[str, str], shape: Shape) -> Iterator[Goal]:
    limit = 5e-5 if shape.hidden_size >= 8192 else 2e-5
    for column, name in (("err_log_prob", "log-prob"), ("err_entropy", "entropy")):
        if row[column]:
            yield Goal(f"error of the {name}", _where(row, shape), float(row[column]), limit)


def print_goals(table: Table, everything: bool) -> bool:
    """Prints goals: the worst of each kind and shape and what is missed, or everything.

    Returns:
        bool: Whether all are reached.
    """
    found = list(goals(table))
    missed = [goal for goal in found if not goal.reached]
    if everything:
        shown = found
    else:
        worst: Dict[Tuple[str, str], Goal] = {}
        for goal in found:
            kind = goal.name, goal.where.split(", N =")[0]
            if kind not in worst or _slack(goal) < _slack(worst[kind]):
                worst[kind] = goal
        shown = [goal for goal in found if goal in worst.values() or not goal.reached]
    lines = [
        (
            goal.name,
            goal.where,
            f"{goal.value:.3g}",
            f"{'>=' if goal.at_least else '<='} {goal.limit:.3g}",
            "reached" if goal.reached else "MISSED",
        )
        for goal in sorted(shown, key=lambda goal: goal.name)
    ]
    print_table("Goals", ("goal", "where", "value", "limit", ""), lines)
    print(f"{len(found) - len(missed)} of {len(found)} reached")
    return not missed


def _slack(goal: Goal) -> float:
    return goal.value / goal.limit if goal.at_least else -goal.value / goal.limit


def print_table(title: str, header: Tuple[str, ...], lines: List[Tuple[str, ...]]) -> None:
    """Prints a table, by rich where that is installed and somebody looks at a terminal."""
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        Console = None
    if Console is not None and Console().is_terminal:
        shown = RichTable(*header, title=title)
        for line in lines:
            style = "red" if "MISSED" in line else None
            shown.add_row(*line, style=style)
        Console().print(shown)
        return
    print(f"{title}:")
    for line in [header, *lines]:
        print("  " + " | ".join(line))


# Of the comparison with others: shape, tokens, rows.
_COMPARED = (("qwen3.5-9b", 11776, 2944), ("qwen3.5-9b", 65536, 16384))
# README leaves out what is a variant of another line.
_NOT_IN_README = (OP_ALL, OP_TORCH, "Liger chunked")


def make_readme_table(table: Table) -> str:
    """README's table as markdown: the op and others at 25 % of the rows of one micro-batch."""
    key, tokens, rows = _COMPARED[0]
    lines = _peer_lines(table, SHAPES[key], tokens, rows, left_out=_NOT_IN_README)
    return "\n".join(lines + _measured_on(table))


def make_tables(table: Table) -> str:
    """All tables as markdown: others at 25 % of the rows, then ratios to cuBLAS's GEMMs."""
    lines: List[str] = []
    for key, tokens, rows in _COMPARED:
        lines += _peer_lines(table, SHAPES[key], tokens, rows)
    lines += _reported_lines(table)
    lines += _ratio_lines(table)
    return "\n".join(lines + _measured_on(table))


def _measured_on(table: Table) -> List[str]:
    some = table.one(provider=OP)
    if not some:
        return []
    return [
        f"{some['gpu']}, torch {some['torch']}, Triton {some['triton']}, bf16 operands, "
        f"{some['date']}. Medians; peaks above the inputs, gradients included; errors are the "
        "largest against float64."
    ]


def _peer_lines(
    table: Table, shape: Shape, tokens: int, rows: int, left_out: Tuple[str, ...] = ()
) -> List[str]:
    wanted = dict(tokens=tokens, rows=rows, **_of(shape))
    names: Dict[str, str] = {}
    for row in table.select(**wanted):
        ours_or_peer = row["job"] in JOBS and not row["provider"].startswith(GEMMS)
        if ours_or_peer and row["provider"] not in left_out:
            names.setdefault(row["provider"], row["provider_version"])
    if not names:
        return []
    lines = [
        f"| {shape.label}, {rows:,} of {tokens:,} rows, H = {shape.hidden_size}, V/TP = "
        f"{shape.vocab:,} | forward | + backward | with entropy gradient | peak | error log-prob / "
        "entropy |",
        "|---|---|---|---|---|---|",
    ]
    gemms = [_cell(table.one(provider=GEMMS, job=job, **wanted)) for job in JOBS[:2]]
    if any(cell != "-" for cell in gemms):
        lines.append(f"| {GEMMS} alone | {gemms[0]} | {gemms[1]} | {gemms[1]} | | |")
    for name, version in names.items():
        by_job = {job: _fullest(table.select(provider=name, job=job, **wanted)) for job in JOBS}
        some = by_job[ENTROPY_GRADIENT] or by_job[BACKWARD] or by_job[FORWARD]
        peak = by_job[ENTROPY_GRADIENT] or by_job[BACKWARD]
        bold = "**" if name in (OP, OP_0) else ""
        label = name if name in OURS else f"{name} ({version})"
        if some["same_job"] == "no":
            label += ", a different job"
        errors = " / ".join(_error(some[column]) for column in ("err_log_prob", "err_entropy"))
        lines.append(
            f"| {bold}{label}{bold} | {' | '.join(_cell(by_job[job]) for job in JOBS)} "
            f"| {float(peak['peak_gib']):.2f} GiB | {errors} |"
            if peak
            else f"| {bold}{label}{bold} | {_cell(by_job[FORWARD])} | - | - | - | {errors} |"
        )
    return [*lines, ""]


def _fullest(rows: List[Dict[str, str]]) -> Optional[Dict[str, str]]:
    order = ("", "none", "value", "gradient")  # cuBLAS's GEMMs have no entropy
    return max(rows, key=lambda row: order.index(row["entropy"]), default=None)


def _cell(row: Optional[Dict[str, str]]) -> str:
    return f"{float(row['ms_p50']):.2f} ms" if row else "-"


def _error(text: str) -> str:
    return f"{float(text):.0e}" if text else "-"


def _reported_lines(table: Table) -> List[str]:
    key, tokens, rows = REPORTED
    shape = SHAPES[key]
    found = table.select(tokens=tokens, rows=rows, job=FORWARD, **_of(shape))
    names = dict.fromkeys(row["provider"] for row in found)
    if not found:
        return []
    lines = [
        f"| slime #1767's rank, forward: {rows:,} of {tokens:,} rows, H = {shape.hidden_size}, "
        f"V/TP = {shape.vocab:,} | time | peak |",
        "|---|---|---|",
    ]
    for name in names:
        row = _fullest([other for other in found if other["provider"] == name])
        bold = "**" if name == OP else ""
        name += ", a different job" if row["same_job"] == "no" else ""
        peak = f"{float(row['peak_gib']):.2f} GiB" if row["peak_gib"] else ""
        lines.append(f"| {bold}{name}{bold} | {float(row['ms_p50']):.1f} ms | {peak} |")
    return [*lines, ""]


def _ratio_lines(table: Table) -> List[str]:
    lines = [
        "| time / cuBLAS's GEMMs at the same shape | N | forward / one | all kept / three "
        "| nothing kept / four |",
        "|---|---|---|---|---|",
    ]
    for shape in SHAPES.values():
        for rows in (2048, 8192, 65536):
            cells = []
            for provider, job in ((OP, FORWARD), (OP_ALL, BACKWARD), (OP_0, BACKWARD)):
                wanted = dict(provider=provider, job=job, entropy="value", rows=rows)
                row = table.one(**wanted, **_of(shape))
                cells.append(f"{float(row['ratio']):.2f}" if row and row["ratio"] else "-")
            if set(cells) != {"-"}:
                label = f"{shape.label}: H = {shape.hidden_size}, V/TP = {shape.vocab:,}"
                lines.append(f"| {label} | {rows:,} | {' | '.join(cells)} |")
    return [*lines, ""] if len(lines) > 2 else []


def make_plots(table: Table, folder: Path) -> List[Path]:
    """Draws time and peak memory against the number of rows, one picture per shape and job.

    Args:
        table (Table): What to draw.
        folder (Path): Where to put the PNGs.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    written = []
    for key, shape in SHAPES.items():
        for job in (FORWARD, BACKWARD):
            rows = [
                row
                for row in table.select(job=job, **_of(shape))
                if row["provider"] != OP_TORCH
                and int(row["tokens"]) != REPORTED[1]
                and not row["provider"].startswith(f"{GEMMS},")
            ]
            if not rows:
                continue
            figure, axes = plt.subplots(1, 2, figsize=(13, 5), constrained_layout=True)
            panels: Tuple[Tuple[str, str, Callable], ...] = (
                ("ms_p50", "time per 1,000 rows (ms)", lambda row: 1000 / int(row["rows"])),
                ("peak_gib", "peak above the inputs (GiB)", lambda row: 1),
            )
            for axis, (column, label, scale) in zip(axes, panels):
                for name in dict.fromkeys(row["provider"] for row in rows):
                    points: Dict[int, float] = {}
                    for row in rows:  # with an entropy where there is one
                        if row["provider"] == name and row[column] not in ("", "nan"):
                            if row["entropy"] != "none" or int(row["rows"]) not in points:
                                points[int(row["rows"])] = float(row[column]) * scale(row)
                    style = dict(linewidth=2.5) if name in OURS else dict(linewidth=1)
                    style["linestyle"] = "--" if name == GEMMS else "-"
                    if points:
                        axis.plot(*zip(*points.items()), marker=".", label=name, **style)
                axis.set(xscale="log", yscale="log", xlabel="rows N", ylabel=label)
                axis.grid(alpha=0.3)
            axes[0].legend(fontsize=8)
            figure.suptitle(
                f"{shape.label}: H = {shape.hidden_size}, V/TP = {shape.vocab:,}, {job}"
            )
            path = folder / f"linear_log_prob_{key}_{job.replace(' + ', '_')}.png"
            figure.savefig(path, dpi=120)
            plt.close(figure)
            written.append(path)
    return written
