# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Building the fork: offline, from a checkout, editable, and what a build refuses."""

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from tests.patch_queue.trees import GPT_MODEL, ROOT, SELECTOR, VERSION, contents, edit

from patch_queue import build_tree
from patch_queue.build_tree import BuildTrees, unpack
from patch_queue.queue import Queue
from patch_queue.texts import QueueError

# A build that finds no compiler takes seconds. What helpers_cpp needs is tested by its refusal.
NO_COMPILER = {"CC": "false", "CXX": "false"}
QUICK = {**NO_COMPILER, "MCORE_NO_HELPERS": "1"}


@pytest.fixture
def repository(tmp_path) -> Path:
    """A copy of this repository, whose build/ is nobody else's."""
    copy = tmp_path / "repository"
    for name in ("patch_queue", "patches", "megatron"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml"):
        shutil.copyfile(ROOT / name, copy / name)
    return copy


@pytest.fixture
def hook(repository, sdist, tmp_path):
    """Calls a hook of the backend as pip does, in a process of its own and without any index."""

    def run(name, settings=None, **environment):
        code = f"import setup; print('made', setup.{name}({str(tmp_path)!r}, {settings!r}))"
        offline = {"MCORE_SDIST": str(sdist), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=repository,
            env={**os.environ, **offline, **environment},
            capture_output=True,
            text=True,
        )

    return run


def _made(run, folder: Path) -> Path:
    assert run.returncode == 0, run.stderr[-2000:]
    line = next(line for line in run.stdout.splitlines() if line.startswith("made "))
    return folder / line[len("made ") :]


def test_import_of_setup_has_no_effect(repository):
    """Build front ends import the backend to ask what it needs."""
    before = contents(repository)
    code = "import sys; path = list(sys.path); import setup; assert sys.path == path"
    subprocess.run([sys.executable, "-B", "-c", code], cwd=repository, check=True)
    assert contents(repository) == before


def test_wheel_is_built_offline_from_a_given_sdist(hook, tmp_path):
    """The whole of megatron-core, patched, with the overlay and our version, without an index."""
    wheel = _made(hook("build_wheel", **QUICK), tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert {"megatron/core/__init__.py", GPT_MODEL, SELECTOR} <= set(names)
        assert "megatron/__init__.py" not in names
        assert not any("patch_queue" in name or name == "setup.py" for name in names)
        assert b"output_row_selector" in archive.read(GPT_MODEL)
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        assert f"\nVersion: {VERSION}\n" in archive.read(metadata).decode()


def test_hooks_of_one_build_share_a_tree_until_something_changes(hook, repository, tmp_path):
    """Hooks run in several processes; a stale tree would be built after an edit of the overlay."""
    _made(hook("prepare_metadata_for_build_wheel", **QUICK), tmp_path)
    (first,) = (repository / "build").glob("0.16.1-*")
    _made(hook("prepare_metadata_for_build_wheel", **QUICK), tmp_path)
    assert list((repository / "build").glob("0.16.1-*")) == [first]
    with (repository / SELECTOR).open("a") as file:
        file.write("# edited\n")
    _made(hook("prepare_metadata_for_build_wheel", **QUICK), tmp_path)
    (second,) = (repository / "build").glob("0.16.1-*")
    assert second != first and (second / SELECTOR).read_text().endswith("# edited\n")


def test_editable_tree_follows_the_overlay_and_keeps_edits(hook, repository, tmp_path):
    """Edits of the overlay are live; a second install leaves edits of upstream's files alone."""
    wheel = _made(hook("build_editable", **QUICK), tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        # setuptools' default finder would import an empty megatron.core from the repository root
        assert not any("finder" in name for name in archive.namelist())
        path_file = next(name for name in archive.namelist() if name.endswith(".pth"))
        tree = Path(archive.read(path_file).decode().strip())
    assert tree == repository / "build" / "editable-0.16.1"
    assert (tree / SELECTOR).resolve() == repository / SELECTOR
    with (tree / GPT_MODEL).open("a") as file:
        file.write("# a later edit\n")
    _made(hook("build_editable", **QUICK), tmp_path)
    assert (tree / GPT_MODEL).read_text().endswith("# a later edit\n")


@pytest.mark.parametrize("state", ["upstream", "patched", "edited"])
def test_wheel_of_a_checkout_never_modifies_it(hook, tree, setup_py, tmp_path, state):
    """An image's own tree, with its own patches on top of ours, becomes the wheel."""
    if state != "upstream":
        assert setup_py("patch", tree).returncode == 0
    if state == "edited":
        with (tree / GPT_MODEL).open("a") as file:
            file.write("# the image's own\n")
    before = contents(tree)
    wheel = _made(hook("build_wheel", {"mcore": str(tree)}, **QUICK), tmp_path)
    assert contents(tree) == before
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(GPT_MODEL).decode()
        assert "output_row_selector" in text and SELECTOR in archive.namelist()
        assert text.endswith("# the image's own\n") == (state == "edited")


def test_checkout_that_does_not_fit_is_named(hook, tree):
    """The text names the checkout, not the copy that the build would have made of it."""
    edit(tree / GPT_MODEL, "*,\n", "* ,\n")
    refused = hook("build_wheel", {"mcore": str(tree)}, **QUICK)
    assert refused.returncode == 1 and f"--show-conflict {tree}" in refused.stderr


def test_missing_compiler_is_an_error(hook):
    """Upstream's extension is optional: the wheel would go out without it, and without a word."""
    refused = hook("build_wheel", **NO_COMPILER)
    assert refused.returncode == 1
    assert "helpers_cpp was not built (" in refused.stderr
    assert "Install g++, or set MCORE_NO_HELPERS=1" in refused.stderr


def test_old_python_is_told_which_one_it_has_to_be(monkeypatch):
    """A base that wants a newer Python says so before anything is fetched."""
    monkeypatch.setattr(build_tree.sys, "version_info", (3, 9, 18))
    text = r"megatron-core 0.16.1 needs Python >=3.10, this is 3.9.18\."
    with pytest.raises(QueueError, match=text):
        BuildTrees(Queue(ROOT), "0.16.1")


def test_choice_that_is_neither_base_nor_checkout(hook):
    """A misspelt base must not be taken for a folder."""
    refused = hook("build_wheel", {"mcore": "0.16.9"}, **QUICK)
    assert refused.returncode == 1 and "-C mcore=0.16.9 is neither a base (0.16.1" in refused.stderr


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside"])
def test_archive_member_that_points_outside_is_refused(tmp_path, name):
    """Also where tarfile has no filter yet, as in the first releases of 3.10 and 3.11."""
    archive = tmp_path / "an.tar.gz"
    with tarfile.open(archive, "w:gz") as members:
        member = tarfile.TarInfo(name)
        member.size = 1
        members.addfile(member, io.BytesIO(b"x"))
    (tmp_path / "into").mkdir()
    with pytest.raises(QueueError, match="Not unpacking"):
        unpack(archive, tmp_path / "into")
    assert not any((tmp_path / "into").iterdir())


def test_archive_member_that_is_a_link_is_refused(tmp_path):
    """A link could lead a later member out of the folder."""
    archive = tmp_path / "an.tar.gz"
    with tarfile.open(archive, "w:gz") as members:
        member = tarfile.TarInfo("a/link")
        member.type, member.linkname = tarfile.SYMTYPE, "/"
        members.addfile(member)
    (tmp_path / "into").mkdir()
    with pytest.raises(QueueError, match="Not unpacking"):
        unpack(archive, tmp_path / "into")


def test_no_index_names_the_file_that_is_missing(setup_py, tmp_path):
    """pip's own text lists every version there is, and not the hash."""
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    refused = setup_py("fetch", XDG_CACHE_HOME=str(tmp_path), MCORE_SDIST="", **offline)
    assert refused.returncode == 1
    assert "megatron-core 0.16.1 sdist: no package index reachable. Put " in refused.stderr
    assert "megatron_core-0.16.1.tar.gz (sha256 86522fea" in refused.stderr
    assert "PIP_FIND_LINKS=<folder>, or MCORE_SDIST=<file>" in refused.stderr


def test_sdist_comes_from_find_links(setup_py, sdist, tmp_path):
    """A folder of files instead of an index, as in most closed networks."""
    links = tmp_path / "links"
    links.mkdir()
    shutil.copyfile(sdist, links / sdist.name)
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(links), "MCORE_SDIST": ""}
    fetched = setup_py("fetch", XDG_CACHE_HOME=str(tmp_path), **offline)
    assert fetched.returncode == 0, fetched.stderr
    assert Path(fetched.stdout.strip()).read_bytes() == sdist.read_bytes()


@pytest.mark.parametrize("given", [True, False], ids=["given", "cached"])
def test_file_of_another_hash_is_refused(setup_py, tmp_path, given):
    """Neither a wrong file nor a download that was cut short may be built from."""
    folder = tmp_path / "megatron-core-selective"
    folder.mkdir()
    short = folder / "megatron_core-0.16.1.tar.gz"
    short.write_bytes(b"cut short")
    refused = setup_py(
        "fetch", XDG_CACHE_HOME=str(tmp_path), MCORE_SDIST=str(short) if given else ""
    )
    found = hashlib.sha256(b"cut short").hexdigest()
    assert refused.returncode == 1
    assert f"{short} has sha256 {found}, lock.json says 86522fea" in refused.stderr
    assert "Not patching. Delete the cached file if it was cut short." in refused.stderr
