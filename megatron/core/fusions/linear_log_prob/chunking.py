# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""How rows are divided: what is projected at once, kept for backward and projected again."""

from dataclasses import dataclass
from typing import Iterator, Tuple

# Logits that the working chunk may take whatever the budget is, less the row statistics.
CHUNK_BYTES = 2**28
_ROW_STATE_BYTES = 64
# Rows of a tile of the projection: a chunk that isn't a multiple leaves part of a wave idle.
_TILE_ROWS = 128
# Each part of backward reads and writes the fp32 weight gradient once, v * h * 8 bytes. At 4 TB/s
# and 700 TFLOP/s the projection of this many rows, 2 * v * h operations each, takes as long.
_PART_COST_ROWS = 700
# From here on a larger working chunk saves less than the logits it displaces.
_MAX_CHUNKS_A_PART = 3


@dataclass(frozen=True)
class ChunkPlan:
    """Division of N rows.

    The projection's chunks are the same with and without gradients and in recomputation, so that
    its results are the same bits: a matrix product of another size may round otherwise.

    Attributes:
        num_rows (int): Number N of rows.
        chunk_rows (int): Rows that are projected at once.
        kept_rows (int): Rows from the first on whose logits are kept, whole chunks or all.
        part_rows (int): Rows whose logits are projected again before backward uses them at once.
    """

    num_rows: int
    chunk_rows: int
    kept_rows: int
    part_rows: int

    def chunks(self, start: int, end: int) -> Iterator[Tuple[int, int]]:
        """The chunks of a range of rows that starts with a chunk."""
        for first in range(start, end, self.chunk_rows):
            yield first, min(first + self.chunk_rows, end)

    def parts(self) -> Iterator[Tuple[int, int]]:
        """What backward works on at once: the kept rows, then parts of the others."""
        if self.kept_rows:
            yield 0, self.kept_rows
        for first in range(self.kept_rows, self.num_rows, self.part_rows):
            yield first, min(first + self.part_rows, self.num_rows)


def plan_chunks(num_rows: int, row_bytes: int, budget: int) -> ChunkPlan:
    """Divides rows so that the logits in memory never exceed the budget or one chunk.

    Args:
        num_rows (int): Number N of rows.
        row_bytes (int): Bytes that the logits of a row take.
        budget (int): Bytes for kept logits and the working chunk together.

    Returns:
        ChunkPlan: All rows kept where they fit. Otherwise the budget is shared out between kept
            rows, which save a projection, and the working chunk, whose size saves passes over
            the weight gradient, at the least cost.
    """
    chunk_rows = max((CHUNK_BYTES - num_rows * _ROW_STATE_BYTES) // row_bytes, 1)
    if chunk_rows > _TILE_ROWS:
        chunk_rows -= chunk_rows % _TILE_ROWS
    if num_rows * row_bytes <= budget:
        return ChunkPlan(num_rows, chunk_rows, kept_rows=num_rows, part_rows=chunk_rows)

    chunks_in_budget = max(budget // (chunk_rows * row_bytes), 1)
    best_cost, best_plan = None, None
    for chunks in range(1, min(chunks_in_budget, _MAX_CHUNKS_A_PART) + 1):
        plan = ChunkPlan(
            num_rows,
            chunk_rows,
            kept_rows=(chunks_in_budget - chunks) * chunk_rows,
            part_rows=chunks * chunk_rows,
        )
        again = num_rows - plan.kept_rows
        cost = again - (-again // plan.part_rows) * _PART_COST_ROWS
        if best_cost is None or cost < best_cost:
            best_cost, best_plan = cost, plan
    return best_plan
