# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Trees: reading them, and writing all of a change or nothing."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Dict, Iterator, List, Optional

from patch_queue.patches import Contents, git, read_file, safe_path, sha256
from patch_queue.texts import QueueError, Text

CORE = "megatron/core"
VERSION_FILE = f"{CORE}/package_info.py"  # stamped when a wheel is built, so never patched
RECEIPT = ".megatron-selective.json"


class Files:
    """Every operation that changes a file of a tree. The tests let each one fail in turn."""

    def lock(self, path: Path) -> int:
        """Opens a lock file, which is made if need be."""
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    def write(self, path: Path, data: bytes, like: Optional[Path] = None) -> None:
        """Writes a new file, with the mode and owner of `like`, through to the disk."""
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if like is not None:
            shutil.copymode(like, path)
            if os.geteuid() == 0:
                os.chown(path, like.stat().st_uid, like.stat().st_gid)

    def replace(self, source: Path, target: Path) -> None:
        """Moves a file over another one."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """Removes a file."""
        path.unlink()

    def make_folder(self, path: Path) -> None:
        """Makes a folder."""
        path.mkdir()

    def remove_folder(self, path: Path) -> None:
        """Removes an empty folder."""
        path.rmdir()

    def remove_tree(self, path: Path) -> None:
        """Removes a folder with all that is in it."""
        shutil.rmtree(path)


def _not_written(root: Path, error: OSError) -> QueueError:
    return QueueError(Text.NOT_WRITTEN.format(path=root, error=error.strerror or error))


class Journal:
    """Changes files of a folder so that all of them change, or none does.

    New texts and backups are staged beside the tree first. `plan.json` appears when everything is
    staged and goes away when everything is written: its removal is the moment at which the change
    counts. As long as it is there, whoever comes next puts the backups back.
    """

    def __init__(self, root: Path, files: Files) -> None:
        self.root, self.files = root, files
        self.folder = root / ".megatron-selective.journal"
        self.plan = self.folder / "plan.json"

    @property
    def interrupted(self) -> bool:
        """Whether an earlier change was neither finished nor undone."""
        return self.plan.exists()

    def commit(self, changes: Contents) -> None:
        """Writes the given files; None removes one.

        Raises:
            QueueError: Something could not be written; the files are as they were before.
        """
        try:
            self._stage(changes)
            self._carry_out(changes)
        except BaseException as error:
            try:
                self.recover()
            except OSError as undo_error:
                text = Text.HALF_WRITTEN.format(path=self.root, error=error, undo_error=undo_error)
                raise QueueError(text) from error
            if isinstance(error, OSError):
                raise _not_written(self.root, error) from error
            raise
        # What is left if this fails has no plan.json; the next run sweeps it up.
        with contextlib.suppress(OSError):
            self.files.remove_tree(self.folder)

    def recover(self) -> None:
        """Undoes a change that was interrupted, if there is one."""
        if self.interrupted:
            plan = json.loads(self.plan.read_bytes())
            for number, (path, old, new) in enumerate(plan["files"]):
                self._put_back(safe_path(path, str(self.plan)), number, old, new)
            for path in reversed(plan["folders"]):
                if (self.root / path).is_dir() and not any((self.root / path).iterdir()):
                    self.files.remove_folder(self.root / path)
            self.files.remove(self.plan)
        if self.folder.exists():
            self.files.remove_tree(self.folder)

    def _stage(self, changes: Contents) -> None:
        if self.folder.exists():
            self.files.remove_tree(self.folder)
        self.files.make_folder(self.folder)
        plan = {"files": [], "folders": self._missing_folders(changes)}
        for number, (path, data) in enumerate(changes.items()):
            target = self.root / path
            old = read_file(target)
            if old is not None:
                self.files.write(self._backup(number), old, like=target)
            if data is not None:
                self.files.write(self._new(number), data, like=target if old is not None else None)
            plan["files"].append((path, sha256(old), sha256(data)))
        draft = self.folder / "plan.draft"
        self.files.write(draft, json.dumps(plan).encode())
        self.files.replace(draft, self.plan)

    def _carry_out(self, changes: Contents) -> None:
        for path in self._missing_folders(changes):
            self.files.make_folder(self.root / path)
        for number, (path, data) in enumerate(changes.items()):
            if data is not None:
                self.files.replace(self._new(number), self.root / path)
            elif (self.root / path).exists():
                self.files.remove(self.root / path)
                self._remove_emptied((self.root / path).parent)
        self.files.remove(self.plan)

    def _put_back(self, path: str, number: int, old: Optional[str], new: Optional[str]) -> None:
        target = self.root / path
        found = sha256(read_file(target))
        if found == old:
            return
        if found != new:
            raise QueueError(
                Text.EDITED_SINCE_INTERRUPTION.format(
                    path=target, backup=self._backup(number), journal=self.folder
                )
            )
        if old is None:
            self.files.remove(target)
        else:
            for folder in self._missing_folders({path: b""}):
                self.files.make_folder(self.root / folder)
            self.files.replace(self._backup(number), target)

    def _remove_emptied(self, folder: Path) -> None:
        """Removes a folder, and those above it, in which only Python's cache is left."""
        while folder != self.root and {entry.name for entry in folder.iterdir()} <= {"__pycache__"}:
            if (folder / "__pycache__").exists():
                self.files.remove_tree(folder / "__pycache__")
            self.files.remove_folder(folder)
            folder = folder.parent

    def _missing_folders(self, changes: Contents) -> List[str]:
        wanted = {
            parent.as_posix()
            for path, data in changes.items()
            if data is not None
            for parent in PurePosixPath(path).parents
        }
        return sorted(path for path in wanted if not (self.root / path).is_dir())

    def _backup(self, number: int) -> Path:
        return self.folder / f"{number}.old"

    def _new(self, number: int) -> Path:
        return self.folder / f"{number}.new"


@dataclass(frozen=True)
class Receipt:
    """What was done to a tree: enough to undo it, whatever has become of this repository since."""

    selective: int
    base: str
    state: str
    revision: str
    verified: bool  # whether the tree was one of the pins
    files: Dict[str, List[Optional[str]]]  # upstream's files: sha256 before and after
    overlay: Dict[str, str]  # the files that were added: sha256
    patches: List[Dict[str, str]]  # name and text of every patch, as applied
    undo: str  # all of them as one diff with exact line numbers
    format: int = 1

    @classmethod
    def from_bytes(cls, data: bytes, where: Path) -> Receipt:
        """Reads a receipt, and refuses one that names files outside the tree."""
        try:
            receipt = cls(**json.loads(data))
        except (TypeError, ValueError) as error:
            raise QueueError(Text.BAD_RECEIPT.format(path=where, error=error)) from error
        for path in (*receipt.files, *receipt.overlay):
            safe_path(path, str(where))
        return receipt

    def to_bytes(self) -> bytes:
        """The receipt as readable JSON."""
        return (json.dumps(asdict(self), indent=2) + "\n").encode()


class Tree:
    """A folder with upstream's files in it."""

    def __init__(self, path: os.PathLike | str, files: Optional[Files] = None) -> None:
        self.root = Path(path).expanduser().resolve()
        if not self.root.is_dir():
            raise QueueError(Text.NOT_A_FOLDER.format(path=path))
        self.files = files or Files()
        self.journal = Journal(self.root, self.files)
        self.lock_path = self.root / ".megatron-selective.lock"

    def read(self, path: str) -> Optional[bytes]:
        """The bytes of a file, None if there is none."""
        return read_file(self.root / path)

    def digest(self, path: str) -> Optional[str]:
        """The sha256 of a file, None if there is none."""
        return sha256(self.read(path))

    @property
    def receipt(self) -> Optional[Receipt]:
        """The receipt of whoever patched the tree last."""
        data = self.read(RECEIPT)
        return None if data is None else Receipt.from_bytes(data, self.root / RECEIPT)

    @property
    def version(self) -> str:
        """The version that the tree calls itself; it is not trusted for anything but messages."""
        text = (self.read(VERSION_FILE) or b"").decode(errors="replace")
        found = dict(
            re.findall(
                r"^(MAJOR|MINOR|PATCH|PRE_RELEASE) = ['\"]?([^'\"\n]*)", text, flags=re.MULTILINE
            )
        )
        numbers = ".".join(found.get(name, "?") for name in ("MAJOR", "MINOR", "PATCH"))
        return numbers + found.get("PRE_RELEASE", "")

    def describe(self) -> str:
        """The tree in a few words, for messages: `checkout 1dcf0da, 0.16.0rc0`."""
        commit = ""
        if (self.root / ".git").exists():
            commit = git(self.root, "rev-parse", "--short=7", "HEAD").stdout.decode().strip()
        return f"checkout {commit}, {self.version}" if commit else f"folder, {self.version}"

    def commit(self, changes: Contents) -> None:
        """Writes all of the given files or none; refuses links, which lead out of the tree."""
        for path in changes:
            for part in (PurePosixPath(path), *PurePosixPath(path).parents):
                if (self.root / part).is_symlink():
                    raise QueueError(Text.LINK.format(path=self.root / part))
        self.journal.commit(changes)

    @property
    def at_rest(self) -> bool:
        """Whether no run is at work on the tree, and none has left anything unfinished."""
        return not (self.journal.folder.exists() or self.lock_path.exists())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other runs out of the tree, and cleans up after one that was interrupted."""
        path = self.lock_path
        descriptor = self._take(path)
        try:
            try:
                self.journal.recover()
            except OSError as error:
                raise _not_written(self.root, error) from error
            yield
        finally:
            try:
                with contextlib.suppress(OSError):
                    self.files.remove(path)
            finally:
                os.close(descriptor)

    def _take(self, path: Path) -> int:
        while True:
            try:
                descriptor = self.files.lock(path)
            except OSError as error:
                raise _not_written(self.root, error) from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(Text.WAITING.format(path=self.root), file=sys.stderr)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The run that we waited for has removed its lock file: then nobody else looks at ours.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return descriptor
            os.close(descriptor)
