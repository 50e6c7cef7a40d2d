# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Runs a job in a pair of fresh processes, so that its peak of memory is its own."""

import importlib.util
import multiprocessing
import os
import signal
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Callable, Dict, List, Optional

from selective_output_demo.worker import TENSOR_PARALLEL, Failure, Job, RankResult, Step, run_rank

SECONDS_WITHOUT_NEWS = 300


class DemoError(Exception):
    """A failure with a text that is meant for the reader of the terminal."""


@dataclass
class Measurement:
    """Both ranks' results of one job, bytes summed over them.

    Attributes:
        logits_bytes: Size of the fp32 logits.
        idle_bytes: Peak memory before the first step.
        peak_bytes: Peak memory by kind of step. The ranks work in step, so both peaks coincide.
        seconds: Duration of each step by kind, as rank 0 saw it between two barriers.
    """

    logits_bytes: int
    idle_bytes: int
    peak_bytes: Dict[str, int]
    seconds: Dict[str, List[float]]


def require_fork() -> Path:
    """Returns where megatron.core comes from.

    Raises:
        DemoError: It is not installed, or is not this fork.
    """
    way_out = "run `pip install .` in the repository, or `python setup.py patch <checkout>`"
    spec = (
        importlib.util.find_spec("megatron.core") if importlib.util.find_spec("megatron") else None
    )
    if spec is None or spec.origin is None:
        raise DemoError(f"megatron.core is not installed: {way_out}.")
    folder = Path(spec.origin).parent
    if not (folder / "models/common/output_row_selector.py").exists():
        raise DemoError(
            f"megatron.core comes from {folder}, which has no output_row_selector; {way_out}."
        )
    return folder


def run_pair(job: Job, on_step: Callable[[], None]) -> Measurement:
    """Runs `job` on two tensor-parallel ranks.

    Args:
        job: What to run.
        on_step: Called after every step of rank 0.

    Raises:
        DemoError: A rank failed, was killed, or went silent.
    """
    # Read by torch in the new processes: huge pages, since small ones would make the first touch of
    # the logits cost more than their computation.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    context = multiprocessing.get_context("spawn")
    threads = max(1, usable_cores() // TENSOR_PARALLEL)
    with tempfile.TemporaryDirectory() as folder:
        processes, connections = [], []
        for rank in range(TENSOR_PARALLEL):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (job, rank, os.path.join(folder, "rendezvous"), threads, theirs)
            process = context.Process(target=run_rank, args=arguments, daemon=True)
            process.start()
            # With our copy of its end closed, a process that dies ends the connection.
            theirs.close()
            processes.append(process)
            connections.append(ours)
        try:
            results = collect(connections, processes, on_step)
            for process in processes:
                process.join(timeout=10)
        finally:
            for process in processes:
                process.terminate()
    return Measurement(
        logits_bytes=sum(result.logits_bytes for result in results),
        idle_bytes=sum(result.idle_bytes for result in results),
        peak_bytes={
            kind: sum(result.peak_bytes[kind] for result in results)
            for kind in results[0].peak_bytes
        },
        seconds=results[0].seconds,
    )


def collect(
    connections: List[Connection],
    processes: List[multiprocessing.Process],
    on_step: Callable[[], None],
) -> List[RankResult]:
    """Listens to the ranks until each has sent its result; arguments and errors as in run_pair."""
    results: List[Optional[RankResult]] = [None] * len(connections)
    while None in results:
        waiting = [c for c, result in zip(connections, results) if result is None]
        ready = wait(waiting, timeout=SECONDS_WITHOUT_NEWS)
        if not ready:
            raise DemoError(f"No rank has finished a step for {SECONDS_WITHOUT_NEWS} s; giving up.")
        for connection in ready:
            rank = connections.index(connection)
            try:
                message = connection.recv()
            except EOFError:
                raise DemoError(explain_death(processes, f"Rank {rank} ended early.")) from None
            if isinstance(message, Failure):
                text = f"Rank {rank} failed:\n{message.error}"
                raise DemoError(explain_death(processes, text))
            if isinstance(message, RankResult):
                results[rank] = message
            elif isinstance(message, Step) and rank == 0:
                on_step()
    return results


def explain_death(processes: List[multiprocessing.Process], text: str) -> str:
    """Replaces `text` where a rank was killed: what the other one says is then a consequence."""
    for rank, process in enumerate(processes):
        process.join(timeout=2)
        if process.exitcode == -signal.SIGKILL:
            return (
                f"Rank {rank} was killed, most likely because memory ran out: "
                "pack fewer tokens with --tokens, or try --quick."
            )
    return text


def usable_cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
