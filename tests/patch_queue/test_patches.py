# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The patch files and the overlay: budget, headers, and what they may touch."""

import re
from pathlib import Path

import pytest
from unidiff import PatchSet

ROOT = Path(__file__).resolve().parents[2]
SERIES = [
    path.parent / name
    for path in sorted((ROOT / "patches").glob("*/series"))
    for name in path.read_text().split()
]
# Added and removed lines; gpt_model.py also carries the argument's documentation twice.
LINES_A_FILE, LINES_OF_A_LARGE_FILE, LINES_A_BASE = 30, 55, 120
LARGE_FILES = ("gpt_model.py", "hybrid_model.py")


def _changed_lines(patches):
    counts = {}
    for patch in patches:
        for file in PatchSet(patch.read_text()):
            counts[file.path] = counts.get(file.path, 0) + file.added + file.removed
    return counts


@pytest.mark.parametrize("base", sorted({path.parent.name for path in SERIES}))
def test_hunks_stay_within_their_budget(base):
    counts = _changed_lines([path for path in SERIES if path.parent.name == base])
    for file, lines in counts.items():
        large = Path(file).name in LARGE_FILES
        assert lines <= (LINES_OF_A_LARGE_FILE if large else LINES_A_FILE), file
    assert sum(counts.values()) <= LINES_A_BASE


@pytest.mark.parametrize("patch", SERIES, ids=lambda path: path.name)
def test_patch_says_why_and_names_whole_blobs(patch):
    text = patch.read_text()
    header = text.partition("\ndiff --git ")[0]
    for field in ("Subject", "Forwarded", "Applies-To", "Last-Update"):
        assert re.search(rf"^{field}: \S", header, re.MULTILINE), field
    assert re.findall(r"^index .*$", text, re.MULTILINE)
    for line in re.findall(r"^index .*$", text, re.MULTILINE):
        assert re.match(r"index [0-9a-f]{40}\.\.[0-9a-f]{40}", line), line
    assert all(file.path.startswith("megatron/core/") for file in PatchSet(text))


def test_every_patch_is_in_a_series():
    assert sorted(SERIES) == sorted((ROOT / "patches").glob("*/*.patch"))


@pytest.mark.parametrize("namespace", ["megatron", "megatron/core"])
def test_overlay_does_not_hide_megatron(namespace):
    assert (ROOT / namespace).is_dir()
    assert not (ROOT / namespace / "__init__.py").exists()
