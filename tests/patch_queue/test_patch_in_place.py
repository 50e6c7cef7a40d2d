# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""`python setup.py patch|unpatch|status` on upstream's sdist: all or nothing, and back again."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GPT_MODEL = "megatron/core/models/gpt/gpt_model.py"


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(ROOT / "setup.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
    )


def contents(tree):
    return {
        path.relative_to(tree).as_posix(): path.read_bytes()
        for path in tree.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="session")
def sdist(tmp_path_factory):
    fetched = run("fetch")
    assert fetched.returncode == 0, fetched.stderr
    return Path(fetched.stdout.strip())


@pytest.fixture
def tree(sdist, tmp_path):
    folder = tmp_path / "a path with spaces"
    folder.mkdir()
    subprocess.run(["tar", "xzf", str(sdist), "-C", str(folder)], check=True)
    return next(folder.iterdir())


def test_patch_and_unpatch_restore_every_byte(tree):
    before = contents(tree)
    assert run("patch", tree).returncode == 0
    patched = contents(tree)
    assert b"output_row_selector" in patched[GPT_MODEL]
    assert "megatron/core/models/common/output_row_selector.py" in patched
    assert run("status", tree).stdout.startswith("patched with selective")
    assert run("unpatch", tree).returncode == 0
    assert contents(tree) == before


def test_second_run_says_so_and_changes_nothing(tree):
    run("patch", tree)
    patched = contents(tree)
    again = run("patch", tree)
    assert again.returncode == 0 and "nothing to do" in again.stdout
    assert contents(tree) == patched


def test_unpatch_keeps_later_edits(tree):
    run("patch", tree)
    with (tree / GPT_MODEL).open("a") as file:
        file.write("# a later edit\n")
    assert run("unpatch", tree).returncode == 0
    text = (tree / GPT_MODEL).read_text()
    assert text.endswith("# a later edit\n") and "output_row_selector" not in text


@pytest.mark.parametrize("old, new", [("*,\n", "* ,\n"), ("\n", "\r\n"), ("GPT", "gpt")])
def test_edited_tree_is_refused_and_left_alone(tree, old, new):
    data = (tree / GPT_MODEL).read_bytes()
    assert old.encode() in data
    (tree / GPT_MODEL).write_bytes(data.replace(old.encode(), new.encode()))
    before = contents(tree)
    refused = run("patch", tree)
    assert refused.returncode == 1 and GPT_MODEL in refused.stderr
    assert contents(tree) == before


def test_refresh_of_a_fresh_tree_changes_no_patch(tree):
    before = contents(ROOT / "patches")
    run("patch", tree)
    assert run("refresh", tree).returncode == 0
    assert contents(ROOT / "patches") == before


def test_sdist_of_another_hash_is_refused(tree, tmp_path, monkeypatch):
    short = tmp_path / "megatron_core-0.16.1.tar.gz"
    short.write_bytes(b"cut short")
    monkeypatch.setenv("MCORE_SDIST", str(short))
    refused = run("fetch")
    assert refused.returncode == 1 and "lock.json says" in refused.stderr
