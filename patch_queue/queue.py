# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The queue: bases, series and overlay, what a tree is to them, patching and unpatching it."""

from __future__ import annotations

import itertools
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from patch_queue.patches import (
    Contents,
    DoesNotFit,
    Patch,
    apply_series,
    as_bytes,
    as_text,
    git,
    git_refusal,
    make_diff,
    read_file,
    scratch,
    sha256,
)
from patch_queue.texts import QueueError, Text
from patch_queue.trees import RECEIPT, Receipt, Tree

Pristine = Mapping[str, bytes]  # upstream's own files, by path


@dataclass(frozen=True)
class Base:
    """An upstream version that the lock pins."""

    name: str
    revision: str
    patches: Tuple[Patch, ...]
    # state -> path -> sha256 before and after
    states: Dict[str, Dict[str, Dict[str, Optional[str]]]]
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

    `kind` is one of: `upstream` (a pin, unpatched), `patched`, `edited` (patched, then edited),
    `other` (patched by another version of this repository), `restored` (patched, then upstream's
    files were put back), `incomplete` (patched files without our added ones), `interrupted`,
    `unknown`.
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

    def patch_path(self, base: Base, patch: Patch) -> str:
        """Where a patch lies in this repository."""
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
        """Our own files, by the path at which they land in a tree; none for a base without."""
        if base is not None and not base.overlay:
            return {}
        return self.own_files("megatron")

    def own_files(self, folder: str) -> Dict[str, bytes]:
        """The files of a folder of this repository, by path."""
        return {
            path.relative_to(self.root).as_posix(): path.read_bytes()
            for path in sorted((self.root / folder).rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        }

    # -- what a tree is ----------------------------------------------------------------------------

    def recognise(self, tree: Tree, base: Optional[str] = None) -> Tuple[str, Base, str]:
        """Finds the pin whose touched files the tree holds.

        Returns:
            `upstream`, `patched` or `unknown`, then the base and the state; for `unknown` the
            nearest ones.
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
            return Condition("other", self.base_of(receipt), receipt.state, receipt=receipt)
        found = self.base(receipt.base)
        digests = {path: tree.digest(path) for path in receipt.files}
        if all(digests[path] == before for path, (before, _) in receipt.files.items()):
            return Condition("restored", found, receipt.state, receipt=receipt)
        edited = [path for path, (_, after) in receipt.files.items() if digests[path] != after]
        edited += [path for path in receipt.overlay if self._overlay_edited(tree, receipt, path)]
        kind = "edited" if edited else "patched"
        return Condition(kind, found, receipt.state, tuple(edited), receipt)

    def base_of(self, receipt: Receipt) -> Base:
        """The base of a receipt, also when this repository has dropped it."""
        unknown = Base(name=receipt.base, revision=receipt.revision, patches=(), states={})
        return self.bases.get(receipt.base, unknown)

    def _is_current(self, receipt: Receipt, tree: Tree) -> bool:
        """Whether this repository, as it is now, would write the same patches and overlay."""
        base = self.base_of(receipt)
        overlay = {
            path: sha256(data)
            for path, data in self.overlay(base).items()
            if not (tree.root / path).is_symlink()  # an editable tree follows the overlay by itself
        }
        applied = {path: receipt.overlay.get(path) for path in overlay}
        dropped = set(receipt.overlay) - set(self.overlay(base))
        same = receipt.patches == as_records(base.patches) and applied == overlay and not dropped
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
            return False, self.other(tree, receipt)
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

    def other(self, tree: Tree, receipt: Receipt) -> str:
        """The sentence on a tree that was patched by another version of this repository."""
        text = Text.OTHER_PATCHES if receipt.selective == self.selective else Text.OTHER
        return text.format(path=tree.root, theirs=receipt.selective, ours=self.selective)

    # -- patch -------------------------------------------------------------------------------------

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
            base: The base to take for a tree that is no pin; the nearest one by default.
            unverified: Patch such a tree all the same, if every hunk fits and the files compile.
            keep: Accept edits that were made after patching.
            pristine: Gives upstream's own files of a base, None if they aren't at hand; to say
                where a tree differs.

        Returns:
            What was done, in a sentence.

        Raises:
            QueueError: The tree was refused; nothing was written.
        """
        if tree.at_rest:
            settled = self._settled(tree, base, keep)  # needs no write access
            if settled:
                return settled
        with tree.locked():
            settled = self._settled(tree, base, keep)
            if settled:
                return settled
            changes, receipt = self.plan(tree, base, unverified, pristine)
            tree.commit(changes)
        text = Text.PATCHED + ("" if receipt.verified else Text.UNVERIFIED)
        return text.format(
            path=tree.root,
            selective=receipt.selective,
            base=receipt.base,
            patches=len(receipt.patches),
            overlay=len(receipt.overlay),
        )

    def changes(self, tree: Tree) -> Contents:
        """What `patch` would write into a tree, keeping later edits; nothing is written.

        Raises:
            QueueError: As `patch`.
        """
        if tree.journal.interrupted:
            raise QueueError(Text.INTERRUPTED.format(path=tree.root))
        if self._settled(tree, None, keep=True):
            return {}
        return self.plan(tree, None, unverified=False, pristine=lambda base: None)[0]

    def _settled(self, tree: Tree, base: Optional[str], keep: bool) -> Optional[str]:
        """The answer for a tree that was patched before; None if there is something to do."""
        condition = self.inspect(tree, base)
        files = ", ".join(condition.edited)
        if condition.kind == "patched":
            return Text.ALREADY.format(selective=self.selective)
        if condition.kind == "other":
            raise QueueError(self.other(tree, condition.receipt))
        if condition.kind == "edited":
            if not keep:
                raise QueueError(Text.EDITED.format(path=tree.root, files=files))
            self._taken_out(tree, condition.receipt)  # our hunks must still be there, whole
            return Text.ALREADY_KEPT.format(selective=self.selective, files=files)
        return None

    def plan(
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
            patches=as_records(base.patches),
            undo=as_text(make_diff(before, after)),
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
            candidates.append(git(tree.root, "cat-file", "blob", blob).stdout)
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
        with scratch({path: tree.read(path) for path in found.files}) as folder:
            for patch in found.patches:
                # Hunks that fit move the lines below them, so the file is read before.
                texts = {path: read_file(folder / path) or b"" for path in patch.files}
                options = ["--reject", "--whitespace=nowarn"]
                run = git(folder, "apply", *options, "-", stdin=patch.text)
                rejects = [path for path in patch.files if (folder / f"{path}.rej").exists()]
                for path in rejects:
                    hunks = (folder / f"{path}.rej").read_text(errors="replace")
                    here = texts[path].decode(errors="replace").splitlines()
                    report += _compare_hunks(patch.name, path, hunks, here)
                    (folder / f"{path}.rej").unlink()
                if run.returncode and not rejects:
                    report.append(str(git_refusal(patch, run.stderr.decode(errors="replace"))))
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
        if tree.receipt is None and tree.at_rest:
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
        for path, diff in Patch("undo", as_bytes(receipt.undo)).diffs.items():
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


def as_records(patches: Sequence[Patch]) -> List[Dict[str, str]]:
    """Patches as a receipt holds them."""
    return [{"name": patch.name, "text": as_text(patch.text)} for patch in patches]


def _check_result(contents: Contents, lock: Mapping[str, Mapping[str, Optional[str]]]) -> None:
    """Compares what the patches made with the lock: an offset may have hit the wrong twin."""
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
