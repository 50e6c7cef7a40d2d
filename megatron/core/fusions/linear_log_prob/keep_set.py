# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Top-p and top-k replay: the vocabulary ids that each row's sampler kept, as a ragged list."""

from dataclasses import dataclass

import torch
from torch import Tensor

_INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class KeepSet:
    """The ids over which the log-probability of each row is normalised.

    A sampler that drew from the top-p or top-k part of a distribution gave a token the
    probability that it has within that part. Row n keeps `ids[offsets[n]:offsets[n + 1]]`, in any
    order, duplicates counting once; its target is always kept, whether it is listed or not.

    Args:
        offsets (Tensor): `[N + 1]`, an integer type, from 0 to `len(ids)`, never falling.
        ids (Tensor): `[K]`, an integer type, ids of the whole vocabulary, the same on every
            tensor-parallel rank.
        empty (str): What a row without ids means: `"unmasked"`, its whole vocabulary, or
            `"target"`, its target alone, whose log-probability is then 0.
        entropy (bool): Whether the entropy is that of the kept part, too. By default it is that
            of the whole distribution.
    """

    offsets: Tensor
    ids: Tensor
    empty: str = "unmasked"
    entropy: bool = False


@dataclass(frozen=True)
class KeptIds:
    """A :class:`KeepSet` as the row kernels read it.

    Attributes:
        starts (Tensor): `[N]` int64, where each row's ids start.
        ends (Tensor): `[N]` int64, where they end; before the start in a row whose offsets are
            malformed, which makes its results NaN.
        ids (Tensor): `[K]` int64, ascending within a row, 2^31 - 1 where an id can't be one.
        masks_empty (bool): Whether rows without ids keep their target alone.
        entropy (bool): Whether the entropy is over the kept ids.
    """

    starts: Tensor
    ends: Tensor
    ids: Tensor
    masks_empty: bool
    entropy: bool

    def rows(self, start: int, end: int) -> "KeptIds":
        """The same for a range of rows."""
        return KeptIds(
            self.starts[start:end], self.ends[start:end], self.ids, self.masks_empty, self.entropy
        )

    def take(self, rows: Tensor, num_rows: int) -> "KeptIds":
        """The same for the rows of an index `[M]`, then unmasked ones up to `num_rows`."""
        padding = (0, num_rows - rows.numel())
        starts = torch.nn.functional.pad(self.starts.index_select(0, rows), padding)
        ends = torch.nn.functional.pad(self.ends.index_select(0, rows), padding)
        return KeptIds(starts, ends, self.ids, self.masks_empty, self.entropy)


_NO_ID = 2**31 - 1


def prepare_keep_set(keep: KeepSet) -> KeptIds:
    """Sorts the ids of a keep set within their rows. Waits for no device.

    Args:
        keep (KeepSet): As checked by :func:`check_keep_set`.

    Returns:
        KeptIds: On the device of the keep set.
    """
    offsets, ids = keep.offsets.long(), keep.ids.long()
    starts, ends = offsets[:-1], offsets[1:]
    malformed = (starts < 0) | (ends > ids.numel()) | (starts > ends)
    starts = starts.masked_fill(malformed, 0)
    ends = ends.masked_fill(malformed, -1)
    # One sort of (row, id) pairs: neighbours then show duplicates.
    position = torch.arange(ids.numel(), device=ids.device)
    row = torch.searchsorted(offsets.contiguous(), position, right=True)
    possible = (ids >= 0) & (ids < _NO_ID)
    pairs = (row << 32) | ids.masked_fill(~possible, _NO_ID)
    ids = pairs.sort().values & 0xFFFFFFFF
    return KeptIds(starts, ends, ids, keep.empty == "target", keep.entropy)


def check_keep_set(keep: KeepSet, num_rows: int, device: torch.device) -> None:
    """Checks what can be seen of a keep set without waiting for its device.

    Args:
        keep (KeepSet): As the caller gave it.
        num_rows (int): Number N of rows that it has to cover.
        device (torch.device): Where it has to be.

    Raises:
        TypeError: It isn't a :class:`KeepSet` of integer tensors.
        ValueError: Shapes, devices or `empty` don't fit.
    """
    if not isinstance(keep, KeepSet):
        raise TypeError(
            f"keep: got {type(keep).__name__}, expected a KeepSet of ragged ids; of a mask [N, V] "
            "make one by offsets = pad(mask.sum(1).cumsum(0), (1, 0)), ids = mask.nonzero()[:, 1]."
        )
    for name, tensor in (("offsets", keep.offsets), ("ids", keep.ids)):
        if not isinstance(tensor, Tensor) or tensor.dtype not in _INTEGER_DTYPES:
            found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"keep.{name}: got {found}, expected an integer tensor.")
        if tensor.dim() != 1:
            raise ValueError(
                f"keep.{name}: got shape {list(tensor.shape)}, expected one dimension."
            )
        if tensor.device != device:
            raise ValueError(
                f"keep.{name}: is on {tensor.device}, expected {device}; move it there."
            )
    if keep.offsets.numel() != num_rows + 1:
        raise ValueError(
            f"keep.offsets: got {keep.offsets.numel()} entries, expected N + 1 = {num_rows + 1}, "
            "one for the start of each row and the end of the last."
        )
    if keep.empty not in ("unmasked", "target"):
        raise ValueError(f"keep.empty: got {keep.empty!r}, expected 'unmasked' or 'target'.")
    if not isinstance(keep.entropy, bool):
        raise TypeError(f"keep.entropy: got {keep.entropy!r}, expected True or False.")


def check_keep_set_values(keep: KeepSet, vocab_size: int) -> None:
    """Checks offsets and ids by value, which waits for their device.

    Args:
        keep (KeepSet): As checked by :func:`check_keep_set`.
        vocab_size (int): Size of the whole vocabulary.

    Raises:
        ValueError: Offsets don't run from 0 to the number of ids, or an id is no id.
    """
    offsets, ids = keep.offsets.long(), keep.ids
    if offsets[0] != 0 or offsets[-1] != ids.numel() or bool((offsets.diff() < 0).any()):
        raise ValueError(
            f"keep.offsets: must rise from 0 to the number of ids, {ids.numel()}, and never fall; "
            f"got {offsets[0].item()} to {offsets[-1].item()}, smallest step "
            f"{offsets.diff().min().item() if offsets.numel() > 1 else 0}."
        )
    if ids.numel() and (ids.min() < 0 or ids.max() >= vocab_size):
        raise ValueError(
            f"keep.ids: got ids from {ids.min().item()} to {ids.max().item()}, expected 0 to "
            f"{vocab_size - 1}; give ids of the whole vocabulary, not of a rank's part."
        )
