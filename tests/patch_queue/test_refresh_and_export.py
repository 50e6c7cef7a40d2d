# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""From an edited tree back to patches, and from patches to what upstream gets."""

import shutil
import subprocess

import pytest

from patch_queue.build_tree import pristine
from patch_queue.export import export
from patch_queue.queue import Queue
from patch_queue.refresh import refresh, relock
from patch_queue.texts import QueueError
from patch_queue.trees import Tree
from tests.patch_queue.trees import GPT_MODEL, ROOT, SELECTOR, contents, edit


@pytest.fixture
def repository(tmp_path):
    """A copy of this repository's queue, to be written to."""
    copy = tmp_path / "repository"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("patches", "megatron", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    return copy


def test_refresh_of_a_fresh_tree_changes_no_byte(tree, repository):
    queue = Queue(repository)
    queue.patch(Tree(tree))
    before, patched = contents(repository), contents(tree)
    assert "nothing to do" in refresh(queue, Tree(tree), pristine)
    assert contents(repository) == before and contents(tree) == patched


def test_lock_is_what_the_patches_give(repository):
    queue = Queue(repository)
    base = queue.base("0.16.1")
    before = contents(repository)
    assert "nothing to do" in relock(queue, base, "upstream", pristine(base).get)
    assert contents(repository) == before


def test_edits_go_back_to_their_patch_and_to_the_overlay(tree, repository):
    """The text of a hunk, a new hunk, and a file of ours; a new tree then has all of them."""
    queue = Queue(repository)
    queue.patch(Tree(tree))
    edit(tree / GPT_MODEL, "as Float16Module.forward does", "as Float16Module does")
    edit(tree / GPT_MODEL, "    def set_input_tensor(", "    # new\n    def set_input_tensor(")
    edit(tree / SELECTOR, "class OutputRowSelector:", "class OutputRowSelector(object):")
    edited = contents(tree)
    refresh(queue, Tree(tree), pristine)
    assert b"as Float16Module does" in next((repository / "patches/0.16.1").glob("0004*")).read_bytes()
    again = Queue(repository)
    again.unpatch(Tree(tree))
    again.patch(Tree(tree))
    assert contents(tree)[GPT_MODEL] == edited[GPT_MODEL]
    assert contents(tree)[SELECTOR] == edited[SELECTOR]


def test_edit_of_a_file_that_no_patch_touches_needs_a_name(tree, repository):
    queue = Queue(repository)
    queue.patch(Tree(tree))
    edit(tree / "megatron/core/utils.py", "import array", "import array  # mine")
    before = contents(repository)
    with pytest.raises(QueueError, match="--into NAME"):
        refresh(queue, Tree(tree), pristine)
    assert contents(repository) == before
    name = queue.base("0.16.1").patches[0].name
    refresh(queue, Tree(tree), pristine, into=name)
    assert "megatron/core/utils.py" in Queue(repository).base("0.16.1").files


def test_export_is_taken_by_git_am(tree, tmp_path, setup_py):
    """Upstream's maintainers apply it with `git am`, and get the tree that we test."""
    git = ["git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git[:3], "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "upstream"], check=True)
    folder = tmp_path / "series"
    assert setup_py("export", folder).returncode == 0
    letters = sorted(map(str, folder.glob("*.patch")))
    subprocess.run([*git, "am", "-q", *letters], check=True)
    made = contents(tree)
    for path, data in Queue(ROOT).overlay().items():
        header, rest = made[path].split(b"\n", 1)
        assert b"NVIDIA CORPORATION" in header and rest == data.split(b"\n", 1)[1], path
    subprocess.run([*git[:3], "checkout", "-q", "HEAD~" + str(len(letters))], check=True)
    assert setup_py("patch", tree).returncode == 0
    assert made[GPT_MODEL] == (tree / GPT_MODEL).read_bytes()
    again = setup_py("export", folder)
    assert again.returncode == 1 and "is not empty" in again.stderr
