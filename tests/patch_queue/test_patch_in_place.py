# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""`python setup.py patch|unpatch|status`: all or nothing, and back again byte for byte."""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.patch_queue.trees import GPT_MODEL, RECEIPT, ROOT, SELECTIVE, SELECTOR, contents, edit


def test_patch_and_unpatch_restore_every_byte(tree, setup_py):
    before = contents(tree)
    assert setup_py("patch", tree).returncode == 0
    patched = contents(tree)
    assert b"output_row_selector" in patched[GPT_MODEL]
    assert patched[SELECTOR] == (ROOT / SELECTOR).read_bytes()
    status = setup_py("status", tree)
    assert status.returncode == 0 and status.stdout.startswith("patched with selective")
    assert setup_py("unpatch", tree).returncode == 0
    assert contents(tree) == before


def test_git_checkout_is_patched_like_a_plain_tree(tree, setup_py):
    """Git's own settings and index must not matter to what is written."""
    git = ["git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git[:3], "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "upstream"], check=True)
    subprocess.run([*git[:3], "config", "core.autocrlf", "true"], check=True)
    subprocess.run([*git[:3], "config", "apply.whitespace", "error"], check=True)
    assert setup_py("patch", tree).returncode == 0
    assert b"\r\n" not in (tree / GPT_MODEL).read_bytes()
    assert setup_py("unpatch", tree).returncode == 0
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    assert not changed.stdout


def test_second_run_says_so_and_changes_nothing(tree, setup_py):
    setup_py("patch", tree)
    patched = contents(tree)
    again = setup_py("patch", tree)
    assert again.returncode == 0
    assert again.stdout == f"already patched with selective {SELECTIVE}, nothing to do\n"
    assert contents(tree) == patched
    setup_py("unpatch", tree)
    again = setup_py("unpatch", tree)
    assert again.returncode == 0 and "nothing to do" in again.stdout


def test_receipt_says_what_was_done(tree, setup_py):
    """Whoever finds the checkout can tell, and undo it, without this repository's state."""
    setup_py("patch", tree)
    receipt = json.loads((tree / RECEIPT).read_bytes())
    assert receipt["base"] == "0.16.1" and receipt["selective"] == SELECTIVE and receipt["verified"]
    assert GPT_MODEL in receipt["files"] and SELECTOR in receipt["overlay"]
    series = (ROOT / "patches" / "0.16.1" / "series").read_text().split()
    assert [patch["name"] for patch in receipt["patches"]] == series


def test_unpatch_keeps_later_edits(tree, setup_py):
    """slime's own patches may have come on top: they stay."""
    setup_py("patch", tree)
    with (tree / GPT_MODEL).open("a") as file:
        file.write("# a later edit\n")
    assert "edited since" in setup_py("status", tree).stdout
    done = setup_py("unpatch", tree)
    assert done.returncode == 0 and GPT_MODEL in done.stdout
    text = (tree / GPT_MODEL).read_text()
    assert text.endswith("# a later edit\n") and "output_row_selector" not in text


def test_unpatch_refuses_an_edit_in_its_own_lines(tree, setup_py):
    setup_py("patch", tree)
    edit(tree / GPT_MODEL, "return output_processor(", "return other_processor(")
    before = contents(tree)
    refused = setup_py("unpatch", tree)
    assert refused.returncode == 1 and GPT_MODEL in refused.stderr
    assert contents(tree) == before


def test_unpatch_refuses_to_delete_an_edited_overlay_file(tree, setup_py):
    setup_py("patch", tree)
    edit(tree / SELECTOR, "class OutputRowSelector:", "class OutputRowSelector(object):")
    refused = setup_py("unpatch", tree)
    assert refused.returncode == 1 and SELECTOR in refused.stderr
    assert setup_py("unpatch", tree, "--keep").returncode == 0
    assert "(object)" in (tree / SELECTOR).read_text()


def test_tree_that_is_no_pin_needs_unverified(tree, setup_py):
    """Every hunk fits, yet nobody has tested this text: only on request, and status says so."""
    with (tree / GPT_MODEL).open("a") as file:
        file.write("# another version's line\n")
    before = contents(tree)
    refused = setup_py("patch", tree)
    last = before[GPT_MODEL].count(b"\n")
    assert refused.returncode == 1 and f"{GPT_MODEL}:{last}" in refused.stderr
    assert "--unverified" in refused.stderr and contents(tree) == before
    assert setup_py("patch", tree, "--unverified").returncode == 0
    assert "UNVERIFIED" in setup_py("status", tree).stdout
    assert setup_py("unpatch", tree).returncode == 0
    assert contents(tree) == before


def test_unverified_tree_has_to_compile(tree, setup_py):
    with (tree / GPT_MODEL).open("a") as file:
        file.write("broken = (\n")
    before = contents(tree)
    refused = setup_py("patch", tree, "--unverified")
    assert refused.returncode == 1 and "does not compile" in refused.stderr
    assert contents(tree) == before


def test_file_of_the_overlay_that_is_there_already_is_refused(tree, setup_py):
    """A later upstream may have a file of that name: it is not ours to overwrite."""
    (tree / SELECTOR).write_text("theirs\n")
    refused = setup_py("patch", tree)
    assert refused.returncode == 1 and SELECTOR in refused.stderr
    assert (tree / SELECTOR).read_text() == "theirs\n"


def test_symbolic_link_is_refused(tree, setup_py, tmp_path):
    """The file behind it belongs to someone else."""
    other = tmp_path / "gpt_model.py"
    (tree / GPT_MODEL).rename(other)
    (tree / GPT_MODEL).symlink_to(other)
    text = other.read_bytes()
    refused = setup_py("patch", tree)
    assert refused.returncode == 1 and "symbolic link" in refused.stderr
    assert other.read_bytes() == text and not (tree / RECEIPT).exists()


def test_receipt_that_leads_out_of_the_tree_is_refused(tree, setup_py, tmp_path):
    setup_py("patch", tree)
    victim = tmp_path / "victim"
    victim.write_text("mine\n")
    receipt = json.loads((tree / RECEIPT).read_bytes())
    receipt["overlay"]["../../victim"] = "0" * 64
    (tree / RECEIPT).write_text(json.dumps(receipt))
    refused = setup_py("unpatch", tree)
    assert refused.returncode == 1 and "outside the tree" in refused.stderr
    assert victim.read_text() == "mine\n"


def test_two_runs_at_once_patch_once(tree, setup_py):
    with ThreadPoolExecutor() as threads:
        runs = list(threads.map(lambda _: setup_py("patch", tree), range(3)))
    assert [run.returncode for run in runs] == [0, 0, 0], [run.stderr for run in runs]
    assert sorted(run.stdout.split()[0] for run in runs) == ["already", "already", "patched"]
    assert setup_py("status", tree).returncode == 0
    assert not [
        path
        for path in os.listdir(tree)
        if path.startswith(".megatron-selective.") and path != RECEIPT
    ]


@pytest.mark.parametrize("kind", ["missing", "empty"])
def test_folder_that_is_no_tree(tmp_path, setup_py, kind):
    folder = tmp_path / "folder"
    if kind == "empty":
        folder.mkdir()
    refused = setup_py("patch", folder)
    assert refused.returncode == 1 and str(folder) in refused.stderr
    assert "Traceback" not in refused.stderr
