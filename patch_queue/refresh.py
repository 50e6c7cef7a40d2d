# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""From an edited tree back to the patch files, the overlay and the lock."""

from __future__ import annotations

import copy
import json
from typing import Callable, List, Optional

from patch_queue.patches import (
    Contents,
    DoesNotFit,
    Patch,
    apply_series,
    make_diff,
    read_file,
    sha256,
)
from patch_queue.queue import Base, Pristine, Queue, as_records
from patch_queue.texts import QueueError, Text
from patch_queue.trees import CORE, VERSION_FILE, Files, Journal, Receipt, Tree


def refresh(queue: Queue, tree: Tree, pristine: Callable[[Base], Pristine], into: str = "") -> str:
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
        receipt = _refreshable(queue, tree)
        base = queue.base(receipt.base)
        upstream = pristine(base)
        before = {path: upstream.get(path) for path in base.files}
        for path, data in before.items():
            if sha256(data) != receipt.files[path][0]:
                raise QueueError(Text.NOT_ITS_UPSTREAM.format(file=path, path=tree.root))
        stages = apply_series(before, base.patches)
        for path, text in _edits(tree, upstream, stages[-1]).items():
            stages = _absorb(base, stages, path, upstream.get(path), text, into)
        changes = _refreshed_patches(queue, base, stages)
        changes.update(_overlay_edits(queue, tree, receipt))
        changes.update(_lock_with(queue, base, receipt.state, stages[0], stages[-1]))
        written = _write(queue, changes)
        if written:  # the receipt has to name the new patches
            fresh = Queue(queue.root)
            tree.commit(fresh.plan(tree, base.name, False, pristine)[0])
    text = Text.REFRESHED if written else Text.NOTHING_NEW
    text = text.format(files=", ".join(written), path=tree.root)
    return text + _shared(queue, base, written) + _strays(queue, tree, upstream)


def _refreshable(queue: Queue, tree: Tree) -> Receipt:
    """The receipt of a tree from which this repository's own patches can be refreshed."""
    receipt = tree.receipt
    if receipt is None:
        raise QueueError(Text.NOT_PATCHED.format(path=tree.root))
    base = queue.base_of(receipt)
    if receipt.patches != as_records(base.patches) or receipt.selective != queue.selective:
        raise QueueError(queue.other(tree, receipt))
    if not receipt.verified:
        raise QueueError(Text.REFRESH_UNVERIFIED.format(path=tree.root, base=base.name))
    return receipt


def _edits(tree: Tree, upstream: Pristine, patched: Contents) -> Contents:
    """Upstream's files that the tree holds otherwise than the series leaves them."""
    expected = {path: upstream[path] for path in upstream if path.startswith("megatron/")}
    expected.update(patched)
    expected.pop(VERSION_FILE, None)
    found = {path: tree.read(path) for path in expected}
    return {path: found[path] for path in expected if found[path] != expected[path]}


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


def _refreshed_patches(queue: Queue, base: Base, stages: List[Contents]) -> Contents:
    changes: Contents = {}
    for patch, before, after in zip(base.patches, stages, stages[1:]):
        diff = make_diff(before, after, patch.context)
        if not diff:
            raise QueueError(Text.EMPTY_PATCH.format(patch=patch.name))
        changes[queue.patch_path(base, patch)] = patch.header + diff
    return changes


def _overlay_edits(queue: Queue, tree: Tree, receipt: Receipt) -> Contents:
    """Our own files that were edited in the tree, unless they were edited here as well."""
    ours, edits = queue.overlay(), {}
    for path, recorded in receipt.overlay.items():
        found = tree.read(path)
        if found is None or sha256(found) == recorded or (tree.root / path).is_symlink():
            continue
        if sha256(ours.get(path)) != recorded and ours.get(path) != found:
            raise QueueError(Text.OVERLAY_CONFLICT.format(file=path, path=tree.root))
        edits[path] = found
    return edits


def _lock_with(queue: Queue, base: Base, state: str, before: Contents, after: Contents) -> Contents:
    """lock.json with the hashes of one state of a base."""
    lock = copy.deepcopy(queue.lock)
    lock["bases"][base.name]["states"][state] = {
        path: {"before": sha256(before[path]), "after": sha256(after[path])}
        for path in sorted(before)
    }
    name = queue.lock_path.relative_to(queue.root).as_posix()
    return {name: (json.dumps(lock, indent=2) + "\n").encode()}


def _write(queue: Queue, changes: Contents) -> List[str]:
    """Writes the files of this repository that really change, all or none; returns their names."""
    real = {path: data for path, data in changes.items() if read_file(queue.root / path) != data}
    if real:
        Journal(queue.root, Files()).commit(real)
    return list(real)


def relock(queue: Queue, base: Base, state: str, read: Callable[[str], Optional[bytes]]) -> str:
    """Writes the hashes of a base into lock.json, from upstream's files and the series.

    Args:
        base: The base; its entry in lock.json is made by hand.
        state: The name of the state that these files are in, `upstream` as a rule.
        read: Gives one of upstream's files, None for one that upstream has not.
    """
    before = {path: read(path) for path in base.files}
    after = apply_series(before, base.patches)[-1]
    written = _write(queue, _lock_with(queue, base, state, before, after))
    text = Text.REFRESHED if written else Text.NOTHING_NEW
    return text.format(files=", ".join(written), path=base.name)


def _shared(queue: Queue, base: Base, written: List[str]) -> str:
    """A reminder for every other base whose series holds a patch that was rewritten."""
    lines = [
        Text.SHARED.format(patch=patch.name, base=other.name)
        for other in queue.bases.values()
        for patch in other.patches
        if other.name != base.name and queue.patch_path(other, patch) in written
    ]
    return "".join(lines)


def _strays(queue: Queue, tree: Tree, upstream: Pristine) -> str:
    """A reminder of new modules in a tree, which nobody but their author can place."""
    found = {path.relative_to(tree.root).as_posix() for path in (tree.root / CORE).rglob("*.py")}
    strays = sorted(found - set(upstream) - set(queue.overlay()))
    return Text.STRAY.format(files=", ".join(strays)) if strays else ""
