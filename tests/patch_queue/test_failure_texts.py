# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""What a user reads when something is wrong: what it is, that nothing was written, the way out."""

import hashlib
import io
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from patch_queue.build_tree import BuildTrees, unpack
from patch_queue.patches import Patch, apply_series
from patch_queue.queue import Queue
from patch_queue.texts import QueueError
from patch_queue.trees import Files, Tree
from tests.patch_queue.trees import GPT_MODEL, ROOT, SELECTIVE, contents, edit


def _assert_refused(run, *texts):
    assert run.returncode == 1, run.stdout
    assert not run.stdout and "Traceback" not in run.stderr
    for text in texts:
        assert text in run.stderr, run.stderr


def test_no_index(setup_py, tmp_path):
    """pip's own text would be a list of three hundred versions."""
    refused = setup_py(
        "fetch",
        XDG_CACHE_HOME=str(tmp_path),
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS="",
        PIP_CONFIG_FILE=os.devnull,
    )
    digest = Queue(ROOT).base("0.16.1").sdist["sha256"]
    _assert_refused(refused, "no package index reachable", digest, "PIP_FIND_LINKS=", "MCORE_SDIST")
    assert not list(tmp_path.rglob("*.tar.gz"))


def test_find_links_and_cache_serve_offline(setup_py, sdist, tmp_path):
    links, cache = tmp_path / "links", tmp_path / "cache"
    links.mkdir()
    shutil.copy(sdist, links)
    offline = dict(
        XDG_CACHE_HOME=str(cache), PIP_NO_INDEX="1", PIP_FIND_LINKS=str(links), MCORE_SDIST=""
    )
    fetched = setup_py("fetch", **offline)
    assert fetched.returncode == 0, fetched.stderr
    shutil.rmtree(links)
    assert setup_py("fetch", **offline).stdout == fetched.stdout
    assert Path(fetched.stdout.strip()).read_bytes() == sdist.read_bytes()


def test_sdist_of_another_hash(setup_py, tmp_path):
    short = tmp_path / "megatron_core-0.16.1.tar.gz"
    short.write_bytes(b"cut short")
    digest = hashlib.sha256(b"cut short").hexdigest()
    refused = setup_py("fetch", MCORE_SDIST=str(short))
    _assert_refused(refused, f"has sha256 {digest}", "lock.json says", "Not patching", "Delete")


def test_sdist_that_is_not_there(setup_py, tmp_path):
    refused = setup_py("fetch", MCORE_SDIST=str(tmp_path / "nowhere.tar.gz"))
    _assert_refused(refused, "nowhere.tar.gz is no file", "megatron_core-0.16.1.tar.gz")


def test_old_python():
    """The version is read from the lock, so a base that needs a newer Python says so itself."""
    queue = Queue(ROOT)
    object.__setattr__(queue.base("0.16.1"), "requires_python", ">=3.99")
    with pytest.raises(QueueError, match="0.16.1 needs Python >=3.99, this is 3"):
        BuildTrees(queue, "0.16.1")


def test_neither_base_nor_checkout(tmp_path):
    with pytest.raises(QueueError, match="neither a base .0.16.1.* nor the root of a Megatron"):
        BuildTrees(Queue(ROOT), str(tmp_path))


def test_drift(tree, setup_py):
    """A hunk's context is not there any more."""
    edit(tree / GPT_MODEL, "*,\n", "* ,\n")
    before = contents(tree)
    refused = setup_py("patch", tree)
    _assert_refused(refused, "0004-", f"does not fit {GPT_MODEL} near line", "Nothing was written")
    assert "Pins: 0.16.1" in refused.stderr and "--show-conflict" in refused.stderr
    shown = setup_py("patch", "--show-conflict", tree)
    assert shown.returncode == 0 and "the file has, in lines" in shown.stdout
    assert contents(tree) == before


def test_crlf(tree, setup_py):
    edit(tree / GPT_MODEL, "\n", "\r\n")
    before = contents(tree)
    _assert_refused(setup_py("patch", tree), f"{GPT_MODEL} has CRLF line ends", "core.autocrlf")
    assert contents(tree) == before


def test_edited_since_patching(tree, setup_py):
    setup_py("patch", tree)
    with (tree / GPT_MODEL).open("a") as file:
        file.write("# mine\n")
    _assert_refused(setup_py("patch", tree), f"edited since patching: {GPT_MODEL}", "--keep")
    assert setup_py("patch", "--keep", tree).returncode == 0


def test_patched_by_another_version(tree, tmp_path, setup_py):
    """A copy of the repository with the next number: two versions must not be mixed."""
    other = tmp_path / "other"
    for name in ("patches", "megatron"):
        shutil.copytree(ROOT / name, other / name)
    edit(other / "patches" / "lock.json", f'"selective": {SELECTIVE}', '"selective": 99')
    Queue(other).patch(Tree(tree))
    refused = setup_py("patch", tree)
    _assert_refused(refused, f"holds selective 99, this is {SELECTIVE}", "run unpatch first")
    assert setup_py("unpatch", tree).returncode == 0  # its receipt is all that it takes


def test_no_git(tree, setup_py, tmp_path):
    before = contents(tree)
    refused = setup_py("patch", tree, PATH=str(tmp_path))
    _assert_refused(refused, "git not found", "Install git, or install a prebuilt wheel")
    assert contents(tree) == before


def test_patch_that_changes_nothing(tree):
    """Inside another repository `git apply` skips every file and exits 0."""
    queue = Queue(ROOT)
    patch = queue.base("0.16.1").patches[0]
    (path,) = patch.files
    text = (tree / path).read_bytes()
    empty = Patch(patch.name, patch.header + b"diff --git a/%s b/%s\n" % ((path.encode(),) * 2))
    with pytest.raises(QueueError):
        apply_series({path: text}, [empty])


def test_result_that_the_lock_does_not_know(tree, tmp_path):
    """A patch that was edited by hand, or an offset that hit a twin of the right place."""
    other = tmp_path / "other"
    for name in ("patches", "megatron"):
        shutil.copytree(ROOT / name, other / name)
    patch = next((other / "patches" / "0.16.1").glob("0001-*"))
    edit(patch, "+    input_ = input_.contiguous()", "+    input_ = input_.contiguous( )")
    before = contents(tree)
    with pytest.raises(QueueError, match="lock.json says .* refresh --lock"):
        Queue(other).patch(Tree(tree))
    assert contents(tree) == before


def test_disk_that_takes_nothing(tree):
    """A read-only or full file system, as any user sees it."""

    class ReadOnly(Files):
        def lock(self, path):
            raise PermissionError(13, "Permission denied")

    before = contents(tree)
    with pytest.raises(QueueError, match="Permission denied. It is as it was before"):
        Queue(ROOT).patch(Tree(tree, ReadOnly()))
    assert contents(tree) == before


def test_shadowed_install(tree, setup_py, tmp_path):
    """A checkout on PYTHONPATH beats what pip installed: the fork is there and not used."""
    status = setup_py("status", PYTHONPATH=str(tree))
    assert status.returncode == 1
    assert f"megatron.core comes from {tree} (PYTHONPATH), stock 0.16.1" in status.stdout
    assert f"python setup.py patch {tree}" in status.stdout
    setup_py("patch", tree)
    status = setup_py("status", PYTHONPATH=str(tree))
    assert status.returncode == 0 and f"patched with selective {SELECTIVE}" in status.stdout


@pytest.mark.parametrize("kind", ["outside", "absolute", "link"])
def test_archive_that_leads_out_of_its_folder(tmp_path, kind):
    archive = tmp_path / "bad.tar.gz"
    names = dict(outside="tree/../../out", absolute=str(tmp_path / "out"), link="tree/link")
    member = tarfile.TarInfo(names[kind])
    if kind == "link":
        member.type, member.linkname = tarfile.SYMTYPE, str(tmp_path)
    with tarfile.open(archive, "w:gz") as file:
        file.addfile(member, io.BytesIO())
    (tmp_path / "into").mkdir()
    with pytest.raises(QueueError, match="Not unpacking"):
        unpack(archive, tmp_path / "into")
    assert not (tmp_path / "out").exists()
