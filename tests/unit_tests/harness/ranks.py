# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Runs a test's function on every rank of a layout: plain pytest on CPU, torchrun on GPUs.

Under plain pytest the ranks are worker processes over gloo, one pool per world size, which lives
for the whole session: Megatron is imported once, and a test costs what its own computation
costs. Under torchrun (`WORLD_SIZE` in the environment) the ranks are the processes
that run pytest themselves, and the function runs where it stands.

Every call has a time limit. Where a rank raises, dies or hangs, the test fails with what each
rank has to say, the stacks of the ones that hang included, the pool is killed and the next test
starts a new one.
"""

import atexit
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Callable, Dict, List, Optional

import pytest
import torch

TIME_LIMIT = 60.0  # seconds a call may take; a start of workers comes on top
_TORCHRUN_TIME_LIMIT = 600.0  # at least that there, where a call may compile dozens of kernels
_START_LIMIT = 120.0  # seconds until every worker of a pool is there
_GRACE = 5.0  # seconds that the other ranks get once one of them has failed
_IMPORTED_ONCE = ["tests.unit_tests.harness.cpu_stand_ins", "tests.unit_tests.harness.models"]


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions that a test needs; `dp` includes expert parallelism."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.cp * self.dp


class RankFailure(AssertionError):
    """At least one rank raised, died or ran out of time."""


def run_on_ranks(
    layout: Layout, function: Callable, *args, time_limit: float = TIME_LIMIT, **kwargs
) -> None:
    """Calls `function(*args, **kwargs)` on every rank, with the layout's groups in place.

    The function checks for itself and returns nothing, so that the same test runs in worker
    processes and under torchrun.

    Args:
        layout (Layout): The parallel sizes; under torchrun a larger world is filled with data
            parallelism, as upstream's tests do.
        function (Callable): A function of a module, since workers import it by name.
        time_limit (float): Seconds until the call counts as hung.
    """
    if "WORLD_SIZE" in os.environ:
        _run_here(layout, function, args, kwargs, time_limit)
        return
    pool = _pools.get(layout.world_size)
    if pool is None:
        pool = _pools[layout.world_size] = _Pool(layout.world_size)
    try:
        pool.call((layout, function, args, kwargs), time_limit)
    except BaseException:
        # After a failure the ranks may be in different collectives: no test may inherit that.
        del _pools[layout.world_size]
        pool.kill()
        raise


class _Pool:
    """Worker processes of one world size."""

    def __init__(self, world_size: int):
        # The store lives here, on a port of the system's choice, so that no rank races for one.
        self._store = torch.distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        self._dumps = Path(tempfile.mkdtemp(prefix="ranks-"))
        # Workers are on the CPU, and Triton asks for this when the first kernel is defined.
        os.environ["TRITON_INTERPRET"] = "1"
        # Forked from a process that has imported Megatron and done nothing else: starting a pool
        # takes a second, not the imports of every worker.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED_ONCE)
        self._processes, self._connections = [], []
        for rank in range(world_size):
            connection, remote = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, world_size, self._store.port, self._dump_file(rank), remote),
                daemon=True,
            )
            process.start()
            remote.close()
            self._processes.append(process)
            self._connections.append(connection)
        try:
            self._collect(_START_LIMIT)
        except BaseException:
            self.kill()
            raise

    def call(self, task, time_limit: float) -> None:
        """Has every rank do a task and waits for all."""
        for connection in self._connections:
            connection.send(task)
        self._collect(time_limit)

    def kill(self) -> None:
        """Ends the workers, whatever they are doing."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        for rank in range(len(self._processes)):
            self._dump_file(rank).unlink(missing_ok=True)
        self._dumps.rmdir()

    def _collect(self, time_limit: float) -> None:
        """Waits for one reply per rank; raises with all that went wrong."""
        start = time.monotonic()
        deadline = start + time_limit
        pending = dict(zip(self._connections, range(len(self._connections))))
        failures: Dict[int, str] = {}
        while pending:
            ready = wait(list(pending), timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    failure = connection.recv()
                except EOFError:
                    self._processes[rank].join()
                    failure = f"died with exit code {self._processes[rank].exitcode}\n"
                if failure is not None:
                    failures[rank] = failure
                    deadline = min(deadline, time.monotonic() + _GRACE)
        if pending:
            waited = time.monotonic() - start
            for rank in pending.values():
                failures[rank] = f"no reply within {waited:.0f} s; it is in\n{self._stacks(rank)}"
        if failures:
            raise RankFailure(
                "\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items()))
            )

    def _dump_file(self, rank: int) -> Path:
        return self._dumps / f"rank-{rank}.txt"

    def _stacks(self, rank: int) -> str:
        """The stacks of a rank that does not answer."""
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        for _ in range(20):
            time.sleep(0.1)
            text = self._dump_file(rank).read_text() if self._dump_file(rank).exists() else ""
            if text:
                return text
        return "(no stack could be had)\n"


_pools: Dict[int, _Pool] = {}


@atexit.register
def _kill_pools() -> None:
    while _pools:
        _pools.popitem()[1].kill()


def _serve(rank: int, world_size: int, port: int, dump_file: Path, connection) -> None:
    """Life of a worker: start Megatron, then do tasks until the pool goes away."""
    with dump_file.open("w") as dump:
        # It writes from the signal handler itself, so that a rank that waits in a collective and
        # never returns to Python can still say where it is.
        faulthandler.register(signal.SIGUSR1, file=dump, all_threads=False)
        # The machine's own name may resolve to an address that nothing listens on.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        _reply(connection, lambda: _start(rank, world_size, port))
        while True:
            try:
                layout, function, args, kwargs = connection.recv()
            except EOFError:
                return
            except Exception:
                # The test's module did not import here, and says why.
                connection.send(traceback.format_exc())
                continue
            _reply(connection, lambda: _run(layout, function, args, kwargs))


def _reply(connection, action: Callable) -> None:
    """Sends None if an action went well, else its traceback without this file's frames."""
    try:
        action()
        connection.send(None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # pytest's own outcomes do not derive from Exception
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        connection.send(
            "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
        )
    finally:
        sys.stdout.flush()


def _start(rank: int, world_size: int, port: int) -> None:
    # A machine with fewer GPUs than ranks runs the tests too; torchrun is for GPUs.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    _start_megatron(
        store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=_START_LIMIT)
    )


def _start_megatron(**process_group) -> None:
    """Puts the stand-ins in place and opens the default process group."""
    from tests.unit_tests.harness import cpu_stand_ins

    cuda = torch.cuda.is_available()
    if cuda:
        from megatron.core.pipeline_parallel.utils import set_streams

        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # Those of the combined schedule, which it takes for granted.
        set_streams()
    else:
        cpu_stand_ins.install()
    cpu_stand_ins.install_missing_name()
    torch.distributed.init_process_group("nccl" if cuda else "gloo", **process_group)


_current_layout: Optional[Layout] = None


def _run(layout: Layout, function: Callable, args: tuple, kwargs: dict) -> None:
    """Runs a task on this rank; groups are made anew only where the layout differs."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    global _current_layout
    if layout != _current_layout:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
        )
        _current_layout = layout
    model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234)
    function(*args, **kwargs)


def _run_here(
    layout: Layout, function: Callable, args: tuple, kwargs: dict, time_limit: float
) -> None:
    """Runs a task on this rank of a torchrun."""
    global _current_layout
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size % layout.world_size:
        pytest.skip(f"{layout} needs a multiple of {layout.world_size} ranks, not {world_size}")
    if not torch.distributed.is_initialized():
        _start_megatron()
    # Upstream's tests of the same session set up parallel_state for themselves.
    _current_layout = None
    # A rank that hangs takes its process along, and torchrun the others.
    faulthandler.dump_traceback_later(max(time_limit, _TORCHRUN_TIME_LIMIT), exit=True)
    try:
        _run(layout, function, args, kwargs)
    finally:
        faulthandler.cancel_dump_traceback_later()


def call_all(cases: List, check: Callable) -> None:
    """Calls `check(case)` for every case and raises one AssertionError that names the failed ones.

    Only for checks whose assertions come after the case's last collective: a rank that fails
    then goes on to the next case with the others.
    """
    failures = []
    for case in cases:
        try:
            check(case)
        except AssertionError as error:
            failures.append(f"{case}: {error}")
    assert not failures, f"{len(failures)} of {len(cases)} failed:\n" + "\n".join(failures)
