# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""How rows are divided: what is projected at once, kept for backward and projected again."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Iterator, Tuple

# Bytes that the working memory may take whatever the budget is, less the row statistics.
CHUNK_BYTES = 2**28
_ROW_STATE_BYTES = 64
# Rows and columns of a tile of a matrix product: what isn't a multiple leaves part of one idle.
_TILE_ROWS = 128
_TILE_COLUMNS = 256
# A gradient that is added to goes through memory, 8 bytes an element, at 4 TB/s, while a product
# does 2 operations at 700 TFLOP/s: reading and writing a row of h elements once takes as long as
# this many logits of a row take to project.
_PASS_COST = 700
# From here on, more working memory saves less than the logits that it displaces.
_MAX_WORKING_CHUNKS = 3
_SLICES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class ChunkPlan:
    """Division of N rows of v / tp columns.

    The projection's chunks are the same with and without gradients, so that its results are the
    same bits: a matrix product of another size may round otherwise.

    Backward works on tiles of the logits that are not kept, a block of rows by a slice of
    columns. Every block is a pass over the gradient of the weight, every slice one over that of
    the block's hidden states, which is much smaller where rows are fewer than the vocabulary.

    Attributes:
        num_rows (int): Number N of rows.
        chunk_rows (int): Rows that are projected at once.
        kept_rows (int): Rows from the first on whose logits are kept, whole chunks or all.
        block_rows (int): Rows of a tile.
        slice_columns (int): Columns of a tile.
    """

    num_rows: int
    chunk_rows: int
    kept_rows: int
    block_rows: int
    slice_columns: int

    def chunks(self) -> Iterator[Tuple[int, int]]:
        """Ranges of rows of the projection's chunks."""
        return _ranges(0, self.num_rows, self.chunk_rows)

    def kept_chunks(self) -> Iterator[Tuple[int, int]]:
        """Those of them that are kept."""
        return _ranges(0, self.kept_rows, self.chunk_rows)

    def blocks(self) -> Iterator[Tuple[int, int]]:
        """Ranges of rows of backward's tiles."""
        return _ranges(self.kept_rows, self.num_rows, self.block_rows)

    def slices(self, columns: int) -> Iterator[Tuple[int, int]]:
        """Ranges of columns of backward's tiles."""
        return _ranges(0, columns, self.slice_columns)

    @property
    def num_blocks(self) -> int:
        """What backward works on one after the other: the kept rows, then each block."""
        return (self.kept_rows > 0) + _ceil(self.num_rows - self.kept_rows, self.block_rows)


@lru_cache(maxsize=1024)
def plan_chunks(
    num_rows: int, row_bytes: int, budget: int, *, columns: int, hidden_size: int, itemsize: int
) -> ChunkPlan:
    """Divides rows so that the logits in memory never exceed the budget or the working memory.

    Args:
        num_rows (int): Number N of rows.
        row_bytes (int): Bytes that the logits of a row take.
        budget (int): Bytes for kept logits and the working memory together.
        columns (int): Columns v / tp.
        hidden_size (int): Hidden size h.
        itemsize (int): Bytes of a logit.

    Returns:
        ChunkPlan: All rows kept where they fit. Otherwise the budget is shared out between kept
            rows, which save a projection, and the working memory, whose size saves passes over
            the gradients, at the least cost.
    """
    working_bytes = max(CHUNK_BYTES - num_rows * _ROW_STATE_BYTES, row_bytes)
    chunk_rows = _align(working_bytes // row_bytes, _TILE_ROWS)
    if num_rows * row_bytes <= budget:
        return ChunkPlan(num_rows, chunk_rows, num_rows, chunk_rows, columns)

    chunks_in_budget = max(budget // (chunk_rows * row_bytes), 1)
    best = None
    for chunks in range(1, min(chunks_in_budget, _MAX_WORKING_CHUNKS) + 1):
        kept_rows = (chunks_in_budget - chunks) * chunk_rows
        again = num_rows - kept_rows
        for slices in _SLICES:
            slice_columns = columns
            # Of several slices the gradient of hidden states is added up, in fp32.
            bytes_a_row = row_bytes
            if slices > 1:
                slice_columns = _align(_ceil(columns, slices) + _TILE_COLUMNS - 1, _TILE_COLUMNS)
                bytes_a_row = slice_columns * itemsize + hidden_size * 4
            block_rows = _align(chunks * working_bytes // bytes_a_row, _TILE_ROWS)
            if not block_rows or slice_columns > columns:
                continue
            block_rows = min(block_rows, again)
            passes = _ceil(again, block_rows) * columns
            if slices > 1:
                passes += _ceil(columns, slice_columns) * again
            cost = again * columns + passes * _PASS_COST
            if best is None or cost < best[0]:
                best = cost, ChunkPlan(num_rows, chunk_rows, kept_rows, block_rows, slice_columns)
    return best[1]


def _ranges(start: int, end: int, step: int) -> Iterator[Tuple[int, int]]:
    for first in range(start, end, max(step, 1)):
        yield first, min(first + step, end)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _align(number: int, unit: int) -> int:
    """The largest multiple that is not larger, or the number itself below one unit."""
    return number - number % unit if number > unit else number
