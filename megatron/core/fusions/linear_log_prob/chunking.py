# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""How rows are divided: what is projected at once, kept for backward and projected again."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Iterator, Tuple

# Bytes of logits that may exist whatever the budget is, less the row statistics.
CHUNK_BYTES = 2**28
_ROW_STATE_BYTES = 64
# With a larger budget the working memory may be this many times as large, and no larger: more
# saves less than the logits that it displaces.
_MAX_WORKING_CHUNKS = 3
# Rows and columns of a tile of a matrix product: what isn't a multiple leaves part of one idle.
_TILE_ROWS = 128
_TILE_COLUMNS = 256
_SLICES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Costs are in logits, the time in which one is projected: 2 h operations at 700 TFLOP/s.
# A gradient that is added to goes through memory, 8 bytes an element at 4 TB/s, h elements a row.
_PASS_COST = 700
# The start and the end of a matrix product leave part of the device idle for 20 microseconds.
_PRODUCT_COST_BY_HIDDEN_SIZE = 7e9


@dataclass(frozen=True)
class ChunkPlan:
    """Division of N rows of v / tp columns, the same with and without gradients.

    That makes results the same bits: a matrix product of another size may round otherwise.

    Backward works on tiles of the logits that are not kept, a block of rows by a slice of
    columns. Every block is a pass over the gradient of the weight, every slice one over that of
    the block's hidden states, which is much smaller where rows are fewer than the vocabulary.

    Attributes:
        num_rows (int): Number N of rows.
        kept_rows (int): Rows from the first on whose logits are kept for backward.
        chunk_rows (int): Rows that are projected at once in forward.
        block_rows (int): Rows of a tile.
        slice_columns (int): Columns of a tile.
    """

    num_rows: int
    kept_rows: int
    chunk_rows: int
    block_rows: int
    slice_columns: int

    def kept_chunks(self) -> Iterator[Tuple[int, int]]:
        """Ranges of rows that are projected at once and kept."""
        return _ranges(0, self.kept_rows, self.chunk_rows)

    def chunks(self) -> Iterator[Tuple[int, int]]:
        """Ranges of all rows that are projected at once, those that are kept first."""
        yield from self.kept_chunks()
        yield from _ranges(self.kept_rows, self.num_rows, self.chunk_rows)

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
    """Divides rows so that the logits in memory never exceed the budget or one small chunk.

    Args:
        num_rows (int): Number N of rows.
        row_bytes (int): Bytes that the logits of a row take.
        budget (int): Bytes for kept logits and the working memory together.
        columns (int): Columns v / tp.
        hidden_size (int): Hidden size h.
        itemsize (int): Bytes of a logit.

    Returns:
        ChunkPlan: All rows kept where they fit. Otherwise the budget is shared out between kept
            rows, which save a projection, and the working memory, whose size saves products and
            passes over the gradients, at the least cost.
    """
    unit = max(CHUNK_BYTES - num_rows * _ROW_STATE_BYTES, CHUNK_BYTES // 2, row_bytes)
    sizes = [i * unit for i in range(1, _MAX_WORKING_CHUNKS + 1) if i * unit <= budget]
    if not sizes:
        # No more than a 16-bit gradient of the weight would take: who returns one takes that.
        sizes = [max(min(unit, columns * hidden_size * 2), budget, row_bytes)]
    if num_rows * row_bytes <= budget:
        chunk_rows = _align(sizes[-1] // row_bytes, _TILE_ROWS)
        return ChunkPlan(num_rows, num_rows, chunk_rows, chunk_rows, columns)

    product_cost = _PRODUCT_COST_BY_HIDDEN_SIZE / hidden_size
    best = None
    for working_bytes in sizes:
        chunk_rows = _align(working_bytes // row_bytes, _TILE_ROWS)
        kept_rows = _align(max(budget - working_bytes, 0) // row_bytes, _TILE_ROWS)
        if kept_rows < num_rows // 2:
            # Less than half saves backward little, and smaller chunks cost every forward pass.
            kept_rows = 0
        again = num_rows - kept_rows
        for slices in _SLICES:
            slice_columns, bytes_a_row = columns, row_bytes
            if slices > 1:
                slice_columns = _ceil(_ceil(columns, slices), _TILE_COLUMNS) * _TILE_COLUMNS
                # Of several slices the gradient of hidden states is added up, in fp32.
                bytes_a_row = slice_columns * itemsize + hidden_size * 4
            block_rows = min(_align(working_bytes // bytes_a_row, _TILE_ROWS), again)
            if not block_rows or slice_columns > columns:
                continue
            blocks, slices_taken = _ceil(again, block_rows), _ceil(columns, slice_columns)
            passes = blocks * columns + (again * slices_taken if slices_taken > 1 else 0)
            products = _ceil(num_rows, chunk_rows) + 3 * blocks * slices_taken
            cost = again * columns + passes * _PASS_COST + products * product_cost
            if best is None or cost < best[0]:
                plan = ChunkPlan(num_rows, kept_rows, chunk_rows, block_rows, slice_columns)
                best = cost, plan
    return best[1]


def _ranges(start: int, end: int, step: int) -> Iterator[Tuple[int, int]]:
    for first in range(start, end, max(step, 1)):
        yield first, min(first + step, end)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _align(number: int, unit: int) -> int:
    """The largest multiple that is not larger, or the number itself below one unit."""
    return number - number % unit if number > unit else number
