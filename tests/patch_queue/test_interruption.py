# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""A change that breaks off leaves the old tree or the new one, never something between."""

import errno

import pytest

from patch_queue.queue import Queue
from patch_queue.texts import QueueError
from patch_queue.trees import Files, Tree
from tests.patch_queue.trees import ROOT, contents


class _Killed(BaseException):
    """The process is gone: nothing that follows runs."""


class _FailingFiles(Files):
    """Fails the operation of the given number: once, or with all after it as if killed."""

    def __init__(self, number: int, killed: bool):
        self.number, self.killed, self.count = number, killed, 0

    def _reaches(self, name: str, arguments: tuple):
        self.count += 1
        if self.killed and self.count > self.number:
            raise _Killed
        if self.count == self.number:
            if name == "write" and arguments[1]:
                # A full disk takes a part.
                arguments[0].write_bytes(arguments[1][: len(arguments[1]) // 2])
            raise _Killed if self.killed else OSError(errno.ENOSPC, "No space left on device")


def _counted(name: str):
    def operation(self, *arguments, **keywords):
        self._reaches(name, arguments)
        return getattr(Files, name)(self, *arguments, **keywords)

    return operation


_OPERATIONS = [name for name in vars(Files) if not name.startswith("_")]
for _name in _OPERATIONS:
    setattr(_FailingFiles, _name, _counted(_name))


def _count_operations(tree, action) -> int:
    files = _FailingFiles(0, killed=False)
    action(Tree(tree, files))
    return files.count


def _ours_left_out(found):
    """Without what a run leaves behind that is no part of the tree."""
    return {
        path: data
        for path, data in found.items()
        if not path.startswith(".megatron-selective.") or path == ".megatron-selective.json"
    }


@pytest.fixture
def tree(tree, tmp_path):
    """What the patches touch and one file more: comparing a whole tree each time takes minutes."""
    small = tmp_path / "small"
    for path in [*Queue(ROOT).base("0.16.1").files, "megatron/core/package_info.py"]:
        (small / path).parent.mkdir(parents=True, exist_ok=True)
        (small / path).write_bytes((tree / path).read_bytes())
    return small


@pytest.mark.parametrize("killed", [False, True], ids=["error", "killed"])
@pytest.mark.parametrize("command", ["patch", "unpatch"])
def test_every_file_operation_fails_in_turn(tree, command, killed):
    """A full disk or a kill at any moment; the next run then does what was asked for."""
    queue = Queue(ROOT)
    upstream = contents(tree)
    queue.patch(Tree(tree))
    patched = contents(tree)
    old, new = (upstream, patched) if command == "patch" else (patched, upstream)
    act = getattr(queue, command)
    undo = queue.unpatch if command == "patch" else queue.patch
    if command == "patch":
        queue.unpatch(Tree(tree))
    total = _count_operations(tree, act)
    undo(Tree(tree))
    assert contents(tree) == old
    assert total > 20
    for number in range(1, total + 1):
        try:
            act(Tree(tree, _FailingFiles(number, killed)))
        except (QueueError, _Killed):
            if not killed:
                assert _ours_left_out(contents(tree)) == old, f"operation {number} of {total}"
        act(Tree(tree))
        assert contents(tree) == new, f"after operation {number} of {total}"
        undo(Tree(tree))
        assert contents(tree) == old, f"after operation {number} of {total}"


def test_edit_after_an_interruption_is_not_lost(tree):
    """What the user typed since is neither overwritten nor mixed with half a patch."""
    queue = Queue(ROOT)
    total = _count_operations(tree, queue.patch)
    queue.unpatch(Tree(tree))
    before = contents(tree)
    for number in range(total, 0, -1):
        with pytest.raises(_Killed):
            queue.patch(Tree(tree, _FailingFiles(number, killed=True)))
        if (
            contents(tree)["megatron/core/models/gpt/gpt_model.py"]
            != before["megatron/core/models/gpt/gpt_model.py"]
            and Tree(tree).journal.interrupted
        ):
            break
        queue.patch(Tree(tree))
        queue.unpatch(Tree(tree))
    path = tree / "megatron/core/models/gpt/gpt_model.py"
    path.write_text("typed since\n")
    with pytest.raises(QueueError, match="edited after an interrupted run"):
        queue.patch(Tree(tree))
    assert path.read_text() == "typed since\n"
