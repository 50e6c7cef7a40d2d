# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""How models take `output_row_selector`: checks on entry, the projection, the precision wrapper.

The models themselves only call these functions, so that every model and both pipeline schedules
accept, refuse and compute the same.
"""

import inspect
from typing import Any, Callable, Dict, Optional, Tuple, Union

import torch
from torch import Tensor

from megatron.core.config_logger import has_config_logger_enabled
from megatron.core.models.common.output_row_selector import (
    OutputRowSelector,
    OutputRowSelectorError,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model

_ARGUMENT = "output_row_selector"
# What a caller may give as output_row_selector: a mask [b, s] or a selector built from one.
OutputRows = Union[Tensor, OutputRowSelector]


def find_unsupported_setting(
    model: torch.nn.Module, output_processor: Any = None
) -> Optional[ValueError]:
    """Says whether a model, as it is configured, would refuse `output_row_selector`.

    For callers that would rather fall back to the full output than fail. What belongs to a single
    call (labels, inference, the mask itself) is checked by the model when it is called. The
    output layer exists on the last pipeline stage only, so a caller that wants one answer for all
    stages has to share this one's.

    Args:
        model (torch.nn.Module): A model chunk, bare or wrapped for data parallelism and precision.
        output_processor (optional): What is to be given to the model beside the selector. One
            that has a `find_unsupported_setting` of its own is asked, too; `LogProbOutput`, the
            class or one of it, has.

    Returns:
        OutputRowSelectorError or LinearLogProbError: What the model would raise, its `setting`
            naming the configuration field or module at fault; None where nothing stands in the
            way.
    """
    module = unwrap_model(model)
    if _names_argument(module):
        unsupported = _find_unsupported_config(module) or _find_unsupported_output_layer(module)
        if unsupported is None and hasattr(output_processor, "find_unsupported_setting"):
            unsupported = output_processor.find_unsupported_setting(model)
        return unsupported
    if output_processor is not None:
        return OutputRowSelectorError(
            "model",
            f"{type(module).__name__}.forward doesn't take output_row_selector, so it can't give "
            "an output_processor the selected rows; let forward pass both on to the language "
            "model.",
        )
    if _is_in_float16_module(model):
        # It selects from the output of a model that doesn't know the argument.
        return None
    return OutputRowSelectorError(
        "model",
        f"{type(module).__name__}.forward doesn't take it; call the model through Float16Module, "
        "which then selects from its output, or let forward pass it on to the language model.",
    )


def prepare_output_processor(
    model: torch.nn.Module,
    output_processor: Optional[Callable[..., Any]],
    output_row_selector: Optional[OutputRows],
    input_ids: Optional[Tensor],
    labels: Optional[Tensor],
    inference_context: Any,
) -> Optional[Callable[..., Any]]:
    """Makes one hook of a selector and of what is to be done with the selected rows.

    Args:
        model (torch.nn.Module): The language model that was called.
        output_processor (Callable, optional): What the caller gave.
        output_row_selector (Tensor or OutputRowSelector, optional): See
            :func:`prepare_output_row_selector`.
        input_ids, labels, inference_context: See there.

    Returns:
        Callable: `output_processor` itself without a selector; else what hands the selected rows
            to it, or computes their logits where there is none.

    Raises:
        OutputRowSelectorError, LinearLogProbError: The selector, the call or a setting can't be
            honoured.
    """
    if output_row_selector is None:
        return output_processor
    selector = prepare_output_row_selector(
        model, output_row_selector, input_ids, labels, inference_context, output_processor
    )
    return _SelectedRows(selector, output_processor)


class _SelectedRows:
    """An output processor that goes on with the selected rows only."""

    def __init__(self, selector: OutputRowSelector, output_processor: Optional[Callable[..., Any]]):
        self._selector = selector
        self._output_processor = output_processor

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: torch.nn.Module,
        output_weight: Optional[Tensor],
        runtime_gather_output: Optional[bool],
        **others: Any,
    ) -> Any:
        """What the model calls; keywords as upstream's, `output_row_selector` only passed on."""
        if self._output_processor is None:
            return project_selected_rows(
                output_layer, hidden_states, self._selector, output_weight, runtime_gather_output
            )
        return self._output_processor(
            hidden_states=self._selector.compact(hidden_states),
            output_layer=output_layer,
            output_weight=output_weight,
            runtime_gather_output=runtime_gather_output,
            output_row_selector=self._selector,
            **others,
        )


def prepare_output_row_selector(
    model: torch.nn.Module,
    output_row_selector: OutputRows,
    input_ids: Optional[Tensor],
    labels: Optional[Tensor],
    inference_context: Any,
    output_processor: Optional[Callable[..., Any]] = None,
) -> OutputRowSelector:
    """Checks a selector on entry of a model and does its index work where the output layer is.

    Runs on every pipeline stage and, but for the index work, waits for no device, so that all
    stages refuse alike, before any collective.

    Args:
        model (torch.nn.Module): The language model that was called.
        output_row_selector (Tensor or OutputRowSelector): As the caller gave it, a mask `[b, s]`
            or a selector built for this model's output layer.
        input_ids (Tensor, optional): `[b, s]`, what the mask's shape is held against. None where
            the decoder is given something else; the shape is then checked against the decoder's
            output alone.
        labels (Tensor, optional): Must be None.
        inference_context (BaseInferenceContext, optional): Must be None.
        output_processor (Callable, optional): What the rows are for.

    Returns:
        OutputRowSelector: Built on the stage that has the output layer.

    Raises:
        OutputRowSelectorError: The selector, the call or a setting can't be honoured.
    """
    _check_call(labels, inference_context)
    unsupported = find_unsupported_setting(model, output_processor)
    if unsupported is not None:
        raise unsupported

    tp_group, sequence_parallel = model.pg_collection.tp, False
    if model.post_process:
        tp_group = model.output_layer.tp_group
        sequence_parallel = model.output_layer.sequence_parallel
    if isinstance(output_row_selector, OutputRowSelector):
        selector = output_row_selector
        if model.post_process:
            selector.check_built_for(tp_group, sequence_parallel)
    else:
        selector = OutputRowSelector(
            output_row_selector, tp_group=tp_group, sequence_parallel=sequence_parallel
        )

    mask = selector.mask
    if input_ids is not None and input_ids.shape != mask.shape:
        raise OutputRowSelectorError(
            "mask",
            f"got shape {list(mask.shape)}, expected [b, s] = {list(input_ids.shape)} as "
            "input_ids; build the mask over the tokens that this context-parallel rank is given.",
        )
    device = next((parameter.device for parameter in model.parameters()), mask.device)
    if mask.device not in (device, torch.device("cpu")):
        raise OutputRowSelectorError(
            "mask", f"is on {mask.device}, expected the model's {device} or the CPU; move it there."
        )
    if model.post_process:
        selector.build()
    return selector


def project_selected_rows(
    output_layer: ColumnParallelLinear,
    hidden_states: Tensor,
    output_row_selector: OutputRowSelector,
    output_weight: Optional[Tensor] = None,
    runtime_gather_output: Optional[bool] = None,
) -> Tensor:
    """Projects the selected rows of the decoder's output to the vocabulary.

    The output layer is called once, as for full output, on a shorter input, so its hooks,
    collectives and gradient accumulation stay its own. Collectives beside those:
    :meth:`OutputRowSelector.compact`'s. The logits are not saved for backward.

    Args:
        output_layer (ColumnParallelLinear): The model's output layer.
        hidden_states (Tensor): `[s, b, h]`, or `[s / tp, b, h]` with sequence parallelism.
        output_row_selector (OutputRowSelector): As `prepare_output_row_selector` returned it.
        output_weight (Tensor, optional): `[v / tp, h]`, the tied embedding weight.
        runtime_gather_output (bool, optional): As in the output layer's forward.

    Returns:
        Tensor: Logits `[1, N, v / tp]`, `[1, N, v]` where the output layer gathers them, in the
            output layer's dtype.
    """
    rows = output_row_selector.compact(hidden_states)
    logits, _ = output_layer(
        rows, weight=output_weight, runtime_gather_output=runtime_gather_output
    )
    return output_row_selector.to_output(logits)


def forward_with_output_row_selector(
    module: torch.nn.Module,
    output_row_selector: OutputRows,
    inputs: Tuple[Any, ...],
    kwargs: Dict[str, Any],
    has_output: bool,
) -> Any:
    """Calls the module inside a precision wrapper so that its output holds selected rows only.

    A module whose forward names `output_row_selector` selects itself. Another one, that of a
    custom model provider say, gets the argument if it takes any keyword, and what still comes
    back as `[b, s, ...]` is selected here, before the wrapper upcasts it.

    Args:
        module (torch.nn.Module): The wrapped module.
        output_row_selector (Tensor or OutputRowSelector): Mask `[b, s]` or selector.
        inputs (tuple): Positional arguments of the module.
        kwargs (dict): Its other keyword arguments.
        has_output (bool): Whether this is the last stage, where the output is logits.

    Returns:
        The module's output, `[1, N, ...]` on the last stage.

    Raises:
        OutputRowSelectorError: The module doesn't name the argument and its output is neither
            `[b, s, ...]` nor `[1, N, ...]`, or labels or an inference context are given.
    """
    if _names_argument(module):
        return module(*inputs, output_row_selector=output_row_selector, **kwargs)

    parameters = inspect.signature(module.forward).parameters
    given = {**dict(zip(parameters, inputs)), **kwargs}  # arguments may come by position, too
    context = given.get("inference_context")
    _check_call(given.get("labels"), given.get("inference_params") if context is None else context)
    selector = output_row_selector
    if not isinstance(selector, OutputRowSelector):
        selector = OutputRowSelector(selector)
    takes_any_keyword = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    if takes_any_keyword:
        kwargs = {**kwargs, _ARGUMENT: output_row_selector}
    output = module(*inputs, **kwargs)
    if not has_output:
        return output

    shape = tuple(output.shape[:2]) if isinstance(output, Tensor) and output.dim() > 2 else None
    # A selected output can only look like a full one where b = 1 and every row is selected, and
    # then it is one.
    if takes_any_keyword and shape == (1, selector.num_rows):
        return output
    if shape == tuple(selector.mask.shape):
        return selector.select(output).unsqueeze(0)
    found = type(output).__name__ if shape is None else f"shape {list(output.shape)}"
    raise OutputRowSelectorError(
        "model",
        f"{type(module).__name__} returned {found}, expected logits [b, s, ...] with [b, s] = "
        f"{list(selector.mask.shape)} or selected rows [1, {selector.num_rows}, ...]; let its "
        "forward take output_row_selector and pass it on to the language model.",
    )


def _names_argument(module: torch.nn.Module) -> bool:
    """Whether a module's forward has `output_row_selector` among its named parameters."""
    return _ARGUMENT in inspect.signature(module.forward).parameters


def _is_in_float16_module(model: torch.nn.Module) -> bool:
    """Whether a precision wrapper is among the wrappers of a model."""
    while not isinstance(model, Float16Module):
        model = getattr(model, "module", None)
        if model is None:
            return False
    return True


def _check_call(labels: Optional[Tensor], inference_context: Any) -> None:
    """Refuses arguments of a call that leave no room for a selection."""
    if labels is not None:
        raise OutputRowSelectorError(
            "labels",
            "a loss needs every row; pass labels=None and compute the loss from the selected "
            "rows, or leave the selector out.",
        )
    if inference_context is not None or _inference_is_active():
        raise OutputRowSelectorError(
            "inference_context",
            "inference chooses its own rows; leave the selector out, or call the model without "
            "an inference context (in eval mode for log-probs).",
        )


def _inference_is_active() -> bool:
    """Whether an inference engine uses the model, where this version of core can tell."""
    from megatron.core.inference import utils as inference_utils

    mode = getattr(inference_utils, "InferenceMode", None)
    return mode is not None and mode.is_active()


def _find_unsupported_config(model: torch.nn.Module) -> Optional[OutputRowSelectorError]:
    """Finds a configuration field that rules a selection out."""
    config = model.config
    if has_config_logger_enabled(config):
        return OutputRowSelectorError(
            "config_logger_dir",
            f"is {config.config_logger_dir!r}, which logs the logits of all tokens; unset it.",
        )
    if config.defer_embedding_wgrad_compute:
        return OutputRowSelectorError(
            "defer_embedding_wgrad_compute",
            "is on, which replays the output layer's weight gradient with one size for all "
            "micro-batches; turn it off.",
        )
    # core 0.16 has the scope, later versions an implementation of that name.
    graph_scopes = [
        getattr(scope, "name", scope) for scope in getattr(config, "cuda_graph_scope", None) or ()
    ]
    if config.cuda_graph_impl == "full_iteration" or (
        config.cuda_graph_impl != "none" and "full_iteration" in graph_scopes
    ):
        return OutputRowSelectorError(
            "cuda_graph_impl",
            "captures the full iteration, and the number of selected rows changes between "
            "micro-batches; capture layers instead.",
        )
    if (
        config.mtp_num_layers
        and hasattr(model, "mtp_process")
        and not _mtp_runs_without_labels(model)
    ):
        return OutputRowSelectorError(
            "mtp_num_layers",
            f"is {config.mtp_num_layers}, and this version's multi-token prediction needs labels; "
            "set it to None, or use megatron-core 0.18 or newer.",
        )
    return None


def _mtp_runs_without_labels(model: torch.nn.Module) -> bool:
    """Whether multi-token prediction leaves a forward pass without labels alone.

    core 0.16 clones the labels whatever they are. Newer versions compute the loss in a function
    of its own, and slime's patch of 0.16 takes labels of their own by `mtp_kwargs`.
    """
    return (
        hasattr(multi_token_prediction, "process_mtp_loss")
        or "mtp_kwargs" in inspect.signature(model.forward).parameters
    )


def _find_unsupported_output_layer(model: torch.nn.Module) -> Optional[OutputRowSelectorError]:
    """Finds out whether the output layer of a last stage takes any number of rows."""
    if not model.post_process or isinstance(model.output_layer, ColumnParallelLinear):
        return None
    return OutputRowSelectorError(
        "output_layer",
        f"is {type(model.output_layer).__name__}, expected ColumnParallelLinear; use an output "
        "layer of that class (no FP8 or adapter-wrapped one, no value head) or full output.",
    )
