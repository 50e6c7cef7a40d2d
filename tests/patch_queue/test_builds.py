# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The fork as a user gets it: each front end and interpreter at hand, offline, from a checkout."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patch_queue.trees import ROOT, SELECTOR, VERSION, contents, edit

# What a process prints about the megatron.core that it would import, without importing it: that
# needs torch.
_WHAT_IS_INSTALLED = """
import importlib.metadata, importlib.util, json, os
core = os.path.dirname(importlib.util.find_spec("megatron.core").origin)
print(json.dumps({
    "version": importlib.metadata.version("megatron-core"),
    "core": core,
    "selector": os.path.exists(core + "/models/common/output_row_selector.py"),
    "helpers": any(name.startswith("helpers_cpp") for name in os.listdir(core + "/datasets")),
}))
"""


def _interpreters():
    """The Pythons from 3.10 to 3.12 on this machine, the one of this process among them."""
    found = {}
    candidates = [sys.executable]
    for minor in (10, 11, 12):
        candidates.append(shutil.which(f"python3.{minor}"))
        root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
        candidates += sorted(root.glob(f"3.{minor}.*/bin/python"))
    for candidate in filter(None, candidates):
        command = [str(candidate), "-c", "import sys, venv; print(sys.version_info[:2])"]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode == 0 and run.stdout.strip() in ("(3, 10)", "(3, 11)", "(3, 12)"):
            found.setdefault(run.stdout.strip(), str(candidate))
    return [pytest.param(path, id=version) for version, path in sorted(found.items())]


@pytest.fixture
def clone(tmp_path):
    """A copy of the repository's files, as a clone would have them."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-coz", "--exclude-standard"],
        capture_output=True,
        check=True,
    )
    folder = tmp_path / "clone"
    for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def _make_environment(python, folder):
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    return str(folder / "bin" / "python")


def _pip(python, *arguments, **environment):
    """pip of an environment; no dependency is installed, upstream's torch is a gigabyte."""
    return subprocess.run(
        [python, "-m", "pip", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def _check_installed(python, folder):
    """The fork is what Python finds in a folder."""
    run = subprocess.run(
        [python, "-c", _WHAT_IS_INSTALLED], cwd=folder, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["version"] == VERSION and found["selector"] and found["helpers"], found
    return Path(found["core"])


@pytest.mark.slow
@pytest.mark.parametrize("python", _interpreters())
def test_install_and_editable_install(python, clone, tmp_path):
    """The repository's own `megatron/` must not hide the fork, wherever Python starts."""
    python = _make_environment(python, tmp_path / "environment")
    done = _pip(python, "install", "--no-deps", clone)
    assert done.returncode == 0, done.stdout + done.stderr
    for folder in (tmp_path, clone):
        assert tmp_path / "environment" in _check_installed(python, folder).parents
    status = subprocess.run([python, "setup.py", "status"], cwd=clone, capture_output=True)
    assert status.returncode == 0, status.stdout

    done = _pip(python, "install", "--no-deps", "--editable", clone)
    assert done.returncode == 0, done.stdout + done.stderr
    for folder in (tmp_path, clone):
        core = _check_installed(python, folder)
    edit(clone / SELECTOR, "class OutputRowSelector:", "class Edited:")
    assert "class Edited:" in (core.parents[1] / SELECTOR).read_text()
    assert _pip(python, "uninstall", "--yes", "megatron-core").returncode == 0


@pytest.mark.slow
def test_build_makes_a_wheel_from_its_own_sdist(clone, tmp_path):
    """The sdist holds the patched tree: building it needs neither git nor the pinned sdist."""
    built = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(tmp_path / "dist"), str(clone)],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    names = sorted(path.name for path in (tmp_path / "dist").iterdir())
    assert len(names) == 2 and all(name.startswith(f"megatron_core-{VERSION}") for name in names)
    python = _make_environment(sys.executable, tmp_path / "environment")
    wheel = next((tmp_path / "dist").glob("*.whl"))
    assert _pip(python, "install", "--no-deps", wheel).returncode == 0
    _check_installed(python, tmp_path)


@pytest.mark.slow
def test_uv(clone, tmp_path):
    python = _make_environment(sys.executable, tmp_path / "environment")
    done = subprocess.run(
        [sys.executable, "-m", "uv", "pip", "install", "--no-deps", "--python", python, str(clone)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    _check_installed(python, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("patched", [False, True], ids=["unpatched", "patched"])
def test_wheel_from_a_checkout(clone, tree, tmp_path, setup_py, patched):
    """An image's own tree, which is read and left alone."""
    if patched:
        setup_py("patch", tree)
    before = contents(tree)
    python = _make_environment(sys.executable, tmp_path / "environment")
    done = _pip(python, "install", "--no-deps", "-C", f"mcore={tree}", clone)
    assert done.returncode == 0, done.stdout + done.stderr
    _check_installed(python, tmp_path)
    assert contents(tree) == before


@pytest.mark.slow
def test_without_a_compiler(clone, tmp_path):
    """Upstream's extension is optional: the wheel would lack it, and nobody would be told."""
    python = _make_environment(sys.executable, tmp_path / "environment")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("git", "sh"):
        (tools / name).symlink_to(shutil.which(name))
    arguments = ("wheel", "--no-deps", "--wheel-dir", tmp_path / "wheels", clone)
    refused = _pip(python, *arguments, PATH=str(tools))
    assert refused.returncode != 0
    text = refused.stdout + refused.stderr
    assert "helpers_cpp was not built (no C++ compiler found)" in text
    assert "MCORE_NO_HELPERS=1" in text
    done = _pip(python, *arguments, PATH=str(tools), MCORE_NO_HELPERS="1")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_offline_with_a_given_sdist(clone, sdist, tmp_path):
    """Neither index nor cache: the file, and build requirements that are installed already."""
    python = _make_environment(sys.executable, tmp_path / "environment")
    requirements = ("setuptools", "pybind11", "packaging", "wheel")
    assert _pip(python, "install", *requirements).returncode == 0
    done = _pip(
        python,
        *("install", "--no-deps", "--no-build-isolation", clone),
        MCORE_SDIST=str(sdist),
        XDG_CACHE_HOME=str(tmp_path / "cache"),
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS="",
        PIP_CONFIG_FILE=os.devnull,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    _check_installed(python, tmp_path)
