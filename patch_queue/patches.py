# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Patch files, and git, the only program that applies or makes one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence

from patch_queue.texts import QueueError, Text

# Path in a tree -> the bytes there, None where there is no such file.
Contents = Dict[str, Optional[bytes]]


def sha256(data: Optional[bytes]) -> Optional[str]:
    """The hex digest of a file's bytes; None for a file that is not there."""
    return None if data is None else hashlib.sha256(data).hexdigest()


def safe_path(path: str, where: str) -> str:
    """Refuses a path that leaves the tree; `where` says which file names it."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path:
        raise QueueError(Text.BAD_PATH.format(where=where, path=path))
    return path


def git(folder: Path, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess:
    """Runs git in `folder`, deaf to every repository around it and to the user's settings.

    Within a folder of another repository `git apply` skips every file and exits 0, hence the
    ceiling. A user's `core.autocrlf`, `apply.whitespace` or attributes would change the bytes,
    hence the empty home.
    """
    if shutil.which("git") is None:
        raise QueueError(Text.NO_GIT)
    folder = folder.resolve()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment.update(
        GIT_CEILING_DIRECTORIES=str(folder.parent),
        GIT_CONFIG_NOSYSTEM="1",
        GIT_ATTR_NOSYSTEM="1",
        HOME=os.devnull,
        XDG_CONFIG_HOME=os.devnull,
        LC_ALL="C",
    )
    return subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env=environment,
        input=stdin,
        capture_output=True,
        check=False,
    )


@dataclass(frozen=True)
class Patch:
    """One mbox patch: a header for people, then a diff."""

    name: str
    text: bytes

    @property
    def header(self) -> bytes:
        """Everything before the diff: From, Date, Subject, why."""
        return self.text[: self._diff_start]

    @property
    def diffs(self) -> Dict[str, bytes]:
        """The diff of each file, by path."""
        pieces = re.split(rb"^(?=diff --git )", self.text[self._diff_start :], flags=re.MULTILINE)
        return {self._path_of(piece): piece for piece in pieces if piece}

    @property
    def files(self) -> List[str]:
        """The paths that the patch touches."""
        return list(self.diffs)

    def blob_before(self, path: str) -> str:
        """git's name for the text of `path` that the patch was made against."""
        index = re.search(rb"^index ([0-9a-f]+)\.\.", self.diffs[path], flags=re.MULTILINE)
        return index.group(1).decode()

    def context(self, path: str) -> int:
        """How many lines of context the hunks of `path` have; a refreshed patch keeps as many."""
        context = 0
        for hunk in re.split(rb"^@@ .*\n", self.diffs.get(path, b""), flags=re.MULTILINE)[1:]:
            unchanged = [line.startswith(b" ") for line in hunk.splitlines()]
            leading = (unchanged + [False]).index(False)
            trailing = (unchanged[::-1] + [False]).index(False)
            context = max(context, leading, trailing)
        return context or 3

    @property
    def _diff_start(self) -> int:
        found = re.search(rb"^diff --git ", self.text, flags=re.MULTILINE)
        return found.start() if found else len(self.text)

    def _path_of(self, diff: bytes) -> str:
        line = diff.split(b"\n", 1)[0].decode()
        found = re.fullmatch(r"diff --git a/(.+) b/\1", line)
        return safe_path(found.group(1) if found else line, self.name)


class DoesNotFit(QueueError):
    """A hunk that `git apply` refused."""

    def __init__(self, patch: str, file: str, line: int) -> None:
        super().__init__(Text.DOES_NOT_FIT.format(patch=patch, file=file, line=line))
        self.line = line


@contextlib.contextmanager
def scratch(contents: Mapping[str, Optional[bytes]]) -> Iterator[Path]:
    """A temporary folder that holds the given files."""
    with tempfile.TemporaryDirectory(prefix="patch-queue-") as folder:
        root = Path(folder).resolve()
        for path, data in contents.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            if data is not None:
                (root / path).write_bytes(data)
        yield root


def read_file(path: Path) -> Optional[bytes]:
    """The bytes of a file, None if there is none."""
    return path.read_bytes() if path.is_file() else None


def apply_series(
    contents: Contents, patches: Sequence[Patch], reverse: bool = False
) -> List[Contents]:
    """Applies patches one after the other to files in memory.

    Args:
        contents: The text of every file that the patches touch.
        patches: In the order in which they are applied.
        reverse: Take each patch out instead.

    Returns:
        The contents before the first patch and after each one, so one more than there are patches.

    Raises:
        DoesNotFit: A hunk's context is not in the file. An offset is allowed, fuzz is not.
        QueueError: A patch went through without changing a file that it names.
    """
    stages = [dict(contents)]
    with scratch(contents) as folder:
        for patch in patches:
            options = ["--reverse"] if reverse else []
            run = git(folder, "apply", "--whitespace=nowarn", *options, "-", stdin=patch.text)
            if run.returncode:
                raise git_refusal(patch, run.stderr.decode(errors="replace"))
            after = {path: read_file(folder / path) for path in contents}
            for path in patch.files:
                if after.get(path) == stages[-1].get(path):
                    raise QueueError(Text.NO_CHANGE.format(patch=patch.name, file=path))
            stages.append(after)
    return stages


def git_refusal(patch: Patch, errors: str) -> DoesNotFit:
    """The hunk that git names in its messages."""
    found = re.search(r"^error: patch failed: (.+):(\d+)$", errors, flags=re.MULTILINE)
    if found:
        return DoesNotFit(patch.name, found.group(1), int(found.group(2)))
    # A missing file, or one that the patch wants to create: git names it, without a line.
    named = [path for path in patch.files if path in errors]
    return DoesNotFit(patch.name, (named or patch.files or [patch.name])[0], 1)


def make_diff(
    before: Contents, after: Contents, context: Callable[[str], int] = lambda path: 3
) -> bytes:
    """The diff between two sets of files, as `git format-patch --full-index` writes it."""
    diff = b""
    for path in sorted(path for path in {**before, **after} if before.get(path) != after.get(path)):
        # Two folders, called as git calls the two sides, need no repository.
        with scratch({f"a/{path}": before.get(path), f"b/{path}": after.get(path)}) as folder:
            options = ["--no-prefix", "--full-index", f"--unified={context(path)}", "--no-color"]
            diff += git(folder, "diff", "--no-index", *options, "a", "b").stdout
    return diff


def as_text(data: bytes) -> str:
    """Any bytes as text that JSON can hold; `as_bytes` gives them back."""
    return data.decode("utf-8", "surrogateescape")


def as_bytes(text: str) -> bytes:
    """The bytes that `as_text` was given."""
    return text.encode("utf-8", "surrogateescape")
