# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The patch queue: what it knows of a Megatron tree, and everything it does to one.

A *base* is an upstream version that `patches/lock.json` pins. A *series* is the list of mbox patches against it, the
*overlay* is this repository's own `megatron/` folder. A *tree* is a folder with upstream's files in it: an unpacked
sdist, a checkout, or the tree that a wheel is built from. All of them are patched by the same code.

A tree is recognised by the sha256 of the files that the patches touch, never by its version string. Patches are
applied to a scratch copy by `git apply`, the result is compared with the lock, and only then written, through a
journal that brings the old tree back if anything fails. A receipt in the tree holds all that taking the patches out
again needs.

This module is used by `setup.py` and by the tests. It is never installed, and needs only the standard library and git.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

Contents = Dict[
    str, Optional[bytes]
]  # path in the tree -> its bytes, None where there is no such file

CORE = "megatron/core"
VERSION_FILE = f"{CORE}/package_info.py"  # stamped when a wheel is built, so never patched
RECEIPT = ".megatron-selective.json"
OUR_COPYRIGHT = (
    b"# Copyright (c) 2026, the megatron-core-selective authors."
    b" Licensed under the Apache License, Version 2.0.\n"
)
UPSTREAM_COPYRIGHT = b"# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.\n"


class QueueError(Exception):
    """Something the user has to know and can act upon; its text is the whole message."""


class Text:
    """What the queue says. Kept in one place so that the texts can be read, and tested, together."""

    NOT_A_FOLDER = "{path} is not a folder."
    NOT_A_TREE = "{path} holds none of the files that the patches touch ({files}). Is it the root of a Megatron tree?"
    NO_GIT = (
        "git not found; it is needed to apply patches. Install git, or install a prebuilt wheel."
    )
    BAD_PATH = "{where} names {path}, which is outside the tree. Not patching."
    BAD_RECEIPT = "{path} can't be read as a receipt ({error}). Restore it, or the tree."
    LINK = "{path} is a symbolic link; the file behind it would be replaced. Nothing was written."
    NOT_WRITTEN = "can't write in {path}: {error}. It is as it was before."
    HALF_WRITTEN = (
        "can't write in {path}: {error}; undoing what was written failed as well: {undo_error}. Run the command again"
        " once that is mended: it first brings the old files back."
    )
    EDITED_SINCE_INTERRUPTION = (
        "{path} was edited after an interrupted run. Its old text is {backup}; put back the text that you want, then"
        " delete {journal}."
    )
    WAITING = "waiting for another run on {path} ..."

    PATCHED = "patched {path} with selective {selective} ({base}): {patches} patches, {overlay} files added"
    UNVERIFIED = "; UNVERIFIED, this tree is not {base}: every hunk fitted and the files compile, nothing else is known"
    ALREADY = "already patched with selective {selective}, nothing to do"
    ALREADY_KEPT = (
        "already patched with selective {selective}, later edits kept ({files}), nothing to do"
    )
    OTHER = "{path} holds selective {theirs}, this is {ours}: run unpatch first (python setup.py unpatch {path})."
    OTHER_PATCHES = (
        "{path} holds selective {theirs} of other patches than this repository's: run unpatch first"
        " (python setup.py unpatch {path})."
    )
    EDITED = (
        "{path} was edited since patching: {files}; use --keep to leave it so, or restore the files (unpatch takes the"
        " patches out and keeps other edits)."
    )
    DOES_NOT_FIT = "{patch} does not fit {file} near line {line}"
    DRIFT = (
        "{refusal} ({tree}). Nothing was written. Pins: {pins}."
        " Run `python setup.py patch --show-conflict {path}`."
    )
    UNKNOWN = (
        "{file}{line} is not what {base} has there ({tree}). Nothing was written. Pins: {pins}."
        " Every hunk fits: `python setup.py patch --unverified {path}` applies them all the same."
    )
    CRLF = (
        "{file} has CRLF line ends, {base} has LF ({tree}). Nothing was written."
        " `git config core.autocrlf false`, then check out again."
    )
    STALE_LOCK = (
        "lock.json does not list the files that the series of {base} touches."
        " Run `python setup.py refresh --lock --base {base}`."
    )
    NO_COMPILE = "{file}:{line} does not compile after patching: {error}. Nothing was written."
    NO_CHANGE = "{patch} changed no file: hash of {file} is still upstream's. Nothing was written."
    WRONG_RESULT = (
        "{file} has sha256 {found} after the patches, lock.json says {wanted}. Nothing was written. If the patches were"
        " edited on purpose, run `python setup.py refresh --lock`."
    )
    OVERLAY_EXISTS = "{file} exists in {path} already and is not ours. Nothing was written."
    NO_CONFLICT = "every patch fits {path}."

    NOT_PATCHED = "{path} is not patched (there is no receipt in it), nothing to do"
    UNPATCHED = (
        "took selective {selective} out of {path}: {files} files restored, {overlay} removed"
    )
    UNPATCHED_KEPT = "; later edits kept in {kept}."
    UNPATCH_CONFLICT = (
        "{file} was edited near line {line} since patching, where our change is. Nothing was written. Take that edit"
        " back, then run unpatch again."
    )
    UNPATCH_WRONG = (
        "taking the patches out of {file} does not give upstream's text. Nothing was written."
    )
    OVERLAY_EDITED = (
        "{files} came with the patches and was edited since; unpatch would delete it. Nothing was written."
        " --keep leaves it in the tree."
    )

    STATUS_PATCHED = "patched with selective {selective}, base {base} ({revision})."
    STATUS_UNVERIFIED = " UNVERIFIED: before that it was none of the pins ({pins})."
    STATUS_INCOMPLETE = "patched with selective {selective}, but {files} is missing or differs."
    STATUS_EDITED = "patched with selective {selective}, base {base}; edited since: {files}."
    STATUS_UPSTREAM = "not patched, it is {base} ({revision}) as upstream made it."
    STATUS_RESTORED = "not patched any more, upstream's files were put back."
    STATUS_UNKNOWN = "unknown, {files} match none of the pins ({pins})."
    STATUS_INTERRUPTED = "half patched, a run was interrupted."
    ADVICE_PATCH = " Run `python setup.py patch {path}`."
    ADVICE_INSTALL = " Run `pip install .` in {root}."
    NOT_INSTALLED = "megatron.core is not installed for {python}. Run `pip install .` in {root}."
    COMES_FROM = "megatron.core comes from {tree} ({how}), {version}"
    SHADOWED = "; the installed {installed} is not used"

    NO_SUCH_BASE = "there is no base {name!r} in lock.json. Pins: {pins}."
    NO_SUCH_PATCH = "there is no patch {name!r} in the series of {base}: {names}."
    NO_PATCH_FOR = (
        "{file} was edited, and no patch touches it. Name the patch it belongs to: --into NAME."
    )
    INTO_CONFLICT = "the edit of {file} does not fit the text that {patch} sees. Name a later patch with --into."
    NOT_ITS_UPSTREAM = "{file} as upstream has it is not what {path} was patched from."
    REFRESH_UNVERIFIED = (
        "{path} was patched with --unverified; refresh needs a tree that was {base}."
    )
    OVERLAY_CONFLICT = "{file} was edited both in {path} and here. Bring the two together first."
    EMPTY_PATCH = "{patch} would be empty. Take it out of the series, then run refresh again."
    REFRESHED = "refreshed {files}"
    NOTHING_NEW = (
        "the patches, the overlay and lock.json say already what {path} holds, nothing to do"
    )
    SHARED = "\n{patch} is also in the series of {base}: run `python setup.py refresh --lock --base {base}`."
    STRAY = "\nnot taken over, because neither upstream nor the overlay has it: {files}"
    EXPORT_EXISTS = "{path} is not empty."
    EXPORTED = "wrote {count} patches to {path}: git am {path}/*.patch"


def sha256(data: Optional[bytes]) -> Optional[str]:
    """The hex digest of a file's bytes; None for a file that is not there."""
    return None if data is None else hashlib.sha256(data).hexdigest()


def _safe_path(path: str, where: str) -> str:
    """Refuses a path that leaves the tree; `where` says which file names it."""
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path:
        raise QueueError(Text.BAD_PATH.format(where=where, path=path))
    return path


# ---------------------------------------------------------------------------------------------------------------------
# git: the only program that applies or makes a patch
# ---------------------------------------------------------------------------------------------------------------------


def _git(folder: Path, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess:
    """Runs git in `folder`, deaf to every repository around it and to the user's settings.

    Within a folder of another repository `git apply` skips every file and exits 0, hence the ceiling. A user's
    `core.autocrlf`, `apply.whitespace` or attributes would change the bytes, hence the empty home.
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
        return (
            re.search(rb"^index ([0-9a-f]+)\.\.", self.diffs[path], flags=re.MULTILINE)
            .group(1)
            .decode()
        )

    def context(self, path: str) -> int:
        """How many lines of context the hunks of `path` have, so that a refreshed patch keeps as many."""
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
        return _safe_path(found.group(1) if found else line, self.name)


class DoesNotFit(QueueError):
    """A hunk that `git apply` refused."""

    def __init__(self, patch: str, file: str, line: int) -> None:
        super().__init__(Text.DOES_NOT_FIT.format(patch=patch, file=file, line=line))
        self.line = line


@contextlib.contextmanager
def _scratch(contents: Mapping[str, Optional[bytes]]) -> Iterator[Path]:
    """A temporary folder that holds the given files."""
    with tempfile.TemporaryDirectory(prefix="patch-queue-") as folder:
        root = Path(folder).resolve()
        _write_all(root, contents)
        yield root


def _write_all(root: Path, contents: Mapping[str, Optional[bytes]]) -> None:
    for path, data in contents.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        if data is not None:
            (root / path).write_bytes(data)


def _read(path: Path) -> Optional[bytes]:
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
    with _scratch(contents) as folder:
        for patch in patches:
            options = ["--reverse"] if reverse else []
            run = _git(folder, "apply", "--whitespace=nowarn", *options, "-", stdin=patch.text)
            if run.returncode:
                raise _refusal(patch, run.stderr.decode(errors="replace"))
            after = {path: _read(folder / path) for path in contents}
            for path in patch.files:
                if after.get(path) == stages[-1].get(path):
                    raise QueueError(Text.NO_CHANGE.format(patch=patch.name, file=path))
            stages.append(after)
    return stages


def _refusal(patch: Patch, errors: str) -> DoesNotFit:
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
        with _scratch({f"a/{path}": before.get(path), f"b/{path}": after.get(path)}) as folder:
            options = ["--no-prefix", "--full-index", f"--unified={context(path)}", "--no-color"]
            diff += _git(folder, "diff", "--no-index", *options, "a", "b").stdout
    return diff


# ---------------------------------------------------------------------------------------------------------------------
# Trees: reading them, and writing all of a change or nothing
# ---------------------------------------------------------------------------------------------------------------------


class Files:
    """Every operation that changes a file of a tree. The tests let each one fail in turn."""

    def lock(self, path: Path) -> int:
        """Opens a lock file, which is made if need be."""
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    def write(self, path: Path, data: bytes, like: Optional[Path] = None) -> None:
        """Writes a new file, with the mode and owner of `like`, and waits until it is on the disk."""
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


class Journal:
    """Changes files of a folder so that all of them change, or none does.

    New texts and backups are staged beside the tree first. `plan.json` appears when everything is staged and goes away
    when everything is written: its removal is the moment at which the change counts. As long as it is there, whoever
    comes next puts the backups back.
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
                raise QueueError(
                    Text.NOT_WRITTEN.format(path=self.root, error=error.strerror)
                ) from error
            raise
        with contextlib.suppress(
            OSError
        ):  # what is left has no plan.json, the next run sweeps it up
            self.files.remove_tree(self.folder)

    def recover(self) -> None:
        """Undoes a change that was interrupted, if there is one."""
        if self.interrupted:
            plan = json.loads(self.plan.read_bytes())
            for number, (path, old, new) in enumerate(plan["files"]):
                self._put_back(_safe_path(path, str(self.plan)), number, old, new)
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
            old = _read(target)
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
        found = sha256(_read(target))
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
            _safe_path(path, str(where))
        return receipt

    def to_bytes(self) -> bytes:
        """The receipt as readable JSON."""
        return (json.dumps(asdict(self), indent=2) + "\n").encode()


def _as_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


class Tree:
    """A folder with upstream's files in it."""

    def __init__(self, path: os.PathLike | str, files: Optional[Files] = None) -> None:
        self.root = Path(path).expanduser().resolve()
        if not self.root.is_dir():
            raise QueueError(Text.NOT_A_FOLDER.format(path=path))
        self.files = files or Files()
        self.journal = Journal(self.root, self.files)

    def read(self, path: str) -> Optional[bytes]:
        """The bytes of a file, None if there is none."""
        return _read(self.root / path)

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
            commit = _git(self.root, "rev-parse", "--short=7", "HEAD").stdout.decode().strip()
        return f"checkout {commit}, {self.version}" if commit else f"folder, {self.version}"

    def commit(self, changes: Contents) -> None:
        """Writes all of the given files or none. Symbolic links are refused: they lead out of the tree."""
        for path in changes:
            for part in (PurePosixPath(path), *PurePosixPath(path).parents):
                if (self.root / part).is_symlink():
                    raise QueueError(Text.LINK.format(path=self.root / part))
        self.journal.commit(changes)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other runs out of the tree, and cleans up after one that was interrupted."""
        path = self.root / ".megatron-selective.lock"
        descriptor = self._take(path)
        try:
            try:
                self.journal.recover()
            except OSError as error:
                raise QueueError(
                    Text.NOT_WRITTEN.format(path=self.root, error=error.strerror)
                ) from error
            yield
        finally:
            with contextlib.suppress(OSError):
                self.files.remove(path)
            os.close(descriptor)

    def _take(self, path: Path) -> int:
        while True:
            try:
                descriptor = self.files.lock(path)
            except OSError as error:
                raise QueueError(
                    Text.NOT_WRITTEN.format(path=self.root, error=error.strerror)
                ) from error
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(Text.WAITING.format(path=self.root), file=sys.stderr)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The run that we waited for has removed its lock file: then we hold a lock that nobody else looks at.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return descriptor
            os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------------------
# The queue: bases, series, overlay, and what they make of a tree
# ---------------------------------------------------------------------------------------------------------------------

Pristine = Mapping[str, bytes]  # upstream's own files, by path


@dataclass(frozen=True)
class Base:
    """An upstream version that the lock pins."""

    name: str
    revision: str
    patches: Tuple[Patch, ...]
    states: Dict[
        str, Dict[str, Dict[str, Optional[str]]]
    ]  # state -> path -> sha256 before and after
    requires_python: str = ">=3.10"
    sdist: Optional[Dict[str, str]] = None  # name and sha256, for a base that a wheel is built from
    overlay: bool = True

    @property
    def files(self) -> List[str]:
        """The files that the series touches."""
        return sorted({path for patch in self.patches for path in patch.files})


@dataclass(frozen=True)
class Condition:
    """What a tree looks like from here.

    `kind` is one of: `upstream` (a pin, unpatched), `patched`, `edited` (patched, then edited), `other` (patched by
    another version of this repository), `restored` (patched, then upstream's files were put back), `incomplete`
    (patched files without our added ones), `interrupted`, `unknown`.
    """

    kind: str
    base: Base
    state: str
    edited: Tuple[str, ...] = ()
    receipt: Optional[Receipt] = None


class Queue:
    """The patch queue of a repository: `patches/`, its lock, and the overlay."""

    def __init__(self, root: os.PathLike | str) -> None:
        self.root = Path(root).resolve()
        self.lock_path = self.root / "patches" / "lock.json"
        self.lock = json.loads(self.lock_path.read_bytes())
        self.selective: int = self.lock["selective"]
        self.bases = {
            name: self._load_base(name, entry) for name, entry in self.lock["bases"].items()
        }

    def _load_base(self, name: str, entry: dict) -> Base:
        folder = self.root / "patches" / entry["series"]
        names = [line.strip() for line in (folder / "series").read_text().splitlines()]
        patches = tuple(
            Patch(name, (folder / name).read_bytes()) for name in names if name and name[0] != "#"
        )
        rest = {key: value for key, value in entry.items() if key != "series"}
        return Base(name=name, patches=patches, **rest)

    def _patch_path(self, base: Base, patch: Patch) -> str:
        folder = self.root / "patches" / self.lock["bases"][base.name]["series"]
        return (folder / patch.name).resolve().relative_to(self.root).as_posix()

    def base(self, name: str) -> Base:
        """The base of that name."""
        if name not in self.bases:
            raise QueueError(Text.NO_SUCH_BASE.format(name=name, pins=self.pins))
        return self.bases[name]

    @property
    def pins(self) -> str:
        """The bases, for messages."""
        return ", ".join(self.bases)

    def overlay(self, base: Optional[Base] = None) -> Dict[str, bytes]:
        """Our own files, by the path at which they land in a tree; none for a base that takes none."""
        if base is not None and not base.overlay:
            return {}
        return self._own_files("megatron")

    def _own_files(self, folder: str) -> Dict[str, bytes]:
        return {
            path.relative_to(self.root).as_posix(): path.read_bytes()
            for path in sorted((self.root / folder).rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        }

    # -- what a tree is -----------------------------------------------------------------------------------------------

    def recognise(self, tree: Tree, base: Optional[str] = None) -> Tuple[str, Base, str]:
        """Finds the pin whose touched files the tree holds.

        Returns:
            `upstream`, `patched` or `unknown`, then the base and the state; the nearest ones for `unknown`.
        """
        nearest, most_equal = None, -1
        for candidate in [self.base(base)] if base else self.bases.values():
            digests = {path: tree.digest(path) for path in candidate.files}
            if not any(digests.values()):
                continue
            for state, lock in candidate.states.items():
                if set(lock) != set(digests):
                    raise QueueError(Text.STALE_LOCK.format(base=candidate.name))
                for kind, side in (("upstream", "before"), ("patched", "after")):
                    equal = sum(digests[path] == lock[path][side] for path in digests)
                    if equal == len(digests):
                        return kind, candidate, state
                    if equal > most_equal:
                        nearest, most_equal = (candidate, state), equal
        if nearest is None:
            named = {path for entry in self.bases.values() for path in entry.files}
            some = ", ".join(sorted(named)[:2])
            raise QueueError(Text.NOT_A_TREE.format(path=tree.root, files=some))
        return ("unknown", *nearest)

    def inspect(self, tree: Tree, base: Optional[str] = None) -> Condition:
        """Says what a tree is, and what has become of it since it was patched."""
        receipt = tree.receipt
        if tree.journal.interrupted or receipt is None:
            kind, found, state = self.recognise(tree, base)
            if tree.journal.interrupted:
                return Condition("interrupted", found, state)
            missing = tuple(p for p, data in self.overlay(found).items() if tree.read(p) != data)
            if kind == "patched" and missing:
                return Condition("incomplete", found, state, missing)
            return Condition(kind, found, state)
        if not self._is_current(receipt, tree):
            return Condition("other", self._base_of(receipt), receipt.state, receipt=receipt)
        found = self.base(receipt.base)
        digests = {path: tree.digest(path) for path in receipt.files}
        if all(digests[path] == before for path, (before, _) in receipt.files.items()):
            return Condition("restored", found, receipt.state, receipt=receipt)
        edited = [path for path, (_, after) in receipt.files.items() if digests[path] != after]
        edited += [path for path in receipt.overlay if self._overlay_edited(tree, receipt, path)]
        kind = "edited" if edited else "patched"
        return Condition(kind, found, receipt.state, tuple(edited), receipt)

    def _base_of(self, receipt: Receipt) -> Base:
        """The base of a receipt, also when this repository has dropped it."""
        unknown = Base(name=receipt.base, revision=receipt.revision, patches=(), states={})
        return self.bases.get(receipt.base, unknown)

    def _is_current(self, receipt: Receipt, tree: Tree) -> bool:
        """Whether this repository, as it is now, would write the same patches and the same overlay."""
        base = self._base_of(receipt)
        overlay = {
            path: sha256(data)
            for path, data in self.overlay(base).items()
            if not (tree.root / path).is_symlink()  # an editable tree follows the overlay by itself
        }
        applied = {path: receipt.overlay.get(path) for path in overlay}
        dropped = set(receipt.overlay) - set(self.overlay(base))
        same = receipt.patches == _as_records(base.patches) and applied == overlay and not dropped
        return same and receipt.selective == self.selective

    def _overlay_edited(self, tree: Tree, receipt: Receipt, path: str) -> bool:
        return not (tree.root / path).is_symlink() and tree.digest(path) != receipt.overlay[path]

    def status(self, tree: Tree, in_place: bool = True) -> Tuple[bool, str]:
        """Whether a tree is patched as this repository would do it, and a sentence on it.

        Args:
            tree: Any tree.
            in_place: Whether it is one to be patched, so not one that pip has installed.
        """
        condition = self.inspect(tree)
        receipt, base = condition.receipt, condition.base
        if condition.kind == "other":
            return False, self._other(tree, receipt)
        text = {
            "upstream": Text.STATUS_UPSTREAM,
            "patched": Text.STATUS_PATCHED,
            "edited": Text.STATUS_EDITED,
            "restored": Text.STATUS_RESTORED,
            "incomplete": Text.STATUS_INCOMPLETE,
            "interrupted": Text.STATUS_INTERRUPTED,
            "unknown": Text.STATUS_UNKNOWN,
        }[condition.kind]
        if receipt and not receipt.verified:
            text += Text.STATUS_UNVERIFIED
        if condition.kind not in ("patched", "edited"):
            text += Text.ADVICE_PATCH if in_place else Text.ADVICE_INSTALL
        files = condition.edited or self._foreign_files(tree, condition)
        return condition.kind == "patched", text.format(
            path=tree.root,
            root=self.root,
            selective=self.selective,
            base=base.name,
            revision=base.revision,
            files=", ".join(files),
            pins=self.pins,
        )

    def _foreign_files(self, tree: Tree, condition: Condition) -> List[str]:
        lock = condition.base.states.get(condition.state, {})
        return [p for p, entry in lock.items() if tree.digest(p) not in entry.values()] or list(
            lock
        )

    def _other(self, tree: Tree, receipt: Receipt) -> str:
        text = Text.OTHER_PATCHES if receipt.selective == self.selective else Text.OTHER
        return text.format(path=tree.root, theirs=receipt.selective, ours=self.selective)

    # -- patch --------------------------------------------------------------------------------------------------------

    def patch(
        self,
        tree: Tree,
        *,
        base: Optional[str] = None,
        unverified: bool = False,
        keep: bool = False,
        pristine: Callable[[Base], Optional[Pristine]] = lambda base: None,
    ) -> str:
        """Applies the series to a tree and adds the overlay, all or nothing.

        Args:
            tree: An unpacked sdist or a checkout.
            base: The base to take for a tree that is none of the pins; the nearest one if not given.
            unverified: Patch such a tree all the same, if every hunk fits and the files compile.
            keep: Accept edits that were made after patching.
            pristine: Gives upstream's own files of a base if they are at hand, to say where a tree differs.

        Returns:
            What was done, in a sentence.

        Raises:
            QueueError: The tree was refused; nothing was written.
        """
        if not tree.journal.interrupted:
            settled = self._settled(tree, base, keep)  # needs no write access
            if settled:
                return settled
        with tree.locked():
            settled = self._settled(tree, base, keep)
            if settled:
                return settled
            changes, receipt = self._plan(tree, base, unverified, pristine)
            tree.commit(changes)
        text = Text.PATCHED + ("" if receipt.verified else Text.UNVERIFIED)
        return text.format(
            path=tree.root,
            selective=receipt.selective,
            base=receipt.base,
            patches=len(receipt.patches),
            overlay=len(receipt.overlay),
        )

    def _settled(self, tree: Tree, base: Optional[str], keep: bool) -> Optional[str]:
        """The answer for a tree that was patched before; None if there is something to do."""
        condition = self.inspect(tree, base)
        files = ", ".join(condition.edited)
        if condition.kind == "patched":
            return Text.ALREADY.format(selective=self.selective)
        if condition.kind == "other":
            raise QueueError(self._other(tree, condition.receipt))
        if condition.kind == "edited":
            if not keep:
                raise QueueError(Text.EDITED.format(path=tree.root, files=files))
            self._taken_out(tree, condition.receipt)  # our hunks must still be there, whole
            return Text.ALREADY_KEPT.format(selective=self.selective, files=files)
        return None

    def _plan(
        self,
        tree: Tree,
        base_name: Optional[str],
        unverified: bool,
        pristine: Callable[[Base], Optional[Pristine]],
    ) -> Tuple[Contents, Receipt]:
        """Works out every file that patching a tree writes, without writing any."""
        kind, base, state = self.recognise(tree, base_name)
        found = {path: tree.read(path) for path in base.files}
        before = found
        if kind == "patched":  # only our own files, or the receipt, are missing
            before = apply_series(found, base.patches[::-1], reverse=True)[-1]
        if kind == "unknown":
            self._refuse_crlf(tree, base, found)
        try:
            after = apply_series(before, base.patches)[-1]
        except DoesNotFit as refusal:
            raise self._drift(tree, refusal) from refusal
        if kind != "unknown":
            _check_result(after, base.states[state])
        elif not unverified:
            raise self._not_a_pin(tree, base, state, pristine(base))
        else:
            _check_that_it_compiles(after)
        added = self._added(tree, base)
        receipt = Receipt(
            selective=self.selective,
            base=base.name,
            state=state,
            revision=base.revision,
            verified=kind != "unknown",
            files={path: [sha256(before[path]), sha256(after[path])] for path in base.files},
            overlay={path: sha256(data) for path, data in self.overlay(base).items()},
            patches=_as_records(base.patches),
            undo=_as_text(make_diff(before, after)),
        )
        changes = {path: after[path] for path in base.files if after[path] != found[path]}
        return {**changes, **added, RECEIPT: receipt.to_bytes()}, receipt

    def _added(self, tree: Tree, base: Base) -> Contents:
        """The overlay files that a tree lacks; one of upstream's is never overwritten."""
        known = tree.receipt.overlay if tree.receipt else {}
        added = {}
        for path, data in self.overlay(base).items():
            found = tree.read(path)
            if found not in (None, data) and sha256(found) != known.get(path):
                raise QueueError(Text.OVERLAY_EXISTS.format(file=path, path=tree.root))
            if found != data:
                added[path] = data
        return added

    def _drift(self, tree: Tree, refusal: DoesNotFit) -> QueueError:
        text = Text.DRIFT.format(
            refusal=refusal, tree=tree.describe(), pins=self.pins, path=tree.root
        )
        return QueueError(text)

    def _refuse_crlf(self, tree: Tree, base: Base, found: Contents) -> None:
        for path, data in found.items():
            if data is not None and b"\r\n" in data:
                raise QueueError(Text.CRLF.format(file=path, tree=tree.describe(), base=base.name))

    def _not_a_pin(
        self, tree: Tree, base: Base, state: str, pristine: Optional[Pristine]
    ) -> QueueError:
        """The refusal of a tree that every hunk fits and that is no pin: where does it differ?"""
        lock = base.states[state]
        path = next(path for path in base.files if tree.digest(path) != lock[path]["before"])
        first = next(patch for patch in base.patches if path in patch.files)
        candidates = [(pristine or {}).get(path)]
        if (tree.root / ".git").exists():
            # The index line of a patch names the blob, which every full clone of upstream has.
            blob = first.blob_before(path)
            candidates.append(_git(tree.root, "cat-file", "blob", blob).stdout)
        line = ""
        for upstream in candidates:
            if sha256(upstream) == lock[path]["before"]:
                line = f":{_first_difference(upstream, tree.read(path) or b'')}"
        text = Text.UNKNOWN.format(
            file=path,
            line=line,
            base=base.name,
            tree=tree.describe(),
            pins=self.pins,
            path=tree.root,
        )
        return QueueError(text)

    def show_conflict(self, tree: Tree, base: Optional[str] = None) -> str:
        """Shows each hunk that a tree refuses, beside what the tree has there. Writes nothing."""
        kind, found, _ = self.recognise(tree, base)
        if kind == "patched":
            return Text.ALREADY.format(selective=self.selective)
        report = []
        with _scratch({path: tree.read(path) for path in found.files}) as folder:
            for patch in found.patches:
                options = ["--reject", "--whitespace=nowarn"]
                run = _git(folder, "apply", *options, "-", stdin=patch.text)
                rejects = [path for path in patch.files if (folder / f"{path}.rej").exists()]
                for path in rejects:
                    hunks = (folder / f"{path}.rej").read_text(errors="replace")
                    here = (folder / path).read_text(errors="replace").splitlines()
                    report += _compare_hunks(patch.name, path, hunks, here)
                    (folder / f"{path}.rej").unlink()
                if run.returncode and not rejects:
                    report.append(str(_refusal(patch, run.stderr.decode(errors="replace"))))
        return "\n".join(report) or Text.NO_CONFLICT.format(path=tree.root)

    # -- unpatch -----------------------------------------------------------------------------------

    def unpatch(self, tree: Tree, keep: bool = False) -> str:
        """Takes the patches and the overlay out of a tree; needs its receipt only.

        Args:
            tree: A tree that `patch` has patched.
            keep: Leave those of our own files that were edited in the tree where they are.

        Returns:
            What was done, in a sentence.

        Raises:
            QueueError: An edit is in the way; nothing was written.
        """
        if tree.receipt is None and not tree.journal.interrupted:
            return Text.NOT_PATCHED.format(path=tree.root)
        with tree.locked():
            receipt = tree.receipt
            if receipt is None:  # what was interrupted was the first patching
                return Text.NOT_PATCHED.format(path=tree.root)
            files = self._taken_out(tree, receipt)
            ours = {path: tree.digest(path) for path in receipt.overlay}
            edited = [path for path in ours if ours[path] not in (None, receipt.overlay[path])]
            if edited and not keep:
                raise QueueError(Text.OVERLAY_EDITED.format(files=", ".join(edited)))
            removed = {path: None for path in ours if ours[path] == receipt.overlay[path]}
            tree.commit({**files, **removed, RECEIPT: None})
        kept = edited + [path for path in files if sha256(files[path]) != receipt.files[path][0]]
        text = Text.UNPATCHED + (Text.UNPATCHED_KEPT if kept else ".")
        return text.format(
            selective=receipt.selective,
            path=tree.root,
            files=len(files),
            overlay=len(removed),
            kept=", ".join(kept),
        )

    @staticmethod
    def _taken_out(tree: Tree, receipt: Receipt) -> Contents:
        """The patched files of a tree without our hunks, and with all later edits."""
        result = {}
        for path, diff in Patch("undo", _as_bytes(receipt.undo)).diffs.items():
            before, after = receipt.files[path]
            found = tree.digest(path)
            if found == before:
                continue
            try:
                piece = Patch("undo", diff)
                text = apply_series({path: tree.read(path)}, [piece], reverse=True)[-1][path]
            except DoesNotFit as refusal:
                text = Text.UNPATCH_CONFLICT.format(file=path, line=refusal.line)
                raise QueueError(text) from refusal
            if found == after and sha256(text) != before:
                raise QueueError(Text.UNPATCH_WRONG.format(file=path))
            result[path] = text
        return result

    # -- refresh and export ------------------------------------------------------------------------

    def refresh(self, tree: Tree, pristine: Callable[[Base], Pristine], into: str = "") -> str:
        """Turns the edits of a patched tree back into patches, overlay and lock.

        Args:
            tree: A patched tree.
            pristine: Gives upstream's own files of a base.
            into: The patch that gets the edits of upstream's files; by default the last one that
                touches a file gets its edits.

        Returns:
            What was written, in a sentence.
        """
        with tree.locked():
            receipt = self._refreshable(tree)
            base = self.base(receipt.base)
            upstream = pristine(base)
            before = {path: upstream.get(path) for path in base.files}
            for path, data in before.items():
                if sha256(data) != receipt.files[path][0]:
                    raise QueueError(Text.NOT_ITS_UPSTREAM.format(file=path, path=tree.root))
            stages = apply_series(before, base.patches)
            for path, text in self._edits(tree, upstream, stages[-1]).items():
                stages = self._absorb(base, stages, path, upstream.get(path), text, into)
            changes = self._refreshed_patches(base, stages)
            changes.update(self._overlay_edits(tree, receipt))
            changes.update(self._lock_with(base, receipt.state, stages[0], stages[-1]))
            written = self._write(changes)
            if written:  # the receipt has to name the new patches
                fresh = Queue(self.root)
                tree.commit(fresh._plan(tree, base.name, False, pristine)[0])
        text = Text.REFRESHED if written else Text.NOTHING_NEW
        text = text.format(files=", ".join(written), path=tree.root)
        return text + self._shared(base, written) + self._strays(tree, upstream)

    def _refreshable(self, tree: Tree) -> Receipt:
        """The receipt of a tree from which this repository's own patches can be refreshed."""
        receipt = tree.receipt
        if receipt is None:
            raise QueueError(Text.NOT_PATCHED.format(path=tree.root))
        base = self._base_of(receipt)
        if receipt.patches != _as_records(base.patches) or receipt.selective != self.selective:
            raise QueueError(self._other(tree, receipt))
        if not receipt.verified:
            raise QueueError(Text.REFRESH_UNVERIFIED.format(path=tree.root, base=base.name))
        return receipt

    @staticmethod
    def _edits(tree: Tree, upstream: Pristine, patched: Contents) -> Contents:
        """Upstream's files that the tree holds otherwise than the series leaves them."""
        expected = {path: upstream[path] for path in upstream if path.startswith("megatron/")}
        expected.update(patched)
        expected.pop(VERSION_FILE, None)
        found = {path: tree.read(path) for path in expected}
        return {path: found[path] for path in expected if found[path] != expected[path]}

    @staticmethod
    def _absorb(
        base: Base,
        stages: List[Contents],
        path: str,
        original: Optional[bytes],
        text: Optional[bytes],
        into: str,
    ) -> List[Contents]:
        """Puts the edit of one file into the stages of the series, from the patch that gets it on."""
        names = [patch.name for patch in base.patches]
        touching = [patch.name for patch in base.patches if path in patch.files]
        if into and into not in names:
            text = Text.NO_SUCH_PATCH.format(name=into, base=base.name, names=", ".join(names))
            raise QueueError(text)
        if not into and not touching:
            raise QueueError(Text.NO_PATCH_FOR.format(file=path))
        owner = names.index(into or touching[-1])
        texts = [stage.get(path, original) for stage in stages]
        edit = Patch("edit", make_diff({path: texts[-1]}, {path: text}))
        try:
            texts[owner + 1] = apply_series({path: texts[owner + 1]}, [edit])[-1][path]
            for number, patch in enumerate(base.patches[owner + 1 :], start=owner + 1):
                pieces = [Patch(patch.name, patch.diffs[path])] if path in patch.diffs else []
                texts[number + 1] = apply_series({path: texts[number]}, pieces)[-1][path]
        except DoesNotFit as refusal:
            raise QueueError(Text.INTO_CONFLICT.format(file=path, patch=names[owner])) from refusal
        if texts[-1] != text:
            raise QueueError(Text.INTO_CONFLICT.format(file=path, patch=names[owner]))
        return [{**stage, path: text} for stage, text in zip(stages, texts)]

    def _refreshed_patches(self, base: Base, stages: List[Contents]) -> Contents:
        changes: Contents = {}
        for patch, before, after in zip(base.patches, stages, stages[1:]):
            diff = make_diff(before, after, patch.context)
            if not diff:
                raise QueueError(Text.EMPTY_PATCH.format(patch=patch.name))
            changes[self._patch_path(base, patch)] = patch.header + diff
        return changes

    def _overlay_edits(self, tree: Tree, receipt: Receipt) -> Contents:
        """Our own files that were edited in the tree, unless they were edited here as well."""
        ours, edits = self.overlay(), {}
        for path, recorded in receipt.overlay.items():
            found = tree.read(path)
            if found is None or sha256(found) == recorded or (tree.root / path).is_symlink():
                continue
            if sha256(ours.get(path)) != recorded and ours.get(path) != found:
                raise QueueError(Text.OVERLAY_CONFLICT.format(file=path, path=tree.root))
            edits[path] = found
        return edits

    def _lock_with(self, base: Base, state: str, before: Contents, after: Contents) -> Contents:
        """lock.json with the hashes of one state of a base."""
        lock = json.loads(json.dumps(self.lock))
        lock["bases"][base.name]["states"][state] = {
            path: {"before": sha256(before[path]), "after": sha256(after[path])}
            for path in sorted(before)
        }
        name = self.lock_path.relative_to(self.root).as_posix()
        return {name: (json.dumps(lock, indent=2) + "\n").encode()}

    def _write(self, changes: Contents) -> List[str]:
        """Writes the files of this repository that really change, all or none; returns their names."""
        real = {path: data for path, data in changes.items() if _read(self.root / path) != data}
        if real:
            Journal(self.root, Files()).commit(real)
        return list(real)

    def relock(self, base: Base, state: str, read: Callable[[str], Optional[bytes]]) -> str:
        """Writes the hashes of a base into lock.json, from upstream's files and the series.

        Args:
            base: The base; its entry in lock.json is made by hand.
            state: The name of the state that these files are in, `upstream` as a rule.
            read: Gives one of upstream's files, None for one that upstream has not.
        """
        before = {path: read(path) for path in base.files}
        after = apply_series(before, base.patches)[-1]
        written = self._write(self._lock_with(base, state, before, after))
        text = Text.REFRESHED if written else Text.NOTHING_NEW
        return text.format(files=", ".join(written), path=base.name)

    def _shared(self, base: Base, written: List[str]) -> str:
        """A reminder for every other base whose series holds a patch that was rewritten."""
        lines = [
            Text.SHARED.format(patch=patch.name, base=other.name)
            for other in self.bases.values()
            for patch in other.patches
            if other.name != base.name and self._patch_path(other, patch) in written
        ]
        return "".join(lines)

    def _strays(self, tree: Tree, upstream: Pristine) -> str:
        """A reminder of new modules in a tree, which nobody but their author can place."""
        found = {
            path.relative_to(tree.root).as_posix() for path in (tree.root / CORE).rglob("*.py")
        }
        strays = sorted(found - set(upstream) - set(self.overlay()))
        return Text.STRAY.format(files=", ".join(strays)) if strays else ""

    def export(self, folder: Path, base: Base) -> str:
        """Writes the series as upstream would get it, with our own files as patches; for `git am`.

        The overlay comes first, because the patches call it, and the tests last.
        """
        if folder.exists() and any(folder.iterdir()):
            raise QueueError(Text.EXPORT_EXISTS.format(path=folder))
        folder.mkdir(parents=True, exist_ok=True)
        added, tests = self.overlay(base), self._own_files("tests/unit_tests")
        # Upstream has its own files of these names in the folders of its tests.
        tests = {
            p: d for p, d in tests.items() if Path(p).name not in ("conftest.py", "__init__.py")
        }
        letters = [
            *self._new_files(
                base, "0001-add-selective-output.patch", "Add selective output", added
            ),
            *base.patches,
            *self._new_files(base, "add-tests.patch", "Add tests of selective output", tests),
        ]
        for number, letter in enumerate(letters, start=1):
            subject = f"Subject: [PATCH {number}/{len(letters)}] ".encode()
            pattern = rb"^Subject: (\[PATCH[^\]]*\] )?"
            header = re.sub(pattern, lambda _: subject, letter.header, count=1, flags=re.MULTILINE)
            name = re.sub(r"^\d+-", "", Path(letter.name).name)
            diff = letter.text[len(letter.header) :]
            (folder / f"{number:04}-{name}").write_bytes(header + diff)
        return Text.EXPORTED.format(count=len(letters), path=folder)

    @staticmethod
    def _new_files(base: Base, name: str, subject: str, files: Dict[str, bytes]) -> List[Patch]:
        """A patch that adds the given files under upstream's copyright; none if there is no file."""
        if not files:
            return []
        lines = base.patches[0].header.splitlines()
        sender = [line for line in lines if line.startswith((b"From ", b"From: ", b"Date: "))]
        header = b"\n".join([*sender, b"Subject: " + subject.encode(), b"", b""])
        after = {p: d.replace(OUR_COPYRIGHT, UPSTREAM_COPYRIGHT, 1) for p, d in files.items()}
        return [Patch(name, header + make_diff({}, after))]

    # -- what Python would import ------------------------------------------------------------------

    def status_of_import(self, search_path: Sequence[str]) -> Tuple[bool, str]:
        """Which megatron.core Python would import, and whether it is this repository's.

        Args:
            search_path: What `sys.path` is where the user's program starts.
        """
        origins = find_core(search_path)
        if not origins:
            text = Text.NOT_INSTALLED.format(python=sys.executable, root=self.root)
            return False, text
        first, how = origins[0]
        installed = _installed_version(search_path)
        try:
            patched, state = self.status(Tree(first), in_place=how != INSTALLED)
        except QueueError as error:
            patched, state = False, str(error)
        version = installed if how == INSTALLED and installed else Tree(first).version
        text = Text.COMES_FROM.format(
            tree=first, how=how, version=version if patched else f"stock {version}"
        )
        if installed and how in (PYTHONPATH, CURRENT_FOLDER):
            text += Text.SHADOWED.format(installed=installed)
        return patched, f"{text}: {state}"


CURRENT_FOLDER, PYTHONPATH, INSTALLED, EDITABLE = (
    "current folder",
    "PYTHONPATH",
    "installed",
    "editable install",
)


def find_core(search_path: Sequence[str]) -> List[Tuple[Path, str]]:
    """The trees from which megatron.core can come, and how each gets on the path, first one first.

    Nothing is imported. A folder `megatron/core` without `__init__.py`, as in this repository, loses
    against a real package anywhere on the path, so it is no candidate.
    """
    python_path = [
        Path(entry).resolve()
        for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if entry
    ]
    origins = []
    for entry in search_path:
        root = Path(entry or ".").resolve()
        if not (root / CORE / "__init__.py").is_file() or root in [seen for seen, _ in origins]:
            continue
        if entry == "":
            how = CURRENT_FOLDER
        elif root in python_path:
            how = PYTHONPATH
        else:
            how = INSTALLED if root.name in ("site-packages", "dist-packages") else EDITABLE
        origins.append((root, how))
    for finder in sys.meta_path:  # setuptools' other kind of editable install looks here, last
        if getattr(finder, "__module__", "").startswith("__editable__"):
            spec = finder.find_spec(CORE.replace("/", "."), None)
            if spec is not None and spec.origin:
                origins.append((Path(spec.origin).resolve().parents[2], EDITABLE))
    return origins


def _installed_version(search_path: Sequence[str]) -> Optional[str]:
    found = importlib.metadata.distributions(name="megatron-core", path=list(search_path))
    return next((distribution.version for distribution in found), None)


# --------------------------------------------------------------------------------------------------
# Small things
# --------------------------------------------------------------------------------------------------


def _as_records(patches: Sequence[Patch]) -> List[Dict[str, str]]:
    return [{"name": patch.name, "text": _as_text(patch.text)} for patch in patches]


def _check_result(contents: Contents, lock: Mapping[str, Mapping[str, Optional[str]]]) -> None:
    """Compares what the patches made with the lock: an offset may have hit a twin of the right place."""
    for path, entry in lock.items():
        if sha256(contents[path]) != entry["after"]:
            found = sha256(contents[path])
            text = Text.WRONG_RESULT.format(file=path, found=found, wanted=entry["after"])
            raise QueueError(text)


def _check_that_it_compiles(contents: Contents) -> None:
    for path, data in contents.items():
        if path.endswith(".py") and data is not None:
            try:
                compile(data, path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                line = getattr(error, "lineno", 1)
                text = Text.NO_COMPILE.format(file=path, line=line, error=error)
                raise QueueError(text) from error


def _first_difference(upstream: bytes, found: bytes) -> int:
    pairs = itertools.zip_longest(upstream.splitlines(), found.splitlines())
    return next(number for number, (ours, theirs) in enumerate(pairs, 1) if ours != theirs)


def _compare_hunks(name: str, path: str, rejected: str, here: Sequence[str]) -> List[str]:
    """Rejected hunks, each beside the lines that the file has at that place."""
    report = []
    for hunk in re.split(r"^(?=@@ )", rejected, flags=re.MULTILINE)[1:]:
        start, length = re.match(r"@@ -(\d+)(?:,(\d+))? ", hunk).groups(default="1")
        first = max(int(start), 1)
        last = min(first + int(length) - 1, len(here))
        report += [f"{name} does not fit {path} near line {first}:", hunk.rstrip("\n")]
        report += [f"the file has, in lines {first} to {last}:", *here[first - 1 : last], ""]
    return report
