# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""What the tests of the queue look at in a tree."""

import json
from pathlib import Path
from typing import Dict

ROOT = Path(__file__).resolve().parents[2]
SELECTIVE = json.loads((ROOT / "patches" / "lock.json").read_text())["selective"]
VERSION = f"0.16.1+selective.{SELECTIVE}"
GPT_MODEL = "megatron/core/models/gpt/gpt_model.py"
SELECTOR = "megatron/core/models/common/output_row_selector.py"
RECEIPT = ".megatron-selective.json"


def contents(tree: Path) -> Dict[str, bytes]:
    """Every file of a tree."""
    return {
        path.relative_to(tree).as_posix(): path.read_bytes()
        for path in tree.rglob("*")
        if path.is_file()
    }


def edit(path: Path, old: str, new: str) -> None:
    """Replaces text that has to be there."""
    data = path.read_bytes()
    assert old.encode() in data, f"{old!r} is not in {path}"
    path.write_bytes(data.replace(old.encode(), new.encode()))
