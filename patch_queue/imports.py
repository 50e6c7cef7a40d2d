# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""What Python would import as megatron.core, and whether it is this repository's."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

from patch_queue.queue import Queue
from patch_queue.texts import QueueError, Text
from patch_queue.trees import CORE, Tree

# How a tree got on the search path.
CURRENT_FOLDER = "current folder"
PYTHONPATH = "PYTHONPATH"
INSTALLED = "installed"
EDITABLE = "editable install"


def status_of_import(queue: Queue, search_path: Sequence[str]) -> Tuple[bool, str]:
    """Which megatron.core Python would import, and whether it is this repository's.

    Args:
        search_path: What `sys.path` is where the user's program starts.
    """
    origins = find_core(search_path)
    if not origins:
        text = Text.NOT_INSTALLED.format(python=sys.executable, root=queue.root)
        return False, text
    first, how = origins[0]
    # A checkout may hold an egg-info of its own, which says nothing of what is installed.
    hides = how in (PYTHONPATH, CURRENT_FOLDER)
    others = [entry for entry in search_path if Path(entry or ".").resolve() != first]
    installed = _installed_version(others if hides else search_path)
    try:
        patched, state = queue.status(Tree(first), in_place=how != INSTALLED)
    except QueueError as error:
        patched, state = False, str(error)
    version = installed if how == INSTALLED and installed else Tree(first).version
    text = Text.COMES_FROM.format(
        tree=first, how=how, version=version if patched else f"stock {version}"
    )
    if installed and hides:
        text += Text.SHADOWED.format(installed=installed)
    return patched, f"{text}: {state}"


def find_core(search_path: Sequence[str]) -> List[Tuple[Path, str]]:
    """The trees from which megatron.core can come, and how each gets on the path, first one first.

    Nothing is imported. A folder `megatron/core` without `__init__.py`, as in this repository,
    loses against a real package anywhere on the path, so it is no candidate.
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
