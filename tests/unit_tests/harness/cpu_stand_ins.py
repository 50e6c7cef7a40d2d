# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""What Megatron asks of CUDA, answered on a machine without it.

Nothing here computes anything that a test is about. :func:`install` is called once in a worker
process that has no CUDA, before `megatron.core` is imported.
"""

import contextlib

import torch


class NoStream:
    """A stream or an event of a device that does one thing after the other."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, stream):
        """Work on a CPU is done when the call returns, so there is nothing to wait for."""

    def wait_event(self, event):
        """See :meth:`wait_stream`."""

    def record(self, stream=None):
        """See :meth:`wait_stream`."""

    def wait(self, stream=None):
        """See :meth:`wait_stream`."""

    def synchronize(self):
        """See :meth:`wait_stream`."""

    def record_event(self, event=None):
        """See :meth:`wait_stream`."""
        return event or NoStream()


def install() -> None:
    """Puts every stand-in in place for the rest of this process."""
    _install_devices()
    _install_tensors()
    _install_random_states()
    _install_collectives()
    _install_megatron()


def install_missing_name() -> None:
    """Defines what the router of 0.16.1 reads and imports along with Transformer Engine only."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _install_devices() -> None:
    # Megatron allocates on `torch.cuda.current_device()`: a name of a device will do.
    torch.cuda.current_device = lambda: "cpu"
    # Two functions, not one under two names: dynamo refuses to trace an object it knows twice.
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    # pipeline_parallel.utils annotates with both at import and makes them when a plan is built.
    torch.cuda.Stream = NoStream
    torch.cuda.Event = NoStream
    torch.cuda.current_stream = lambda device=None: NoStream()
    torch.cuda.default_stream = lambda device=None: NoStream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    # A schedule node names its ranges for the profiler.
    torch.cuda.nvtx.range_push = lambda message: None
    torch.cuda.nvtx.range_pop = lambda: None
    # Tells CUDA's allocator about a second stream that uses the memory.
    torch.Tensor.record_stream = lambda self, stream: None


def _install_tensors() -> None:
    # Where Megatron writes "cuda" or asks for pinned memory: schedules count tokens there, rotary
    # embeddings pick their context-parallel part, the optimizer keeps its flags.
    def in_this_memory(make):
        def make_here(*args, device=None, pin_memory=False, **kwargs):
            return make(*args, device="cpu" if device == "cuda" else device, **kwargs)

        return make_here

    torch.zeros = in_this_memory(torch.zeros)
    torch.tensor = in_this_memory(torch.tensor)
    torch.Tensor.cuda = lambda self, device=None, non_blocking=False: self


def _install_random_states() -> None:
    # The rng trackers and activation recompute save and restore CUDA's generator; the CPU's is
    # the one that dropout and initialisation draw from here.
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state


def _install_collectives() -> None:
    # The MoE token dispatcher leaves its split sizes in CPU tensors, which the copy from the
    # device would have turned into lists.
    all_to_all_single = torch.distributed.all_to_all_single

    def with_lists(output, input, output_split_sizes=None, input_split_sizes=None, **kwargs):
        def as_list(sizes):
            return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes

        return all_to_all_single(
            output, input, as_list(output_split_sizes), as_list(input_split_sizes), **kwargs
        )

    torch.distributed.all_to_all_single = with_lists


def _install_megatron() -> None:
    from megatron.core.pipeline_parallel.utils import set_streams
    from megatron.core.tensor_parallel import random

    # It sets the state of a CUDA generator that does not exist; see _install_random_states.
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: (
        torch.set_rng_state(new_state)
    )
    # The combined schedule's two streams.
    set_streams(NoStream(), NoStream())
