# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""What training with Megatron's optimizers and fused gradient accumulation needs on a CPU."""

import contextlib
from unittest import mock

import torch

from megatron.core.tensor_parallel import layers
from tests.unit_tests.harness.models import device


class FusedKernels:
    """Stands in for apex's extension that adds a weight gradient to `main_grad`.

    Attributes:
        calls (list): Of each call the kernel's name, the gradient's address and the number of rows.
    """

    def __init__(self):
        self.calls = []

    def _accumulate(self, name, total_input, grad_output, main_grad):
        # What the kernels ask for.
        assert total_input.dim() == grad_output.dim() == 2
        assert total_input.is_contiguous() and grad_output.is_contiguous()
        assert len(total_input) == len(grad_output) > 0
        self.calls.append((name, main_grad.data_ptr(), len(total_input)))
        main_grad += (grad_output.t().float() @ total_input.float()).to(main_grad.dtype)

    def wgrad_gemm_accum_fp32(self, total_input, grad_output, main_grad):
        """Into a gradient of fp32."""
        assert main_grad.dtype is torch.float32
        self._accumulate("fp32", total_input, grad_output, main_grad)

    def wgrad_gemm_accum_fp16(self, total_input, grad_output, main_grad):
        """Into a gradient of the weight's own 16 bits."""
        assert main_grad.dtype is total_input.dtype
        self._accumulate("fp16", total_input, grad_output, main_grad)


@contextlib.contextmanager
def installed(kernels: FusedKernels):
    """Has linear layers find these kernels, as if apex were installed."""
    with (
        mock.patch.object(layers, "fused_weight_gradient_mlp_cuda", kernels, create=True),
        mock.patch.object(layers, "_grad_accum_fusion_available", True),
    ):
        yield


@contextlib.contextmanager
def types_as_on_cuda():
    """Optimizers sort parameters by the name of their type, and know those of CUDA."""
    name = torch.Tensor.type
    if device().type == "cuda":
        yield
        return

    def name_on_cuda(self, dtype=None, **kwargs):
        if dtype is not None:
            return name(self, dtype, **kwargs)
        return name(self).replace("torch.", "torch.cuda.")

    with mock.patch.object(torch.Tensor, "type", name_on_cuda):
        yield
