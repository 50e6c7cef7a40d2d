# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""What needs a GPU is left out where there is none."""

import os

import torch

_NEED_GPU = ("test_linear_log_prob_on_gpu.py",)


def pytest_collection_modifyitems(config, items):
    """Under plain pytest ranks are worker processes on the CPU, whatever the machine has.

    `collect_ignore` would not do: it doesn't count for a file that the command line names.
    """
    if "WORLD_SIZE" in os.environ and torch.cuda.is_available():
        return
    left_out = [item for item in items if item.path.name in _NEED_GPU]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
