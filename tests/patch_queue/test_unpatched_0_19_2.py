# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Our own files in an unpatched megatron-core 0.19.2, whose `GPTModel` takes an `output_processor`.

They have to work there without a patch. That version wants Python 3.12 and has another torch than
the environment of these tests may have, so the unit tests run in an environment of its own. It is
kept in the user's cache folder: 5 GB with PyPI's torch, which needs the libraries of CUDA to be
imported, and 1 GB where pip finds one for CPUs. Made anew it takes about a minute.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import List, Optional

import pytest

from patch_queue.build_tree import fetch, unpack
from patch_queue.queue import Base, Queue
from tests.patch_queue.trees import ROOT

# No base of the queue, which has nothing to patch in it.
_BASE = Base(
    name="0.19.2",
    revision="core_v0.19.2",
    patches=(),
    states={},
    requires_python=">=3.12",
    sdist={
        "name": "megatron_core-0.19.2.tar.gz",
        "sha256": "de643eee32007a7504ad52f061103fe7432503603b6321c16c861eb67dbd3353",
    },
)
_MINORS = (12, 13)
# Of requirements-dev.txt, so that there is one place for versions.
_REQUIREMENTS = ("torch", "triton", "numpy", "pytest", "hypothesis")
# What doesn't ask for an argument that only the patches add.
_TESTS = (
    "tests/unit_tests/fusions/test_*.py",
    "tests/unit_tests/harness/test_reference_attention.py",
    "tests/unit_tests/*/test_log_prob_output*.py",
    "tests/unit_tests/models/test_output_row_selector.py",
)
# Where a process would import megatron.core from, found without importing it.
_WHERE = "import importlib.util; print(importlib.util.find_spec('megatron.core').origin)"


def _find_python() -> Optional[str]:
    """A Python that 0.19.2 runs on, this process's own if it is one."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [sys.executable]
    for minor in _MINORS:
        candidates += [
            shutil.which(f"python3.{minor}"),
            *sorted(root.glob(f"3.{minor}.*/bin/python")),
        ]
    # pyenv has a python3.12 on PATH that may refuse to start.
    code = f"import sys, venv; sys.exit(sys.version_info[:2] not in {[(3, m) for m in _MINORS]})"
    for candidate in filter(None, candidates):
        if subprocess.run([str(candidate), "-c", code], capture_output=True).returncode == 0:
            return str(candidate)
    return None


def _requirements() -> List[str]:
    """What the unit tests need, and Megatron itself."""
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    wanted = [line.partition("#")[0].strip() for line in lines]
    found = [line for line in wanted if re.match(r"[\w-]*", line)[0] in _REQUIREMENTS]
    assert len(found) == len(_REQUIREMENTS), found
    return [*found, "packaging>=24.2"]


def _make_environment(python: str) -> str:
    """The Python of an environment for 0.19.2, kept from one run to the next."""
    requirements = _requirements()
    key = hashlib.sha256(json.dumps([os.path.realpath(python), requirements]).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "megatron-core-selective" / f"unpatched-{_BASE.name}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made_of = folder / "made-of"
        if not made_of.exists() or made_of.read_text() != key:
            # `--clear`: what another run left half done, or made of something else, goes.
            subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
            # Neither bytecode nor a copy of the downloads: both would cost time and gigabytes for
            # what is installed once and hardly imported.
            options = ["--quiet", "--no-compile", "--no-cache-dir"]
            done = subprocess.run(
                [folder / "bin" / "python", "-m", "pip", "install", *options, *requirements],
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            made_of.write_text(key)
    return str(folder / "bin" / "python")


@pytest.fixture
def unpatched_tree(tmp_path, monkeypatch) -> Path:
    """0.19.2 as released, with links to our own files beside upstream's."""
    with monkeypatch.context() as patch:
        # It names another sdist, and the Python of this process is not the one that imports this.
        patch.delenv("MCORE_SDIST", raising=False)
        patch.setenv("PIP_IGNORE_REQUIRES_PYTHON", "1")
        tree = unpack(fetch(_BASE), tmp_path / "sdist")
    for path in Queue(ROOT).overlay():
        assert not (tree / path).exists(), f"{path} would replace a file of {_BASE.name}"
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).symlink_to(ROOT / path)
    return tree


@pytest.mark.slow
def test_unit_tests_on_unpatched_0_19_2(unpatched_tree):
    """No file of upstream's is edited: what fails here needs a patch, or a name that moved."""
    files = {pattern: sorted(map(str, ROOT.glob(pattern))) for pattern in _TESTS}
    assert all(files.values()), f"a pattern matches no test: {files}"
    python = _find_python()
    if python is None:
        versions = ", ".join(f"3.{minor}" for minor in _MINORS)
        pytest.skip(f"megatron-core {_BASE.name} needs Python {versions}, and none is here")
    python = _make_environment(python)
    # Of this process nothing but the machine's own settings: a torchrun around it would be taken
    # for the ranks of the tests.
    environment = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"}
    environment["PYTHONPATH"] = str(unpatched_tree)

    def run(*arguments):
        return subprocess.run(
            [python, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
        )

    where = run("-c", _WHERE)
    assert where.stdout.startswith(str(unpatched_tree)), where.stdout + where.stderr
    done = run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not full and not slow"),
        *sum(files.values(), []),
    )
    assert done.returncode == 0, done.stdout + done.stderr
