# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Packs tool-use episodes into one sequence, with the target and the loss weight of every row."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import List

END_OF_TEXT = 151643


@dataclass
class Episode:
    """One line of episodes.jsonl.

    Attributes:
        name: What the episode is about.
        reward: 1 where the task was solved, else 0.
        tokens: Token ids of the whole conversation, tool output included.
        loss_mask: 1 where the model wrote the token, else 0; as long as `tokens`.
    """

    name: str
    reward: int
    tokens: List[int]
    loss_mask: List[int]


@dataclass
class PackedSequence:
    """Episodes end to end. Lists have one entry a row, T in all; row t predicts a token.

    Attributes:
        tokens: Token ids that the model reads.
        positions: Position of each token in its episode.
        boundaries: Cumulated lengths, from 0 to T; attention stays between two neighbours.
        targets: Token id that row t predicts, that is token t + 1 of the same episode.
        trained: Whether the model wrote that token, so that row t is trained.
        advantages: Reward of row t's episode above the pack's mean reward.
    """

    tokens: List[int]
    positions: List[int]
    boundaries: List[int]
    targets: List[int]
    trained: List[bool]
    advantages: List[float]

    @property
    def trained_share(self) -> float:
        """Share of the rows that are trained, between 0 and 1."""
        return sum(self.trained) / len(self.trained)


def load_episodes(path: Path) -> List[Episode]:
    """Reads a file as data/make_episodes.py writes it."""
    with path.open(encoding="utf-8") as lines:
        return [Episode(**json.loads(line)) for line in lines]


def choose_episodes(episodes: List[Episode], budget: int) -> List[Episode]:
    """Takes every episode, in order, that still fits into `budget` tokens."""
    chosen, total = [], 0
    for episode in episodes:
        if total + len(episode.tokens) <= budget:
            chosen.append(episode)
            total += len(episode.tokens)
    return chosen


def pack(episodes: List[Episode], multiple: int) -> PackedSequence:
    """Packs episodes end to end and pads the end to a multiple of `multiple` tokens."""
    packed = PackedSequence([], [], [0], [], [], [])
    mean_reward = sum(episode.reward for episode in episodes) / len(episodes)
    for episode in episodes:
        length = len(episode.tokens)
        packed.tokens += episode.tokens
        packed.positions += range(length)
        packed.boundaries.append(len(packed.tokens))
        # The last row has nothing to predict: an end of text stands in, and is never trained.
        packed.targets += episode.tokens[1:] + [END_OF_TEXT]
        packed.trained += [bool(written) for written in episode.loss_mask[1:]] + [False]
        packed.advantages += [episode.reward - mean_reward] * length
    padding = -len(packed.tokens) % multiple
    if padding:
        packed.tokens += [END_OF_TEXT] * padding
        packed.positions += range(padding)
        packed.boundaries.append(len(packed.tokens))
        packed.targets += [END_OF_TEXT] * padding
        packed.trained += [False] * padding
        packed.advantages += [0.0] * padding
    return packed


def rows_at_share(packed: PackedSequence, share: float) -> List[bool]:
    """Marks the given share of the rows, trained rows first, so that runs stay runs.

    Args:
        packed: The packed sequence of T rows.
        share: Wanted share, between 0 and 1. Above the sequence's own share, rows that are not
            trained are added; below it, the last trained rows are left out.

    Returns:
        One bool a row, round(share * T) of them true.
    """
    total = len(packed.trained)
    order = sorted(range(total), key=lambda row: not packed.trained[row])
    marked = [False] * total
    for row in order[: round(share * total)]:
        marked[row] = True
    return marked
