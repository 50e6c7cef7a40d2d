# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Selection of the token rows that are projected to the vocabulary.

RL post-training reads the logits of model-written tokens only. :class:`OutputRowSelector` turns
a mask over the tokens of a micro-batch into what the output layer needs to compute these rows and
no others, with or without sequence parallelism.
"""

import hashlib
import os
from typing import Dict, List, Optional, Tuple

import torch
from torch import Tensor

from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.utils import get_pg_rank, get_pg_size, get_tensor_model_parallel_group_if_none

_INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class OutputRowSelectorError(ValueError):
    """A selector, or a setting beside it, that can't be honoured.

    Attributes:
        setting (str): Name of the argument, configuration field or module at fault.

    Args:
        setting (str): See the attribute.
        message (str): What was given, what was expected and the way out.
    """

    def __init__(self, setting: str, message: str):
        super().__init__(f"output_row_selector ({setting}): {message}")
        self.setting = setting


class OutputRowSelector:
    """The rows of one micro-batch whose logits are wanted, and how to move them.

    Rows are numbered as boolean indexing numbers them: row n of a compact tensor is row n of
    `full[mask]` for `full` of shape `[b, s, ...]`, so sequence by sequence, position by position.

    With sequence parallelism the rows are selected from the local shard and spread evenly over
    the tensor-parallel ranks by one all-to-all, `ceil(N / tp)` rows each, the last ones zero
    padding, in row order. That is an ordinary sequence-parallel input for the output layer,
    whose own all-gather and reduce-scatter then move selected rows only. Without it every rank
    selects from the same replicated rows.

    Index work and the copy of the mask to the host (the only host synchronisation; none for a
    mask on the CPU) happen once, in :meth:`build`, which the model calls on the pipeline stage
    that has the output layer. Building a selector once per micro-batch and handing it to several
    forward passes therefore shares both.

    The mask must be equal on all ranks of `tp_group`; under the environment variable
    `MCORE_SELECTIVE_DEBUG=1` :meth:`build` compares hashes (one all-gather of 8 bytes a rank).

    Args:
        mask (Tensor): `[b, s]`, bool or an integer type holding 0 and 1, over the tokens of this
            context-parallel rank; on the CPU or on the model's device. True selects the row.
            It must not change while the selector is in use.
        tp_group (ProcessGroup, optional): Tensor-parallel group of the output layer. Defaults to
            the one of `parallel_state`.
        sequence_parallel (bool): Whether hidden states arrive as shards `[s / tp, b, h]`, that is
            the output layer's own `sequence_parallel`. Ignored where `tp_group` has one rank.

    Raises:
        OutputRowSelectorError: The mask isn't a `[b, s]` tensor of an accepted type with storage,
            holds other integers than 0 and 1 (said by :meth:`build` where the mask is not on the
            CPU), or `s` can't be split over the sequence-parallel ranks.
    """

    def __init__(
        self,
        mask: Tensor,
        *,
        tp_group: Optional[torch.distributed.ProcessGroup] = None,
        sequence_parallel: bool = False,
    ):
        _check_mask(mask)
        self.mask = mask
        self.tp_group = get_tensor_model_parallel_group_if_none(tp_group)
        self._tp_size = get_pg_size(self.tp_group)
        self._tp_rank = get_pg_rank(self.tp_group)
        self.sequence_parallel = sequence_parallel and self._tp_size > 1
        if self.sequence_parallel and mask.size(1) % self._tp_size:
            raise OutputRowSelectorError(
                "mask",
                f"a mask of {mask.size(1)} tokens can't be split over {self._tp_size} "
                "sequence-parallel ranks; pad the micro-batch as the model's input is padded.",
            )

        self._num_rows: Optional[int] = None
        self._input_split_sizes: List[int] = []
        self._output_split_sizes: List[int] = []
        # Index tensors as built on the host, and their copies by name and device.
        self._host_indices: Dict[str, Optional[Tensor]] = {}
        self._device_indices: Dict[Tuple[str, torch.device], Tensor] = {}

    @property
    def num_rows(self) -> int:
        """Number N of selected rows. Builds the selector if need be."""
        self.build()
        return self._num_rows

    @property
    def selects_all(self) -> bool:
        """Whether every row of every sequence is selected. Builds the selector if need be."""
        return self.num_rows == self.mask.numel()

    def build(self) -> None:
        """Does the index work; a second call does nothing.

        Copies the mask to the host, which waits for the stream that the mask was made on.

        Raises:
            OutputRowSelectorError: The mask holds other integers than 0 and 1, or, under
                `MCORE_SELECTIVE_DEBUG=1`, differs between the ranks of `tp_group`.
        """
        if self._num_rows is not None:
            return
        mask = self.mask.detach().cpu()
        _check_mask_values(mask)
        mask = mask.bool()
        if os.environ.get("MCORE_SELECTIVE_DEBUG") == "1":
            self._check_same_on_all_ranks(mask)

        batch_size, seq_length = mask.shape
        rows = mask.flatten().nonzero().squeeze(1)
        sequence, position = rows // seq_length, rows % seq_length
        if self.sequence_parallel:
            local = self._plan_exchange(position // (seq_length // self._tp_size))
            position = position % (seq_length // self._tp_size)
            sequence, position = sequence[local], position[local]
        # [s, b, h] flattened to [s * b, h]: sequences are the inner dimension.
        self._host_indices["hidden"] = position * batch_size + sequence
        self._host_indices["token"] = rows
        self._num_rows = rows.numel()

    def check_built_for(
        self, tp_group: Optional[torch.distributed.ProcessGroup], sequence_parallel: bool
    ) -> None:
        """Checks that this selector was made for an output layer.

        Args:
            tp_group (ProcessGroup, optional): The layer's.
            sequence_parallel (bool): The layer's.

        Raises:
            OutputRowSelectorError: It was made for another group or the other kind of shards.
        """
        if self.sequence_parallel != sequence_parallel:
            raise OutputRowSelectorError(
                "sequence_parallel",
                f"the selector was built with {self.sequence_parallel}, the output layer has "
                f"{sequence_parallel}; build it with the output layer's.",
            )
        if self.tp_group is not tp_group and (self._tp_size > 1 or get_pg_size(tp_group) > 1):
            raise OutputRowSelectorError(
                "tp_group",
                "the selector was built for another tensor-parallel group than the output "
                "layer's; pass that layer's tp_group when building it.",
            )

    def select(self, values: Tensor) -> Tensor:
        """Takes the selected rows of a tensor laid out as the mask.

        Args:
            values (Tensor): `[b, s, ...]`, the same on every tensor-parallel rank or sharded in a
                later dimension. Rows that aren't selected are never read.

        Returns:
            Tensor: `[N, ...]`, differentiable.
        """
        if values.shape[:2] != self.mask.shape:
            raise OutputRowSelectorError(
                "mask",
                f"select() got values of shape {tuple(values.shape)}, expected "
                f"[b, s, ...] with the mask's [b, s] = {list(self.mask.shape)}.",
            )
        return values.flatten(0, 1).index_select(0, self._index("token", values.device))

    def scatter(self, values: Tensor, fill_value: float = 0.0) -> Tensor:
        """Puts compact rows back where the mask selected them.

        Args:
            values (Tensor): `[N, ...]`; of a model's compact output `[1, N, ...]`, its only entry.
            fill_value (float): What the rows that aren't selected get.

        Returns:
            Tensor: `[b, s, ...]`, differentiable.
        """
        if values.dim() == 0 or values.size(0) != self.num_rows:
            raise OutputRowSelectorError(
                "mask",
                f"scatter() got values of shape {tuple(values.shape)}, expected "
                f"[N, ...] with N = {self.num_rows}; of a model's output pass output[0].",
            )
        full = values.new_full((self.mask.numel(), *values.shape[1:]), fill_value)
        full = full.index_copy(0, self._index("token", values.device), values)
        return full.unflatten(0, self.mask.shape)

    def compact(self, hidden_states: Tensor) -> Tensor:
        """Makes the output layer's input of the decoder's output.

        Collectives, with sequence parallelism: one all-to-all over `tp_group` in forward and one
        in backward, N * h elements over all ranks. For backward only indices are saved. With no
        row selected the result is zero rows that are connected to `hidden_states` without having
        read it, so that the output layer runs, and its gradients are exact zeros.

        Args:
            hidden_states (Tensor): `[s, b, h]`, or `[s / tp, b, h]` with sequence parallelism.

        Returns:
            Tensor: `[max(N, 1), 1, h]`, or with sequence parallelism this rank's
                `[max(ceil(N / tp), 1), 1, h]`. Where every row is selected, `hidden_states`
                itself: the plain path is then the cheaper one.

        Raises:
            OutputRowSelectorError: The shape isn't that of the mask; before any collective.
        """
        self._check_hidden_states(hidden_states)
        if self.selects_all:
            return hidden_states
        rows = hidden_states.flatten(0, 1)
        rows = rows.index_select(0, self._index("hidden", rows.device))
        if self.sequence_parallel:
            rows = all_to_all(
                self.tp_group, rows, self._output_split_sizes, self._input_split_sizes
            )
            if self._host_indices["receive"] is not None:
                rows = rows.index_select(0, self._index("receive", rows.device))
        padding = self._rows_per_rank - rows.size(0)
        if padding:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, padding))
        return rows.unsqueeze(1)

    def to_output(self, output_parallel: Tensor) -> Tensor:
        """Makes a model's output of what the output layer made of :meth:`compact`'s result.

        Args:
            output_parallel (Tensor): `[rows, 1, v]`, or `[s, b, v]` where every row is selected;
                v is the local or the whole vocabulary.

        Returns:
            Tensor: `[1, N, v]`.
        """
        if not self.selects_all and output_parallel.size(0) != self.num_rows:
            # Only where there is padding: the backward of a slice copies the whole gradient.
            output_parallel = output_parallel[: self.num_rows]
        # [s b v] => [b s v] => [1 b*s v]
        return output_parallel.transpose(0, 1).reshape(1, self.num_rows, output_parallel.size(-1))

    @property
    def _rows_per_rank(self) -> int:
        """Rows of the output layer's input on each rank: at least one, so that it always runs."""
        ranks = self._tp_size if self.sequence_parallel else 1
        return max(-(-self.num_rows // ranks), 1)

    def _plan_exchange(self, source: Tensor) -> Tensor:
        """Plans the all-to-all from the shards of the sequence to even parts of the rows.

        Args:
            source (Tensor): `[N]`, the rank that holds each selected row.

        Returns:
            Tensor: `[N]` bool, the rows that this rank holds.
        """
        tp_size, tp_rank = self._tp_size, self._tp_rank
        rows_per_rank = max(-(-source.numel() // tp_size), 1)
        destination = torch.arange(source.numel()) // rows_per_rank
        counts = torch.bincount(source * tp_size + destination, minlength=tp_size * tp_size)
        counts = counts.view(tp_size, tp_size)
        self._input_split_sizes = counts[tp_rank].tolist()
        self._output_split_sizes = counts[:, tp_rank].tolist()
        # Rows arrive ordered by the rank they come from, which is row order for one sequence
        # only: those of a second sequence start over at the first rank.
        arrival = source[destination == tp_rank].argsort(stable=True)
        in_order = torch.equal(arrival, torch.arange(arrival.numel()))
        self._host_indices["receive"] = None if in_order else arrival.argsort()
        return source == tp_rank

    def _index(self, name: str, device: torch.device) -> Tensor:
        """The index tensor of this name on a device; each is copied there once."""
        self.build()
        if (name, device) not in self._device_indices:
            index = self._host_indices[name]
            if device.type == "cuda":
                # From pinned memory the copy doesn't wait for the device.
                index = index.pin_memory().to(device, non_blocking=True)
            else:
                index = index.to(device)
            self._device_indices[name, device] = index
        return self._device_indices[name, device]

    def _check_hidden_states(self, hidden_states: Tensor) -> None:
        """Checks that hidden states have the mask's shape."""
        batch_size, seq_length = self.mask.shape
        if self.sequence_parallel:
            seq_length //= self._tp_size
        if hidden_states.shape[:2] != (seq_length, batch_size):
            raise OutputRowSelectorError(
                "mask",
                f"a mask [b, s] = {list(self.mask.shape)} needs hidden states "
                f"[{seq_length}, {batch_size}, h] (sequence_parallel={self.sequence_parallel}), "
                f"got {list(hidden_states.shape)}; build the mask over the tokens that this "
                "context-parallel rank is given, padding included.",
            )

    def _check_same_on_all_ranks(self, mask: Tensor) -> None:
        """Compares a hash of the mask over `tp_group`."""
        if self._tp_size == 1:
            return
        digest = hashlib.blake2b(mask.contiguous().numpy().tobytes(), digest_size=7).digest()
        digest = torch.tensor(
            [int.from_bytes(digest, "big")], device=torch.cuda.current_device(), dtype=torch.int64
        )
        digests = digest.new_empty(self._tp_size)
        torch.distributed.all_gather_into_tensor(digests, digest, group=self.tp_group)
        if digests.unique().numel() > 1:
            raise OutputRowSelectorError(
                "mask",
                "the mask differs between tensor-parallel ranks, whose rows would be mixed; build "
                "it from data that is broadcast over the tensor-parallel group.",
            )


def _check_mask(mask: Tensor) -> None:
    """Checks what can be seen of a mask without waiting for its device."""
    if not isinstance(mask, Tensor):
        raise OutputRowSelectorError(
            "mask",
            f"got {type(mask).__name__}, expected a bool tensor [b, s] or an OutputRowSelector.",
        )
    if mask.dim() != 2 or mask.numel() == 0:
        raise OutputRowSelectorError(
            "mask",
            f"got a mask of shape {list(mask.shape)}, expected [b, s] over the tokens of the "
            "micro-batch; of row indices make a mask first.",
        )
    if mask.dtype is not torch.bool and mask.dtype not in _INTEGER_DTYPES:
        raise OutputRowSelectorError(
            "mask",
            f"got a mask of {mask.dtype}, expected torch.bool or integers 0 and 1; "
            "of a loss mask of weights pass `loss_mask != 0`.",
        )
    if mask.device.type == "cpu":
        _check_mask_values(mask)


def _check_mask_values(mask: Tensor) -> None:
    """Checks that a mask on the CPU holds no other integers than 0 and 1."""
    if mask.dtype is not torch.bool and not torch.all((mask == 0) | (mask == 1)):
        raise OutputRowSelectorError(
            "mask",
            f"a mask of {mask.dtype} must hold 0 and 1 only, got values from "
            f"{mask.min().item()} to {mask.max().item()}; pass `mask != 0` to select the "
            "non-zero ones.",
        )
