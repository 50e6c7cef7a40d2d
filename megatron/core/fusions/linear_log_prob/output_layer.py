# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The op in place of an output layer's projection, with the rest of the layer's contract kept."""

import contextlib
import threading
from typing import Any, Callable, Dict, Iterator, Optional

import torch
from torch import Tensor

from megatron.core.fusions.linear_log_prob.linear_log_prob import run_linear_log_prob
from megatron.core.fusions.linear_log_prob.matrix_products import check_fp32_products
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

# Overrides forward, and calls that of ColumnParallelLinear where it is not asked for a loss.
_PASSES_ON = ("megatron.core.transformer.linear_cross_entropy", "LinearCrossEntropyModule")


class LinearLogProbError(ValueError):
    """An output layer, or a setting beside it, that log-probabilities can't be had from.

    Attributes:
        setting (str): Name of the argument, configuration field or module at fault.

    Args:
        setting (str): See the attribute.
        message (str): What was given, what was expected and the way out.
    """

    def __init__(self, setting: str, message: str):
        super().__init__(f"linear_log_prob ({setting}): {message}")
        self.setting = setting


def find_unsupported_output_layer(
    output_layer: torch.nn.Module, weight: Optional[Tensor] = None
) -> Optional[LinearLogProbError]:
    """Says whether log-probabilities can be had from an output layer.

    Args:
        output_layer (torch.nn.Module): The layer.
        weight (Tensor, optional): The weight that its call is given; by default its own.

    Returns:
        LinearLogProbError: What :func:`linear_log_prob_of_output_layer` would raise; None where
            nothing stands in the way.
    """
    kind = type(output_layer)
    if not isinstance(output_layer, ColumnParallelLinear):
        return LinearLogProbError(
            "output_layer",
            f"is {kind.__name__}, expected ColumnParallelLinear; compute log-probabilities from "
            "its logits (FP8 heads, adapters and value heads have a product of their own).",
        )
    passes_on = (kind.__module__, kind.__name__) == _PASSES_ON
    if kind._forward_impl is not ColumnParallelLinear._forward_impl or not (
        kind.forward is ColumnParallelLinear.forward or passes_on
    ):
        return LinearLogProbError(
            "output_layer",
            f"{kind.__name__} overrides forward or _forward_impl of ColumnParallelLinear, whose "
            "product is replaced; compute log-probabilities from its logits.",
        )
    own = vars(output_layer)
    if "forward" in own or not isinstance(own.get("_forward_impl"), (_Seam, type(None))):
        return LinearLogProbError(
            "output_layer",
            "has a forward or _forward_impl of its own set on the instance, which would be "
            "bypassed; remove it, or compute log-probabilities from its logits.",
        )
    if output_layer.config.defer_embedding_wgrad_compute:
        return LinearLogProbError(
            "defer_embedding_wgrad_compute",
            "is on, which replays the output layer's weight gradient from its logits' gradient; "
            "turn it off.",
        )
    if getattr(output_layer, "gtp_remat_size", 1) > 1:
        return LinearLogProbError(
            "gtp_remat_size",
            f"is {output_layer.gtp_remat_size}, which shards the output weight further; set it "
            "to 1 for the output layer.",
        )
    weight = output_layer.weight if weight is None else weight
    if weight is None:
        return None
    if hasattr(weight, "__fsdp_param__"):
        return LinearLogProbError(
            "fsdp",
            "Megatron-FSDP shards the output weight and its gradient; use "
            "DistributedDataParallel, or compute log-probabilities from the logits.",
        )
    try:
        check_fp32_products(weight.device, weight.dtype)
    except ValueError as error:
        return LinearLogProbError("torch", str(error))
    return None


def linear_log_prob_of_output_layer(
    output_layer: ColumnParallelLinear,
    hidden_states: Tensor,
    targets: Tensor,
    *,
    weight: Optional[Tensor] = None,
    **options: Any,
) -> Tensor:
    """Log-probabilities, and entropy where asked for, in place of an output layer's logits.

    The layer itself is called, with its product replaced for this one call of this thread. So its
    hooks run (a parameter gather that overlaps with forward is waited for), it picks its weight,
    bias and group, and its settings decide what is reduced and where the weight gradient goes.

    Args:
        output_layer (ColumnParallelLinear): The layer.
        hidden_states (Tensor): `[s, b, h]`, with the layer's sequence parallelism
            `[s / tp, b, h]`.
        targets (Tensor): `[s * b]`, of the rows of all ranks, sequences innermost.
        weight (Tensor, optional): `[v / tp, h]`, as in the layer's forward.
        **options: Of :func:`linear_log_prob`, but for what the layer decides: `bias`, `wgrad`,
            `tp_group` and `sequence_parallel`.

    Returns:
        Tensor: `[s, b, 1]` fp32, or `[s, b, 2]` with the entropy second; one tensor, as pipeline
            schedules want it.

    Raises:
        LinearLogProbError: As :func:`find_unsupported_output_layer` says.
        TypeError, ValueError: As :func:`linear_log_prob` does.
    """
    unsupported = find_unsupported_output_layer(output_layer, weight)
    if unsupported is not None:
        raise unsupported

    def forward_impl(
        input: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: Optional[list] = None,
        wgrad_deferral_limit: Optional[int] = None,
        tp_group: Optional[torch.distributed.ProcessGroup] = None,
        **others: Any,
    ) -> Tensor:
        # Of what newer layers pass beside these, nothing but its absence can be honoured.
        for name, value in others.items():
            if value not in (None, 1, False):
                raise LinearLogProbError(
                    name, f"the output layer asks for {value!r}, which is unknown; leave it unset."
                )
        log_prob, entropy = run_linear_log_prob(
            input.flatten(0, 1),
            weight,
            targets,
            bias=bias,
            # Without a main_grad, in a model that isn't trained, there is nothing to add to.
            wgrad="auto" if gradient_accumulation_fusion else "grad",
            tp_group=tp_group,
            sequence_parallel=sequence_parallel,
            allreduce_dgrad=allreduce_dgrad,
            **options,
        )
        outputs = [log_prob] if entropy is None else [log_prob, entropy]
        # [s * b, k] => [s, b, k]
        return torch.stack(outputs, dim=-1).unflatten(0, (-1, input.size(1)))

    with _replaced_product(output_layer, forward_impl):
        output, _ = output_layer(hidden_states, weight=weight, runtime_gather_output=False)
    return output


class _Seam:
    """Stands on a layer in place of its `_forward_impl`, for the threads that replace it."""

    def __init__(self, original: Callable):
        self.original = original
        self.by_thread: Dict[int, Callable] = {}

    def __call__(self, *args, **kwargs):
        product = self.by_thread.get(threading.get_ident(), self.original)
        return product(*args, **kwargs)


_seam_lock = threading.Lock()


@contextlib.contextmanager
def _replaced_product(layer: ColumnParallelLinear, product: Callable) -> Iterator[None]:
    """Has the calls of a layer in this thread use another product."""
    thread = threading.get_ident()
    with _seam_lock:
        seam = vars(layer).get("_forward_impl")
        if seam is None:
            seam = layer._forward_impl = _Seam(layer._forward_impl)
        seam.by_thread[thread] = product
    try:
        yield
    finally:
        with _seam_lock:
            del seam.by_thread[thread]
            if not seam.by_thread:
                del layer._forward_impl
