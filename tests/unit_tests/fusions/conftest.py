# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Where Triton's kernels run, and what needs a GPU."""

import os

import torch

# Under plain pytest the ranks are worker processes on the CPU, whatever the machine has.
_ON_GPU = "WORLD_SIZE" in os.environ and torch.cuda.is_available()

if not _ON_GPU:
    # Read when the first kernel is defined; worker processes inherit it.
    os.environ["TRITON_INTERPRET"] = "1"

# Sizes and memory that only a GPU has: `torchrun --nproc-per-node 1 -m pytest tests/unit_tests`.
collect_ignore = [] if _ON_GPU else ["test_linear_log_prob_on_gpu.py"]
