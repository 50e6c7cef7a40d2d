# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The tree that a wheel is built from: upstream's sdist or a checkout, patched, with the overlay.

Trees are kept in `build/` under the hash of everything they are made of, because pip and others
call the hooks of a build two or three times, each in a process of its own. Only the editable tree
has a fixed name: it is what Python imports afterwards, and it keeps its user's edits.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Dict, Iterator, Optional

from patch_queue.queue import Base, Queue
from patch_queue.texts import QueueError, Text
from patch_queue.trees import CORE, RECEIPT, VERSION_FILE, Tree

# What upstream's build reads of a checkout. The rest may be data of any size.
ROOT_FILES = ("setup.py", "setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
# An extension that an image has built would hide that ours wasn't.
LEFT_OUT = ("__pycache__", "*.pyc", "helpers_cpp*.so")


def fetch(base: Base, folder: Optional[Path] = None) -> Path:
    """Finds or downloads the pinned sdist of a base and checks its hash.

    Looks at the file that the environment variable `MCORE_SDIST` names, then at the cache, then
    asks pip, which honours the user's index, proxy and find-links.

    Args:
        base: The base.
        folder: Where to keep the file, the user's cache folder by default.

    Raises:
        QueueError: It can't be had, or has another hash than lock.json says.
    """
    if base.sdist is None:
        raise QueueError(Text.NO_SDIST.format(base=base.name))
    given = os.environ.get("MCORE_SDIST")
    if given:
        if not Path(given).is_file():
            raise QueueError(Text.NO_FILE.format(path=given, **base.sdist))
        return _checked(Path(given), base)
    if folder is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(cache) / "megatron-core-selective"
    cached = folder / base.sdist["name"]
    if not cached.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _download(base, cached)
    return _checked(cached, base)


def _checked(path: Path, base: Base) -> Path:
    """The path, once its hash is the lock's."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != base.sdist["sha256"]:
        raise QueueError(
            Text.WRONG_SDIST.format(path=path, found=found, wanted=base.sdist["sha256"])
        )
    return path


def _download(base: Base, target: Path) -> None:
    """Lets pip download the sdist of a base."""
    # With those variables of the outer build, the inner pip would look for our backend.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("_PYPROJECT_HOOKS_")}
    environment["PATH"] = path_with_this_python()
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(
            f"megatron-core=={base.name} --hash=sha256:{base.sdist['sha256']}\n"
        )
        # pip runs the metadata hook of what it downloads. In a build all that this hook of
        # upstream's needs is here, and an environment of its own for it would be downloaded too.
        options = ["--no-deps", "--no-binary=megatron-core", "--quiet"]
        if all(map(importlib.util.find_spec, ("setuptools", "pybind11", "packaging"))):
            options.append("--no-build-isolation")
        run = subprocess.run(
            [sys.executable, "-m", "pip", "download", *options]
            + [f"--dest={folder}", f"--requirement={requirements}"],
            env=environment,
            capture_output=True,
            text=True,
        )
        found = Path(folder) / base.sdist["name"]
        if run.returncode or not found.exists():
            said = run.stderr.strip().splitlines() or ["nothing"]
            text = Text.NO_INDEX.format(base=base.name, said=said[-1][:300], **base.sdist)
            raise QueueError(text)
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.copyfile(found, partial)
        os.replace(partial, target)


def path_with_this_python() -> str:
    """PATH with the running Python first: upstream's setup.py calls `python3 -m pybind11`."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def unpack(archive: Path, folder: Path) -> Path:
    """Unpacks an sdist into a folder and returns the root of what was in it.

    Raises:
        QueueError: A member is a link, a device, or would land outside of the folder.
    """
    with tarfile.open(archive) as members:
        for member in members.getmembers():
            outside = member.name.startswith("/") or ".." in Path(member.name).parts
            if outside or not (member.isfile() or member.isdir()):
                raise QueueError(Text.BAD_MEMBER.format(archive=archive.name, member=member.name))
        # The first releases of Python 3.10 and 3.11 don't have the filter.
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        members.extractall(folder, **safe)
    return next(path for path in folder.iterdir() if path.is_dir())


def pristine(base: Base) -> Dict[str, bytes]:
    """Upstream's own files of a base, by path."""
    with tempfile.TemporaryDirectory() as folder:
        tree = unpack(fetch(base), Path(folder))
        return {
            path.relative_to(tree).as_posix(): path.read_bytes()
            for path in tree.rglob("*")
            if path.is_file()
        }


class BuildTrees:
    """The trees under `build/` of a repository.

    Args:
        queue: The repository's patch queue.
        choice: What `-C mcore=` names: a base, or a Megatron checkout, which is only read.
    """

    def __init__(self, queue: Queue, choice: str) -> None:
        self.queue = queue
        self.folder = queue.root / "build"
        self.checkout: Optional[Path] = None
        if choice in queue.bases:
            self.base = queue.base(choice)
        else:
            self.checkout = Path(choice).expanduser().resolve()
            if not (self.checkout / CORE / "__init__.py").is_file():
                raise QueueError(Text.NEITHER.format(value=choice, pins=queue.pins))
            self.base = queue.recognise(Tree(self.checkout))[1]
        self._check_python()

    def _check_python(self) -> None:
        needed = self.base.requires_python
        if sys.version_info[:2] >= _as_version(needed):
            return
        found = ".".join(map(str, sys.version_info[:3]))
        fitting = [
            base.name
            for base in self.queue.bases.values()
            if base.sdist and sys.version_info[:2] >= _as_version(base.requires_python)
        ]
        text = Text.OLD_PYTHON.format(base=self.base.name, wanted=needed, found=found)
        raise QueueError(text + (Text.OTHER_BASE.format(base=fitting[-1]) if fitting else ""))

    def for_wheel(self) -> Path:
        """Makes the tree for a wheel or an sdist, unless it is there; returns its root."""
        target = self.folder / f"{self.base.name}-{self._key()}"
        if not target.exists():  # renamed last, so it is whole
            for old in self.folder.glob(f"{self.base.name}-*"):
                shutil.rmtree(old)
            with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                made = self._make(Path(folder))
                (made / RECEIPT).unlink(missing_ok=True)  # pip's own record is enough there
                os.replace(made, target)
        return target

    def for_editable(self) -> Path:
        """Makes the tree that an editable install imports, or brings it up to date.

        Its overlay files are links to this repository's; what else is edited in it goes back into
        the patches with `refresh`.

        Raises:
            QueueError: It holds other patches by now than the repository.
        """
        target = self.folder / f"editable-{self.base.name}"
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                os.replace(self._make(Path(folder)), target)
        elif self.queue.inspect(Tree(target), self.base.name).kind == "other":
            raise QueueError(Text.EDITABLE_OLD.format(path=target))
        else:
            self.queue.patch(Tree(target), base=self.base.name, keep=True)
        for path in self.queue.overlay(self.base):
            (target / path).unlink(missing_ok=True)
            (target / path).symlink_to(self.queue.root / path)
        return target

    def _make(self, folder: Path) -> Path:
        """A patched tree with our version, somewhere in `folder`."""
        if self.checkout:
            # Worked out on the checkout itself, so that a refusal names it.
            changes = self.queue.changes(Tree(self.checkout))
            tree = folder / "checkout"
            ignored = shutil.ignore_patterns(*LEFT_OUT)
            shutil.copytree(self.checkout / "megatron", tree / "megatron", ignore=ignored)
            for name in (*ROOT_FILES, RECEIPT):
                if (self.checkout / name).is_file():
                    shutil.copyfile(self.checkout / name, tree / name)
            Tree(tree).commit(changes)
        else:
            tree = unpack(fetch(self.base), folder)
            self.queue.patch(Tree(tree), base=self.base.name)
        version = tree / VERSION_FILE
        # Later versions of upstream append the commit of whatever repository encloses them.
        text = version.read_text().replace("'NO_VCS_VERSION', '0'", "'NO_VCS_VERSION', '1'")
        version.write_text(f"{text}\n__version__ += '+selective.{self.queue.selective}'\n")
        return tree

    def _key(self) -> str:
        """A hash of everything that the tree is made of."""
        parts = [str(self.queue.selective).encode()]
        parts += [patch.text for patch in self.base.patches]
        parts += [part for item in self.queue.overlay().items() for part in map(_bytes, item)]
        # The code that makes it, too.
        parts += [path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))]
        if self.checkout:
            files = [self.checkout / name for name in (*ROOT_FILES, RECEIPT)]
            files += sorted((self.checkout / "megatron").rglob("*"))
            files = [path for path in files if path.is_file() and path.suffix != ".pyc"]
            parts += [part for path in files for part in (str(path).encode(), path.read_bytes())]
        else:
            parts.append(self.base.sdist["sha256"].encode())
        whole = hashlib.sha256()
        for part in parts:
            whole.update(hashlib.sha256(part).digest())
        return whole.hexdigest()[:16]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps two builds of one repository apart, from making a tree to building in it."""
        self.folder.mkdir(exist_ok=True)
        with open(self.folder / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _as_version(requires_python: str):
    return tuple(map(int, requires_python.lstrip(">=").split(".")))


def _bytes(value) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
