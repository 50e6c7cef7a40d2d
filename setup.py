#!/usr/bin/env python3
# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Build backend of the fork and command line of its patch queue.

As a PEP 517 backend it lets setuptools build upstream's tree, patched and with the overlay added,
with upstream's own metadata. Run as a script it patches Megatron checkouts in place and maintains
the patches. Importing it has no effect.
"""

import argparse
import contextlib
import os
import shutil
import sys
import zipfile
from pathlib import Path

from patch_queue.build_tree import BuildTrees, fetch, path_with_this_python, pristine
from patch_queue.export import export
from patch_queue.imports import status_of_import
from patch_queue.queue import Queue
from patch_queue.refresh import refresh, relock
from patch_queue.texts import QueueError, Text
from patch_queue.trees import Tree

ROOT = Path(__file__).resolve().parent
DEFAULT_BASE = "0.16.1"


# The hooks of PEP 517 and PEP 660. `-C mcore=` names the base or a Megatron checkout.


def get_requires_for_build_wheel(config_settings=None):
    """Nothing beside what `pyproject.toml` names."""
    return []


get_requires_for_build_sdist = get_requires_for_build_editable = get_requires_for_build_wheel


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    """Writes upstream's metadata with our version."""
    folder = os.path.abspath(metadata_directory)
    with _inside(lambda trees: trees.for_wheel(), config_settings) as backend:
        return backend.prepare_metadata_for_build_wheel(folder)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """Builds the whole megatron-core as a wheel."""
    folder = os.path.abspath(wheel_directory)
    with _inside(lambda trees: trees.for_wheel(), config_settings) as backend:
        name = backend.build_wheel(folder)
        with zipfile.ZipFile(os.path.join(folder, name)) as wheel:
            _require_helpers(wheel.namelist())
        return name


def build_sdist(sdist_directory, config_settings=None):
    """Packs the patched tree, so that building from it needs neither git nor network."""
    folder = os.path.abspath(sdist_directory)
    with _inside(lambda trees: trees.for_wheel(), config_settings) as backend:
        return backend.build_sdist(folder)


# A finder, setuptools' default, gives an empty `megatron.core` where Python starts in this
# repository, whose own `megatron/` then comes first. A plain .pth file does not.
_EDITABLE = {"editable_mode": "compat"}


def prepare_metadata_for_build_editable(metadata_directory, config_settings=None):
    """As for a wheel, from the tree in `build/` that stays."""
    folder = os.path.abspath(metadata_directory)
    with _inside(lambda trees: trees.for_editable(), config_settings) as backend:
        return backend.prepare_metadata_for_build_editable(folder, _EDITABLE)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """Puts a patched tree in `build/` on Python's path; the overlay in it is this repository's."""
    folder = os.path.abspath(wheel_directory)
    with _inside(lambda trees: trees.for_editable(), config_settings) as backend:
        name = backend.build_editable(folder, _EDITABLE)
        _require_helpers(os.listdir("megatron/core/datasets"))
        return name


@contextlib.contextmanager
def _inside(make_tree, config_settings):
    """Runs setuptools' backend in a tree; a failure that has a text ends the build with it."""
    from setuptools import build_meta

    before = os.getcwd(), os.environ.get("PATH", "")
    choice = (config_settings or {}).get("mcore", DEFAULT_BASE)
    if isinstance(choice, list):  # given more than once
        choice = choice[-1]
    try:
        trees = BuildTrees(Queue(ROOT), choice)
        with trees.locked():
            tree = make_tree(trees)
            os.environ["PATH"] = path_with_this_python()
            os.chdir(tree)
            yield build_meta
    except QueueError as error:
        sys.exit(f"error: {error}")
    finally:
        os.chdir(before[0])
        os.environ["PATH"] = before[1]


def _require_helpers(names):
    """Upstream's extension is optional: without a compiler the build would just leave it out."""
    built = any("helpers_cpp" in name and name.endswith((".so", ".pyd")) for name in names)
    if not built and os.environ.get("MCORE_NO_HELPERS") != "1":
        compilers = (os.environ.get("CXX", "c++"), "g++", "clang++")
        found = any(shutil.which(compiler.split()[0]) for compiler in compilers)
        reason = Text.COMPILER_FAILED if found else Text.NO_COMPILER
        raise QueueError(Text.NO_HELPERS.format(reason=reason))


# The command line.


def _patch(queue, options):
    if options.show_conflict:
        return queue.show_conflict(Tree(options.path))
    return queue.patch(
        Tree(options.path),
        unverified=options.unverified,
        keep=options.keep,
        pristine=_pristine_at_hand,
    )


def _pristine_at_hand(base):
    """Upstream's files, to say in which line a tree differs; None if they can't be had."""
    try:
        return pristine(base)
    except QueueError:
        return None


def _unpatch(queue, options):
    return queue.unpatch(Tree(options.path), keep=options.keep)


def _status(queue, options):
    if options.path:
        fine, text = queue.status(Tree(options.path))
    else:
        # Python puts this script's folder first, a user's program has another one there.
        fine, text = status_of_import(queue, [path for path in sys.path if path != str(ROOT)])
    if not fine:
        print(text)
        sys.exit(1)
    return text


def _refresh(queue, options):
    if not options.lock:
        return refresh(queue, Tree(options.path), pristine, options.into)
    base = queue.base(options.base)
    read = Tree(options.path).read if options.path else pristine(base).get
    return relock(queue, base, "upstream", read)


def _export(queue, options):
    return export(queue, options.folder, queue.base(options.base))


def _fetch(queue, options):
    return fetch(queue.base(options.base), options.to)


def _parser():
    """The parser of the command line."""
    parser = argparse.ArgumentParser(prog="setup.py", description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def command(run, text):
        added = commands.add_parser(run.__name__.lstrip("_"), help=text, description=text)
        added.set_defaults(run=run)
        return added

    patch = command(_patch, "Patch a checkout in place, all or nothing.")
    patch.add_argument("path", type=Path)
    patch.add_argument("--unverified", action="store_true", help="patch a tree that is no pin")
    patch.add_argument("--keep", action="store_true", help="accept edits made after patching")
    patch.add_argument("--show-conflict", action="store_true", help="show what does not fit")
    unpatch = command(_unpatch, "Take the patches out of a checkout.")
    unpatch.add_argument("path", type=Path)
    unpatch.add_argument("--keep", action="store_true", help="keep edited files of the overlay")
    status = command(_status, "Say what a checkout holds, or what Python imports; exit 1 if stock.")
    status.add_argument("path", type=Path, nargs="?")
    renew = command(_refresh, "Turn the edits of a patched tree back into the patch files.")
    renew.add_argument("path", type=Path, nargs="?")
    renew.add_argument("--into", default="", metavar="PATCH", help="the patch that gets them")
    renew.add_argument("--lock", action="store_true", help="only renew the hashes of lock.json")
    renew.add_argument("--base", default=DEFAULT_BASE, help="with --lock")
    send = command(_export, "Write the series and the overlay as patches for `git am`.")
    send.add_argument("folder", type=Path)
    send.add_argument("--base", default=DEFAULT_BASE)
    download = command(_fetch, "Download the sdist of a base, check it, and print its path.")
    download.add_argument("base", nargs="?", default=DEFAULT_BASE)
    download.add_argument("--to", type=Path, metavar="FOLDER")
    return parser


def main(arguments=None):
    """Runs a command; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.run is _refresh and not (options.path or options.lock):
        parser.error("refresh needs the path of a patched tree, or --lock")
    try:
        print(options.run(Queue(ROOT), options))
    except QueueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
