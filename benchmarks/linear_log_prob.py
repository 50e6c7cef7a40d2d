# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Time, memory and error of `linear_log_prob` against its peers and cuBLAS's own GEMMs, on one GPU.

    benchmarks/fetch_peers.sh DIR && DIR/install_peers.sh TARGET    # peers, newest versions
    python benchmarks/linear_log_prob.py --peers TARGET/site-packages --slime <slime checkout>
    python benchmarks/linear_log_prob.py --ratios       # goals, reached or not
    python benchmarks/linear_log_prob.py --table        # README's table; with --every all of them
    python benchmarks/linear_log_prob.py --plot         # PNGs

Everybody maps the same N rows of hidden states and the same output weight to log-probabilities and,
where they can, entropy: forward, forward + backward, and with a gradient of the entropy, too. What
only does part of that or another job is marked so. Rows are added to `linear_log_prob.csv` beside
this file as they are measured; of what was measured twice, the last counts.

What is measured is in `log_prob_cases.py`, by whom in `log_prob_peers.py`, how in
`log_prob_measure.py`; `log_prob_run.py` goes through it and `log_prob_report.py` reads the CSV.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import List

from log_prob_cases import ROWS, SHAPES
from log_prob_report import Table, make_plots, make_readme_table, make_tables, print_goals

CSV = Path(__file__).with_suffix(".csv")
REPOSITORY = Path(__file__).resolve().parents[1]
PARTS = ("op", "gemms", "peers", "reported", "wgrad")


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""

    def names(text: str) -> List[str]:
        return [name for name in text.split(",") if name]

    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--shapes", type=names, default=list(SHAPES), help="of " + ",".join(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="rows N")
    parser.add_argument(
        "--part",
        nargs="+",
        choices=(*PARTS, "all"),
        default=["all"],
        help="op, gemms and peers take --shapes and --rows, wgrad --shapes; reported is slime "
        "#1767's rank",
    )
    parser.add_argument("--providers", type=names, help="those alone")
    parser.add_argument(
        "--everywhere", action="store_true", help="also at N that a provider is left out at"
    )
    parser.add_argument("--skip", type=names, default=[], help="providers to leave out")
    parser.add_argument("--repeat", type=int, default=11, help="repetitions, where time allows")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for repetitions, each")
    parser.add_argument(
        "--peers", type=Path, default=os.environ.get("LOG_PROB_PEERS"), help="folder of packages"
    )
    parser.add_argument(
        "--slime", type=Path, default=os.environ.get("SLIME_SOURCE"), help="a slime checkout"
    )
    parser.add_argument("--csv", type=Path, default=CSV, help="where rows are added or read")
    parser.add_argument("--ratios", action="store_true", help="print goals from the CSV and stop")
    parser.add_argument(
        "--every", action="store_true", help="not the worst goals or README's table alone"
    )
    parser.add_argument("--table", action="store_true", help="print README's table and stop")
    parser.add_argument("--plot", type=Path, nargs="?", const=REPOSITORY, help="draw into a folder")
    # Everything runs on a CPU, too, where its times say nothing: --device cpu --size 64 257.
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for shape in arguments.shapes:
        if shape not in SHAPES:
            parser.error(f"--shapes: got {shape}, expected some of {','.join(SHAPES)}")
    return arguments


def main() -> None:
    """Measures, or says what the CSV has."""
    arguments = parse_arguments()
    if not (arguments.ratios or arguments.table or arguments.plot):
        run(arguments)
        return
    table = Table(arguments.csv)
    if arguments.table:
        print(make_tables(table) if arguments.every else make_readme_table(table))
    if arguments.plot:
        print(*make_plots(table, arguments.plot), sep="\n")
    if arguments.ratios:
        sys.exit(0 if print_goals(table, arguments.every) else 1)


def run(arguments: argparse.Namespace) -> None:
    """Measures: what goes together here, the rest in a process of its own."""
    # Not above: the reports need no torch.
    from log_prob_peers import ALONE, LOADERS
    from log_prob_run import Benchmark

    parts = PARTS if "all" in arguments.part else arguments.part
    keys = [key for key in arguments.providers or LOADERS if key not in arguments.skip]
    apart = [key for key in keys if key in ALONE]
    together = [key for key in keys if key not in ALONE]
    if not together:
        apart, together = [], apart
    Benchmark(arguments, parts, together).run()
    parts = [part for part in parts if part in ("peers", "reported")]
    if apart and parts:
        command = [sys.executable, *sys.argv, "--providers", ",".join(apart), "--part", *parts]
        sys.exit(subprocess.run(command).returncode)


if __name__ == "__main__":
    main()
