# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""What an implementation of the row work has to offer, and which one is taken."""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from megatron.core.fusions.linear_log_prob.keep_set import KeptIds
from megatron.core.fusions.linear_log_prob.matrix_products import multiply


@dataclass(frozen=True)
class Logits:
    """How logits are made of the projection, the same for all rows.

    Attributes:
        columns (int): Columns of this rank's shard that are part of the vocabulary.
        vocab_start (int): Id of the first one.
        vocab_size (int): Size of the whole vocabulary.
        ignore_index (int): Target of rows that don't count.
        scale (float): Multiplies the projection.
        softcap (float, optional): Cap c of `c * tanh(y / c)`, after the scale.
        rounds (bool): Whether each step is rounded to the dtype of the projection.
        entropy (bool): Whether the entropy is wanted.
    """

    columns: int
    vocab_start: int
    vocab_size: int
    ignore_index: int
    scale: float
    softcap: Optional[float]
    rounds: bool
    entropy: bool

    def part(self, start: int, end: int) -> "Logits":
        """The same for a range of this rank's columns."""
        columns = min(max(self.columns - start, 0), end - start)
        return replace(self, columns=columns, vocab_start=self.vocab_start + start)


@dataclass(frozen=True)
class Rows:
    """What is known of each row beside its projection.

    Attributes:
        targets (Tensor): `[N]` int64.
        inverse_temperature (Tensor): `[N]` fp32, or one element that stands for all rows.
        kept (KeptIds, optional): The ids that each row keeps.
    """

    targets: Tensor
    inverse_temperature: Tensor
    kept: Optional[KeptIds]

    def part(self, start: int, end: int) -> "Rows":
        """The same for a range of rows."""
        temperature = self.inverse_temperature
        return Rows(
            self.targets[start:end],
            temperature if temperature.numel() == 1 else temperature[start:end],
            None if self.kept is None else self.kept.rows(start, end),
        )


# Fields of the statistics of a rank's part of the vocabulary, [fields, N] fp32: maximum m,
# sum of exp(z - m), the target's logit or -inf, sum of (z - m) * exp(z - m) where the entropy is
# wanted; with kept ids then the same three sums over those.
MAXIMUM, SUM, TARGET, WEIGHTED = 0, 1, 2, 3
KEPT_MAXIMUM, KEPT_SUM, KEPT_WEIGHTED = 4, 5, 6


def count_fields(entropy: bool, kept: bool) -> int:
    """Number of fields of the statistics."""
    if kept:
        return 7
    return 4 if entropy else 3


class Normalizers(NamedTuple):
    """What backward needs of each row, `[N]` fp32 each.

    Attributes:
        log_prob (Tensor): Logsumexp that the log-probability is normalised by.
        entropy (Tensor, optional): Logsumexp of the distribution that the entropy is of.
        entropy_value (Tensor, optional): The entropy itself.
        target (Tensor, optional): The target's logit, where ids are kept.
    """

    log_prob: Tensor
    entropy: Optional[Tensor]
    entropy_value: Optional[Tensor]
    target: Optional[Tensor]

    def part(self, start: int, end: int) -> "Normalizers":
        """The same for a range of rows."""
        return Normalizers(*(None if field is None else field[start:end] for field in self))


class Results(NamedTuple):
    """Results of the forward pass, `[N]` fp32 each, and what backward needs."""

    log_prob: Tensor
    entropy: Optional[Tensor]
    normalizers: Normalizers


class RowBackend(ABC):
    """An implementation of the work on rows of logits.

    A backend that takes statistics while it projects overrides :meth:`project_rows` and needs no
    logits but those to be kept.
    """

    # A name for logs.
    name: str

    def project_rows(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],
        logits: Tensor,
        rows: Rows,
        how: Logits,
        statistics: Tensor,
        kept_logits: Optional[Tensor],
    ) -> None:
        """Projects a chunk of rows and takes its statistics.

        Args:
            hidden (Tensor): `[n, h]`.
            weight (Tensor): `[v / tp, h]`.
            bias (Tensor, optional): `[v / tp]`.
            logits (Tensor): `[n, v / tp]`, where the projection goes, without bias and scale.
            rows (Rows): Of the chunk.
            how (Logits): See there.
            statistics (Tensor): `[fields, n]` fp32, written to.
            kept_logits (Tensor, optional): `[K]` fp32, to which the logits of kept ids are
                written at the ids' places; with kept ids only.
        """
        multiply(hidden, weight.t(), logits)
        self.take_statistics(hidden, weight, bias, logits, rows, how, statistics, kept_logits)

    def new_kept_logits(self, rows: Rows) -> Optional[Tensor]:
        """Memory `[K]` for the logits of kept ids, where this backend wants them in backward."""
        return None

    @abstractmethod
    def take_statistics(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Optional[Tensor],
        logits: Tensor,
        rows: Rows,
        how: Logits,
        statistics: Tensor,
        kept_logits: Optional[Tensor],
    ) -> None:
        """Takes the statistics of projected rows; arguments as in :meth:`project_rows`.

        Where logits are not rounded, the target's one is computed from its operands, and takes
        the place of the projected one in the sum.
        """

    @abstractmethod
    def combine(self, statistics: Tensor, rows: Rows, how: Logits) -> Results:
        """Combines the parts of all ranks, in rank order.

        Args:
            statistics (Tensor): `[tp, fields, N]` fp32.
            rows (Rows): All N.
            how (Logits): See there.
        """

    @abstractmethod
    def grad_logits(
        self,
        logits: Tensor,
        bias: Optional[Tensor],
        rows: Rows,
        how: Logits,
        normalizers: Normalizers,
        grad_log_prob: Optional[Tensor],
        grad_entropy: Optional[Tensor],
        kept_logits: Optional[Tensor],
        dtype: torch.dtype,
    ) -> Tensor:
        """Turns projected rows into the gradient of the projection, in place.

        Args:
            logits (Tensor): `[n, v / tp]`, overwritten.
            bias, rows, how, kept_logits: As in :meth:`project_rows`.
            normalizers (Normalizers): Of these rows.
            grad_log_prob (Tensor, optional): `[n]` fp32.
            grad_entropy (Tensor, optional): `[n]` fp32.
            dtype (torch.dtype): Of the gradient.

        Returns:
            Tensor: `[n, v / tp]` of `dtype` in the memory of `logits`; rows may be further apart
                than their length.
        """


def choose_backend(impl: str, device: torch.device) -> RowBackend:
    """The backend of a name, or the best one for a device.

    Args:
        impl (str): `"auto"`, `"triton"` or `"torch"`.
        device (torch.device): Where the tensors are.

    Raises:
        ValueError: Triton was asked for and can't run there.
    """
    on_gpu = device.type == "cuda"
    if impl == "auto":
        impl = "triton" if on_gpu and _has_triton() else "torch"
    if impl == "triton":
        if not _has_triton():
            raise ValueError(
                "impl: got 'triton', which is not installed; install it or pass impl='auto'."
            )
        if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"impl: got 'triton' for tensors on {device}; pass impl='auto', or set "
                "TRITON_INTERPRET=1 before the first import to run its kernels on the CPU."
            )
    return _make_backend(impl)


@lru_cache(maxsize=None)
def _has_triton() -> bool:
    return find_spec("triton") is not None


@lru_cache(maxsize=None)
def _make_backend(impl: str) -> RowBackend:
    # Imported where it is chosen: neither needs the other's library.
    if impl == "triton":
        from megatron.core.fusions.linear_log_prob.triton_backend import TritonBackend

        return TritonBackend()
    from megatron.core.fusions.linear_log_prob.torch_backend import TorchBackend

    return TorchBackend()
