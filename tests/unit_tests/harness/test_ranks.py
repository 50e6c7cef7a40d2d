# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The harness itself: a test that hangs, dies or fails on one rank has to fail, with the reason."""

import os
import time

import pytest
import torch

from tests.unit_tests.harness.pairwise import all_pairs, full_product
from tests.unit_tests.harness.ranks import Layout, RankFailure, call_all, run_on_ranks

pytestmark = pytest.mark.skipif(
    "WORLD_SIZE" in os.environ, reason="under torchrun the ranks are torchrun's, not the harness's"
)


def _check_sum_of_ranks():
    rank = torch.tensor([float(torch.distributed.get_rank())])
    torch.distributed.all_reduce(rank)
    assert rank.item() == 1.0


def _fail_on_rank_1():
    if torch.distributed.get_rank() == 1:
        raise ValueError("the mask is the wrong way round")
    # Rank 0 waits for an all-reduce that rank 1 never joins.
    torch.distributed.all_reduce(torch.zeros(1))


def _hang_on_rank_1():
    if torch.distributed.get_rank() == 1:
        time.sleep(600)


def _die_on_rank_1():
    if torch.distributed.get_rank() == 1:
        os._exit(3)


class TestRunOnRanks:
    """What `run_on_ranks` says of ranks that do not come back with success."""

    def test_runs_on_every_rank(self):
        """Collectives of the function meet those of the other ranks."""
        run_on_ranks(Layout(tp=2), _check_sum_of_ranks)

    @pytest.mark.parametrize(
        "function, says",
        [
            (_fail_on_rank_1, r"rank 0: no reply(.|\n)*all_reduce(.|\n)*rank 1: (.|\n)*wrong way"),
            (_hang_on_rank_1, r"rank 1: no reply within 2 s(.|\n)*in _hang_on_rank_1"),
            (_die_on_rank_1, r"rank 1: died with exit code 3"),
        ],
    )
    def test_failure_names_rank_and_place(self, function, says):
        """The failed rank's traceback, the hung one's stack, and a pool that works afterwards."""
        with pytest.raises(RankFailure, match=says):
            run_on_ranks(Layout(tp=2), function, time_limit=2)
        run_on_ranks(Layout(tp=2), _check_sum_of_ranks)

    def test_call_all_names_every_failed_case(self):
        """One failed case must not hide another."""

        def check(case):
            assert case % 2 == 0, f"{case} is odd"

        call_all([0, 2], check)
        with pytest.raises(
            AssertionError, match=r"2 of 4 failed:\n1: 1 is odd(.|\n)*\n3: 3 is odd"
        ):
            call_all([0, 1, 2, 3], check)


class TestAllPairs:
    """The reduction of a product of options."""

    def test_holds_every_allowed_pair(self):
        """A pair that no case holds is a combination that the default run never tries."""
        options = {"a": (1, 2, 3), "b": (1, 2), "c": (1, 2), "d": (1, 2, 3)}

        def allowed(a, b, c, d):
            return not (a == 1 and b == 2)

        def pairs(cases):
            return {
                (one, other)
                for case in cases
                for one in case.items()
                for other in case.items()
                if one < other
            }

        full = full_product(options, allowed)
        reduced = all_pairs(options, allowed)
        assert len(full) == 30
        assert len(reduced) <= 12
        assert pairs(reduced) == pairs(full)
