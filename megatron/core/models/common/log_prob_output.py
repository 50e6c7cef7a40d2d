# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Log-probabilities and entropy as a model's output, in place of logits."""

from dataclasses import replace
from typing import Any, Optional, Union

import torch
from torch import Tensor

from megatron.core.fusions.linear_log_prob.keep_set import (
    KeepSet,
    KeptIds,
    check_keep_set,
    check_keep_set_values,
    prepare_keep_set,
)
from megatron.core.fusions.linear_log_prob.linear_log_prob import (
    DEFAULT_LOGITS_BUDGET,
    check_values,
)
from megatron.core.fusions.linear_log_prob.output_layer import (
    LinearLogProbError,
    find_unsupported_output_layer,
    linear_log_prob_of_output_layer,
)
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.common.output_row_selector import OutputRowSelector
from megatron.core.utils import get_pg_size, unwrap_model


class LogProbOutput:
    """An `output_processor` whose output is the log-probability of each row's target.

    One for each micro-batch::

        processor = LogProbOutput(targets, temperature=0.8, entropy=True)
        output = model(..., output_row_selector=mask, output_processor=processor)
        log_prob, entropy = output[0].unbind(-1)            # [N] each
        log_prob = processor.scatter(log_prob)              # [b, s], zeros elsewhere

    The output is one fp32 tensor, `[1, N, 1]`, or `[1, N, 2]` with the entropy second, of the N
    selected rows in their order; without a selector `[b, s, 1 or 2]`. It is the same in the
    normal forward pass and in the schedule plan of combined 1F1B, and part of the graph also
    where no row is selected. No logits of all rows exist at any time: see
    :func:`megatron.core.fusions.linear_log_prob.linear_log_prob` for memory, collectives and
    what is saved.

    Args:
        targets (Tensor): `[b, s]` int64 or int32, the token that each row predicts: the tokens
            moved one to the left, this context-parallel rank's part. On the CPU or the model's
            device. Rows that aren't selected are never read.
        temperature (float or Tensor): Above 0, or of each row, `[b, s]`, or `[N]` in row order.
        entropy (bool or str): True for the entropy with gradient, `"no_grad"` for its value
            alone.
        keep (KeepSet, optional): Ids over which a row is normalised, with offsets over all
            `b * s` rows, sequence by sequence, or over the N selected ones.
        logit_softcap (float, optional): The model's cap of its logits, if it has one.
        vocab_size (int, optional): Size of the vocabulary where the output layer is padded, to
            leave padding columns out. By default they take part, as in the model's own loss.
        ignore_index (int): A target of this value makes results and gradients of its row 0.
        logits_dtype (str): `"fp32"`, or `"match"` to round logits as the output layer does.
        logits_budget (int): Bytes for logits that are kept for backward.
        impl (str): `"auto"`, `"triton"` or `"torch"`.
        output_row_selector (Tensor or OutputRowSelector, optional): Rows to select, for models
            that take an `output_processor` and no selector: megatron-core 0.18 and newer,
            unpatched. Otherwise pass the selector to the model.

    Raises:
        LinearLogProbError: `targets` isn't a `[b, s]` tensor of integers.
    """

    def __init__(
        self,
        targets: Tensor,
        *,
        temperature: Union[float, Tensor] = 1.0,
        entropy: Union[bool, str] = False,
        keep: Optional[KeepSet] = None,
        logit_softcap: Optional[float] = None,
        vocab_size: Optional[int] = None,
        ignore_index: int = -100,
        logits_dtype: str = "fp32",
        logits_budget: int = DEFAULT_LOGITS_BUDGET,
        impl: str = "auto",
        output_row_selector: Union[Tensor, OutputRowSelector, None] = None,
    ):
        if not isinstance(targets, Tensor) or targets.dtype not in (torch.int64, torch.int32):
            found = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
            raise LinearLogProbError(
                "targets", f"got {found}, expected an int64 or int32 tensor [b, s]."
            )
        if targets.dim() != 2:
            raise LinearLogProbError(
                "targets",
                f"got shape {list(targets.shape)}, expected [b, s] over the tokens that this "
                "context-parallel rank is given.",
            )
        self._targets = targets
        self._temperature = temperature
        self._keep = keep
        self._options = dict(
            entropy=entropy,
            logit_softcap=logit_softcap,
            vocab_size=vocab_size,
            ignore_index=ignore_index,
            logits_dtype=logits_dtype,
            logits_budget=logits_budget,
            impl=impl,
        )
        self._given_selector = output_row_selector
        self._used_selector: Optional[OutputRowSelector] = None

    @staticmethod
    def find_unsupported_setting(model: torch.nn.Module) -> Optional[LinearLogProbError]:
        """Says whether a model, as it is configured, would refuse this output.

        Args:
            model (torch.nn.Module): A model chunk, bare or wrapped. The output layer exists on
                the last pipeline stage only, so stages may have to share their answers.

        Returns:
            LinearLogProbError: What the call would raise; None where nothing stands in the way.
        """
        module = unwrap_model(model)
        if not module.post_process:
            return None
        weight = None
        if module.share_embeddings_and_output_weights:
            weight = module.shared_embedding_or_output_weight()
        return _find_unsupported_scale(
            getattr(module, "_scale_logits", None)
        ) or find_unsupported_output_layer(module.output_layer, weight)

    def scatter(self, values: Tensor, fill_value: float = 0.0) -> Tensor:
        """Puts values of the selected rows back where they belong.

        Args:
            values (Tensor): `[N, ...]`, after the model was called; of its output `output[0]`
                or a part of that.
            fill_value (float): What the rows that weren't selected get.

        Returns:
            Tensor: `[b, s, ...]`, differentiable.

        Raises:
            LinearLogProbError: The model was not called with a selector.
        """
        if self._used_selector is None:
            raise LinearLogProbError(
                "output_row_selector",
                "scatter() needs the selector that the model was called with; without one the "
                "output is [b, s, ...] already.",
            )
        return self._used_selector.scatter(values, fill_value)

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: torch.nn.Module,
        output_weight: Optional[Tensor],
        scale_logits: Any,
        config: Any,
        output_row_selector: Optional[OutputRowSelector] = None,
        **_: Any,
    ) -> Tensor:
        """What a model calls in place of its output layer, with upstream's keywords.

        Args:
            hidden_states (Tensor): `[s, b, h]`, `[s / tp, b, h]` with sequence parallelism; with
                `output_row_selector` the rows that its `compact` returned.
            output_layer (ColumnParallelLinear): The model's output layer.
            output_weight (Tensor, optional): `[v / tp, h]`, the tied embedding weight.
            scale_logits (Callable): The model's scaling of logits, known from its configuration.
            config (TransformerConfig): The model's.
            output_row_selector (OutputRowSelector, optional): What the rows are.

        Returns:
            Tensor: See the class.

        Raises:
            LinearLogProbError: The layer, the scaling or an argument can't be honoured.
            OutputRowSelectorError: The selector of the constructor doesn't fit.
            TypeError, ValueError: As linear_log_prob does.
        """
        unsupported = _find_unsupported_scale(scale_logits) or find_unsupported_output_layer(
            output_layer, output_weight
        )
        if unsupported is not None:
            raise unsupported
        selector = output_row_selector
        if self._given_selector is not None:
            if selector is not None:
                raise LinearLogProbError(
                    "output_row_selector",
                    "was given to the model and to LogProbOutput; give it to one of them.",
                )
            selector = self._own_selector(output_layer)
            hidden_states = selector.compact(hidden_states)
        self._used_selector = selector

        ranks = get_pg_size(output_layer.tp_group) if output_layer.sequence_parallel else 1
        rows = _RowOrder(selector, hidden_states.size(0) * ranks, hidden_states.size(1))
        output = linear_log_prob_of_output_layer(
            output_layer,
            hidden_states,
            self._row_targets(rows, output_layer, hidden_states.device),
            weight=output_weight,
            temperature=self._row_temperature(rows, hidden_states.device),
            keep=self._row_keep(rows, output_layer, hidden_states.device),
            logit_scale=config.mup_output_mult if getattr(config, "use_mup", False) else 1.0,
            **self._options,
        )
        if selector is not None:
            return selector.to_output(output)
        # [s b k] => [b s k]
        return output.transpose(0, 1).contiguous()

    def _own_selector(self, output_layer: torch.nn.Module) -> OutputRowSelector:
        """The constructor's selector, built for an output layer."""
        selector = self._given_selector
        if not isinstance(selector, OutputRowSelector):
            selector = OutputRowSelector(
                selector,
                tp_group=output_layer.tp_group,
                sequence_parallel=output_layer.sequence_parallel,
            )
        selector.check_built_for(output_layer.tp_group, output_layer.sequence_parallel)
        return selector

    def _vocab_size_of(self, output_layer: torch.nn.Module) -> int:
        vocab_size = self._options["vocab_size"]
        return output_layer.output_size if vocab_size is None else vocab_size

    def _row_targets(
        self, rows: "_RowOrder", output_layer: torch.nn.Module, device: torch.device
    ) -> Tensor:
        """Targets in the order of the output layer's rows."""
        targets = rows.take("targets", self._targets, self._options["ignore_index"])
        if targets.device.type == "cpu":
            # Whatever the model is on, these can be looked at.
            vocab_size = self._vocab_size_of(output_layer)
            check_values(targets, self._options["ignore_index"], 1.0, None, vocab_size)
        return _move(targets, device)

    def _row_temperature(self, rows: "_RowOrder", device: torch.device) -> Union[float, Tensor]:
        """Temperature in the order of the output layer's rows."""
        if not isinstance(self._temperature, Tensor):
            return self._temperature
        return _move(rows.take("temperature", self._temperature, 1.0), device)

    def _row_keep(
        self, rows: "_RowOrder", output_layer: torch.nn.Module, device: torch.device
    ) -> Optional[KeptIds]:
        """Kept ids in the order of the output layer's rows."""
        keep = self._keep
        if keep is None:
            return None
        if not isinstance(keep, KeepSet) or not isinstance(keep.offsets, Tensor):
            check_keep_set(keep, 0, device)  # says what it is
        num_rows = rows.count_rows("keep.offsets", keep.offsets.numel() - 1)
        check_keep_set(keep, num_rows, keep.offsets.device)
        if keep.offsets.device.type == "cpu":
            check_keep_set_values(keep, self._vocab_size_of(output_layer))
        kept = prepare_keep_set(
            replace(keep, offsets=_move(keep.offsets, device), ids=_move(keep.ids, device))
        )
        return kept.take(rows.index(device, num_rows), rows.total)


class _RowOrder:
    """The rows of an output layer's input, in terms of the tokens `[b, s]` of a micro-batch.

    Args:
        selector (OutputRowSelector, optional): What the rows were selected by.
        seq_length (int): First dimension of the output layer's output.
        batch_size (int): Second dimension.

    Attributes:
        total (int): Number of rows, padding included.
    """

    def __init__(self, selector: Optional[OutputRowSelector], seq_length: int, batch_size: int):
        self.total = seq_length * batch_size
        # Where all are selected, the output layer is given hidden states as they are, [s, b, h].
        self._selector = None if selector is None or selector.selects_all else selector
        self._shape = (batch_size, seq_length) if self._selector is None else selector.mask.shape

    def take(self, name: str, values: Tensor, fill_value: Any) -> Tensor:
        """Values `[total]` of `[b, s]`, or of `[N]` in row order; padding gets `fill_value`."""
        if values.shape == self._shape:
            values = self._select(values)
        else:
            self.count_rows(name, values.numel(), values.shape)
            if self._selector is None:
                values = self._select(values.view(self._shape))
        padding = self.total - values.numel()
        return torch.nn.functional.pad(values, (0, padding), value=fill_value)

    def count_rows(self, name: str, given: int, shape: Optional[torch.Size] = None) -> int:
        """Checks that something is given for all tokens or for the selected ones."""
        tokens = self._shape[0] * self._shape[1]
        selected = tokens if self._selector is None else self._selector.num_rows
        if given not in (tokens, selected) or shape not in (None, (selected,)):
            found = f"{given} rows" if shape is None else f"shape {list(shape)}"
            raise LinearLogProbError(
                name.split(".")[0],
                f"{name}: got {found}, expected one for each of the tokens [b, s] = "
                f"{list(self._shape)} or of the N = {selected} selected ones.",
            )
        return given

    def index(self, device: torch.device, given: int) -> Tensor:
        """Where each row, padding aside, is among what was given for all or selected tokens."""
        if self._selector is not None and given == self._selector.num_rows:
            return torch.arange(given, device=device)
        tokens = torch.arange(self._shape[0] * self._shape[1], device=device)
        return self._select(tokens.view(self._shape))

    def _select(self, values: Tensor) -> Tensor:
        if self._selector is not None:
            return self._selector.select(values)
        # [b s] => [s b] => [s * b]
        return values.transpose(0, 1).flatten()


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    """Moves a tensor to the model's device, from the CPU without waiting for that."""
    if tensor.device == device:
        return tensor
    if tensor.device.type == "cpu" and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _find_unsupported_scale(scale_logits: Any) -> Optional[LinearLogProbError]:
    """Finds a scaling of logits other than the one that the configuration tells of."""
    known = getattr(LanguageModule, "_scale_logits", None)
    if known is None or getattr(scale_logits, "__func__", None) is known:
        # Before core 0.18 models don't scale their logits.
        return None
    return LinearLogProbError(
        "scale_logits",
        f"the model scales its logits by {scale_logits!r}, which the configuration doesn't tell "
        "of; use LanguageModule's, or compute log-probabilities from the logits.",
    )
