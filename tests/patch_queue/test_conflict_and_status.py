# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Where a patch does not fit, and which Megatron Python would import."""

import shutil
import sys
from pathlib import Path

import pytest
from tests.patch_queue.trees import GPT_MODEL, ROOT, SELECTIVE, VERSION, contents, edit

from patch_queue.imports import status_of_import
from patch_queue.queue import Queue
from patch_queue.trees import Tree


def test_drift_names_patch_file_line_and_tree(tree, setup_py):
    """A hunk that does not fit: nothing is written, and the conflict can be looked at."""
    edit(tree / GPT_MODEL, "*,\n", "* ,\n")
    before = contents(tree)
    refused = setup_py("patch", tree)
    assert refused.returncode == 1
    assert (
        f"0004-add-output-row-selector-to-gpt-model.patch does not fit {GPT_MODEL} near line"
        in (refused.stderr)
    )
    assert "(folder, 0.16.1). Nothing was written. Pins: 0.16.1" in refused.stderr
    assert f"Run `python setup.py patch --show-conflict {tree}`" in refused.stderr
    shown = setup_py("patch", "--show-conflict", tree)
    assert "+        output_row_selector" in shown.stdout and "\n        * ,\n" in shown.stdout
    assert contents(tree) == before


def _site_packages(folder: Path, tree: Path) -> Path:
    """What an installed fork looks like to Python."""
    site = folder / "site-packages"
    shutil.copytree(tree / "megatron", site / "megatron")
    metadata = site / f"megatron_core-{VERSION}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {VERSION}\n")
    return site


def test_status_names_the_checkout_that_hides_the_installed_fork(tree, tmp_path, monkeypatch):
    """A checkout on PYTHONPATH beats the wheel, and the model knows no output_row_selector."""
    queue, patched = Queue(ROOT), Path(shutil.copytree(tree, tmp_path / "patched"))
    queue.patch(Tree(patched))
    site = _site_packages(tmp_path, patched)
    monkeypatch.setenv("PYTHONPATH", str(tree))
    fine, text = status_of_import(queue, [str(tree), str(site)])
    assert not fine
    assert text.startswith(
        f"megatron.core comes from {tree} (PYTHONPATH), stock 0.16.1;"
        f" the installed {VERSION} is not used"
    )
    assert text.endswith(f"Run `python setup.py patch {tree}`.")
    fine, text = status_of_import(queue, [str(site), str(tree)])
    assert fine and f"(installed), {VERSION}" in text


def test_status_on_the_command_line_sees_pythonpath(tree, setup_py):
    """Run as a script, Python puts this repository first; that must not hide the user's path."""
    stock = setup_py("status", PYTHONPATH=str(tree))
    assert stock.returncode == 1 and f"comes from {tree} (PYTHONPATH), stock" in stock.stdout
    setup_py("patch", tree)
    fork = setup_py("status", PYTHONPATH=str(tree))
    assert fork.returncode == 0 and f"patched with selective {SELECTIVE}" in fork.stdout


def test_status_without_megatron(monkeypatch):
    """An environment that has none, or only this repository's overlay."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    fine, text = status_of_import(Queue(ROOT), [str(ROOT)])
    assert not fine and f"megatron.core is not installed for {sys.executable}" in text
