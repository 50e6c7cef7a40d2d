#!/usr/bin/env python3
# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Build backend of the fork and command line of its patch queue.

As a PEP 517 backend it makes upstream's tree, patched and with the overlay added, and lets
setuptools build that with upstream's own metadata. Run as a script it patches a checkout in place:
see `python setup.py --help`. Importing it has no effect.
"""

import argparse
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from patch_queue import Queue, QueueError, Tree  # noqa: E402

DEFAULT_BASE = "0.16.1"


def fetch(base, folder=None):
    """Finds or downloads the pinned sdist of a base and checks its hash.

    Looks at `MCORE_SDIST`, then at the cache, then asks pip, which honours the user's index,
    proxy and find-links.

    Returns:
        Path: The file.
    """
    cache = Path(folder or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser())
    cache = cache if folder else cache / "megatron-core-selective"
    cached = cache / base.sdist["name"]
    given = os.environ.get("MCORE_SDIST")
    if given:
        return _checked(Path(given), base)
    if not cached.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _download(base, cached)
    return _checked(cached, base)


def _download(base, target):
    """Lets pip download the sdist into the cache."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("_PYPROJECT_HOOKS_")}
    # upstream's metadata hook runs `python3 -m pybind11`: it must be this interpreter
    environment["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), environment.get("PATH", "")]
    )
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(f"megatron-core=={base.name} --hash=sha256:{base.sdist['sha256']}\n")
        run = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            + ["--no-build-isolation", "--no-binary", "megatron-core"]
            + ["--dest", folder, "--requirement", str(requirements)],
            env=environment,
            stdout=sys.stderr,
        )
        found = Path(folder) / base.sdist["name"]
        if run.returncode or not found.exists():
            raise QueueError(
                f"megatron-core {base.name} sdist: no package index reachable. Put "
                f"{base.sdist['name']} (sha256 {base.sdist['sha256']}) in a folder and set "
                "PIP_FIND_LINKS=<folder>, or MCORE_SDIST=<file>."
            )
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.copyfile(found, partial)
        os.replace(partial, target)


def _checked(path, base):
    """The path, once its hash is the lock's."""
    if not path.is_file():
        raise QueueError(f"MCORE_SDIST={path} is no file; expected {base.sdist['name']}.")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != base.sdist["sha256"]:
        raise QueueError(
            f"{path} has sha256 {found}, lock.json says {base.sdist['sha256']}. Not patching. "
            "Delete the cached file if it was cut short."
        )
    return path


def _unpack(base, folder):
    """Unpacks the sdist of a base; returns the tree's root."""
    with tarfile.open(fetch(base)) as archive:
        archive.extractall(folder, filter="data")
    return next(path for path in Path(folder).iterdir() if path.is_dir())


def _materialise(config_settings):
    """Makes the patched tree that the wheel is built from, in a folder of its own."""
    if shutil.which("git") is None:
        raise QueueError(
            "git not found; it is needed to apply patches. Install git, or install a prebuilt wheel."
        )
    queue = Queue(ROOT)
    base = queue.base((config_settings or {}).get("mcore", DEFAULT_BASE))
    folder = ROOT / "build" / f"{base.name}-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tree = _unpack(base, folder)
    queue.patch(Tree(tree), base=base.name)
    version = tree / "megatron" / "core" / "package_info.py"
    version.write_text(
        f"{version.read_text().rstrip()}\n\n__version__ += '+selective.{queue.selective}'\n"
    )
    return tree


@contextlib.contextmanager
def _in_tree(config_settings):
    """Runs a hook of setuptools inside the patched tree, with upstream's own setup.py."""
    try:
        tree = _materialise(config_settings)
    except QueueError as error:
        sys.exit(f"error: {error}")
    before, path = Path.cwd(), os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), path])
    os.chdir(tree)
    try:
        from setuptools import build_meta

        yield build_meta
    finally:
        os.chdir(before)
        os.environ["PATH"] = path
        shutil.rmtree(tree.parent, ignore_errors=True)


def get_requires_for_build_wheel(config_settings=None):
    """PEP 517; `pyproject.toml` names everything."""
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    """PEP 517."""
    with _in_tree(config_settings) as setuptools_backend:
        return setuptools_backend.prepare_metadata_for_build_wheel(metadata_directory, None)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """PEP 517."""
    with _in_tree(config_settings) as setuptools_backend:
        return setuptools_backend.build_wheel(wheel_directory, None, None)


def build_sdist(sdist_directory, config_settings=None):
    """PEP 517; made from the patched tree, so that building it needs neither git nor network."""
    with _in_tree(config_settings) as setuptools_backend:
        return setuptools_backend.build_sdist(sdist_directory, None)


def _parser():
    """The command line."""
    parser = argparse.ArgumentParser(prog="setup.py", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    patch = commands.add_parser("patch", help="patch a checkout in place, all or nothing")
    patch.add_argument("path", type=Path)
    patch.add_argument("--unverified", action="store_true", help="patch a tree that is no pin")
    patch.add_argument("--keep", action="store_true", help="accept edits made after patching")
    patch.add_argument("--show-conflict", action="store_true", help="show what does not fit")
    unpatch = commands.add_parser("unpatch", help="take the patches out of a checkout")
    unpatch.add_argument("path", type=Path)
    unpatch.add_argument("--keep", action="store_true", help="keep edited overlay files")
    status = commands.add_parser("status", help="what a checkout holds, or what Python imports")
    status.add_argument("path", type=Path, nargs="?")
    refresh = commands.add_parser("refresh", help="turn an edited tree back into patch files")
    refresh.add_argument("path", type=Path)
    refresh.add_argument("--into", default="", help="the patch that edits go to")
    export = commands.add_parser("export", help="write a series that `git am` takes")
    export.add_argument("folder", type=Path)
    export.add_argument("--base", default=DEFAULT_BASE)
    download = commands.add_parser("fetch", help="download and check the sdist of a base")
    download.add_argument("base", nargs="?", default=DEFAULT_BASE)
    download.add_argument("--to", type=Path)
    return parser


def _pristine(base):
    """Upstream's own files of a base, by path."""
    with tempfile.TemporaryDirectory() as folder:
        tree = _unpack(base, folder)
        return {
            path.relative_to(tree).as_posix(): path.read_bytes()
            for path in tree.rglob("*")
            if path.is_file()
        }


def main(arguments=None):
    """Runs a command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        queue = Queue(ROOT)
        if options.command == "patch" and options.show_conflict:
            print(queue.show_conflict(Tree(options.path)))
        elif options.command == "patch":
            print(queue.patch(Tree(options.path), unverified=options.unverified, keep=options.keep))
        elif options.command == "unpatch":
            print(queue.unpatch(Tree(options.path), keep=options.keep))
        elif options.command == "status":
            # Python puts this folder first, the user's program won't
            elsewhere = [path for path in sys.path if path not in ("", str(ROOT))]
            fine, text = (
                queue.status(Tree(options.path))
                if options.path
                else queue.status_of_import(elsewhere)
            )
            print(text)
            return 0 if fine else 1
        elif options.command == "refresh":
            print(queue.refresh(Tree(options.path), _pristine, options.into))
        elif options.command == "export":
            print(queue.export(options.folder, queue.base(options.base)))
        else:
            print(fetch(queue.base(options.base), options.to))
    except QueueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
