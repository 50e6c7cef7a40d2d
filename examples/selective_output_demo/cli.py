# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The demo's command line: measures every way, prints the table, writes the figure."""

import argparse
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import List

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from selective_output_demo import figure, packing, report
from selective_output_demo.launcher import DemoError, Measurement, require_fork, run_pair
from selective_output_demo.megatron_on_cpu import bf16_is_fast
from selective_output_demo.worker import TENSOR_PARALLEL, Job

EPISODES = Path(__file__).resolve().parent.parent / "data" / "episodes.jsonl"
FEWEST_TOKENS = 4096
# The figure's points need less care than the table, and a share of 100 % takes long.
SWEEP_STEPS = 1


def main() -> None:
    """Runs the demo; a failure that has a text for the reader ends it with that text."""
    console = Console()
    # As Ctrl-C, so that no process is left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        run(parse_arguments(), console)
    except DemoError as error:
        console.print(f"[bold red]error:[/] {error}", highlight=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def parse_arguments() -> argparse.Namespace:
    """Parses and checks the command line."""
    parser = argparse.ArgumentParser(
        description="Packs tool-use episodes into one sequence and runs a real GPTModel on it in "
        "two processes (tensor parallel 2, sequence parallel, CPU): logits of all rows as usual, "
        "against logits of the rows that predict model-written tokens (output_row_selector). "
        "Every way runs in processes of its own. Prints a table, writes a figure.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--episodes", type=Path, default=EPISODES, help="episodes to pack")
    parser.add_argument(
        "--tokens",
        type=int,
        default=8192,
        help="pack as many episodes as fit into this many tokens",
    )
    parser.add_argument("--layers", type=int, default=4, help="transformer layers")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size, a multiple of 128")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each kind")
    parser.add_argument(
        "--shares",
        type=float,
        nargs="*",
        default=[5, 60, 100],
        metavar="PERCENT",
        help="shares of trained tokens for the figure, beside the episodes' own",
    )
    parser.add_argument(
        "--precision",
        choices=("auto", "bf16", "fp32"),
        default="auto",
        help="auto is bf16 where this CPU multiplies it as fast as fp32",
    )
    parser.add_argument(
        "--figure",
        type=Path,
        default=Path("selective_output.png"),
        help="where to write the figure, a PNG",
    )
    parser.add_argument(
        "--quick", action="store_true", help="the same as --tokens 4608 --steps 1 --shares 5 100"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.tokens, arguments.steps, arguments.shares = 4608, 1, [5, 100]
    if arguments.tokens < FEWEST_TOKENS:
        parser.error(f"--tokens must be at least {FEWEST_TOKENS}")
    if arguments.hidden < 128 or arguments.hidden % 128:
        parser.error("--hidden must be a multiple of 128: heads of 64 over two ranks")
    if arguments.layers < 1 or arguments.steps < 1:
        parser.error("--layers and --steps must be at least 1")
    if not all(1 <= share <= 100 for share in arguments.shares):
        parser.error("--shares must lie between 1 and 100")
    if not arguments.episodes.is_file():
        parser.error(f"--episodes: no file {arguments.episodes}")
    if not arguments.figure.parent.is_dir():
        parser.error(f"--figure: no folder {arguments.figure.parent}")
    return arguments


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measures, compares and reports."""
    megatron = require_fork()
    episodes = packing.choose_episodes(packing.load_episodes(arguments.episodes), arguments.tokens)
    if not episodes:
        raise DemoError(f"No episode of {arguments.episodes} fits into {arguments.tokens} tokens.")
    packed = packing.pack(episodes, multiple=TENSOR_PARALLEL)
    tokens, trained = len(packed.tokens), sum(packed.trained)
    bf16 = arguments.precision == "bf16" or arguments.precision == "auto" and bf16_is_fast()
    console.print(
        f"{len(episodes)} episodes packed; GPTModel with {arguments.layers} layers, hidden size "
        f"{arguments.hidden}, {'bf16 in Float16Module' if bf16 else 'fp32'}; megatron.core from "
        f"{megatron}, torch {torch.__version__}",
        highlight=False,
    )

    def make_job(selected: bool, rows: List[bool]) -> Job:
        layers, hidden, steps = arguments.layers, arguments.hidden, arguments.steps
        return Job(selected, packed, rows, bf16, layers, hidden, steps)

    full_job = make_job(False, packed.trained)
    own_job = make_job(True, packed.trained)
    sweep = {}
    for percent in arguments.shares:
        job = make_job(True, packing.rows_at_share(packed, percent / 100))
        sweep[percent / 100] = replace(job, steps=min(job.steps, SWEEP_STEPS))

    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console
    ) as progress, tempfile.TemporaryDirectory() as folder:
        jobs = [full_job, own_job, *sweep.values()]
        task = progress.add_task("", total=sum(1 + 2 * job.steps for job in jobs))

        def measure(label: str, job: Job) -> Measurement:
            progress.update(task, description=label)
            if not console.is_terminal:  # where the bar shows nothing before the end
                console.print(f"measuring {label} …", highlight=False)
            return run_pair(job, on_step=lambda: progress.advance(task))

        folders = {name: Path(folder, name) for name in ("full", "selected")}
        for values_folder in folders.values():
            values_folder.mkdir()
        full = measure("full output", replace(full_job, values_folder=folders["full"]))
        own = measure(
            f"selected output, {packed.trained_share:.0%} of the tokens",
            replace(own_job, values_folder=folders["selected"]),
        )
        progress.update(task, description="comparing log-probs and gradients")
        difference = report.compare_values(folders["full"], folders["selected"])
        report.require_equal(difference, bf16)
        selected = {packed.trained_share: own}
        for share, job in sweep.items():
            selected[share] = measure(f"selected output, {share:.0%} of the tokens", job)
        progress.update(task, description="done")

    console.print(report.make_table(tokens, trained, full, own, difference))
    figure.draw(arguments.figure, tokens, packed.trained_share, full, selected)
    console.print(f"Figure: {arguments.figure}", highlight=False)
