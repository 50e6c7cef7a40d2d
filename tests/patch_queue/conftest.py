# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Fixtures: upstream's sdist, a tree made of it, and the command line."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Callable

import pytest

from tests.patch_queue.trees import ROOT


@pytest.fixture(scope="session")
def setup_py() -> Callable:
    """Runs `python setup.py` with the given arguments and changes of the environment."""

    def run(*arguments, **environment) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, str(ROOT / "setup.py"), *map(str, arguments)],
            capture_output=True,
            text=True,
            env={**os.environ, **environment},
        )

    return run


@pytest.fixture(scope="session")
def sdist(setup_py) -> Path:
    """The pinned sdist, from the cache or the index."""
    fetched = setup_py("fetch")
    assert fetched.returncode == 0, fetched.stderr
    return Path(fetched.stdout.strip())


@pytest.fixture
def tree(sdist, tmp_path) -> Path:
    """An unpatched tree, in a folder that a careless command line would cut in two."""
    folder = tmp_path / "a path with spaces"
    with tarfile.open(sdist) as archive:
        archive.extractall(folder)
    return next(folder.iterdir())
