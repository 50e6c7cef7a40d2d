# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The series as upstream would get it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Dict, List

from patch_queue.patches import Patch, make_diff
from patch_queue.queue import Base, Queue
from patch_queue.texts import QueueError, Text

OUR_COPYRIGHT = (
    b"# Copyright (c) 2026, the megatron-core-selective authors."
    b" Licensed under the Apache License, Version 2.0.\n"
)
UPSTREAM_COPYRIGHT = b"# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved.\n"


def export(queue: Queue, folder: Path, base: Base) -> str:
    """Writes the series as upstream would get it, with our own files as patches; for `git am`.

    The overlay comes first, because the patches call it, and the tests last.
    """
    if folder.exists() and any(folder.iterdir()):
        raise QueueError(Text.EXPORT_EXISTS.format(path=folder))
    folder.mkdir(parents=True, exist_ok=True)
    added, tests = queue.overlay(base), queue.own_files("tests/unit_tests")
    # Upstream has its own files of these names in the folders of its tests.
    tests = {p: d for p, d in tests.items() if Path(p).name not in ("conftest.py", "__init__.py")}
    letters = [
        *_new_files(base, "0001-add-selective-output.patch", "Add selective output", added),
        *base.patches,
        *_new_files(base, "add-tests.patch", "Add tests of selective output", tests),
    ]
    for number, letter in enumerate(letters, start=1):
        subject = f"Subject: [PATCH {number}/{len(letters)}] ".encode()
        pattern = rb"^Subject: (\[PATCH[^\]]*\] )?"
        header = re.sub(pattern, lambda _: subject, letter.header, count=1, flags=re.MULTILINE)
        name = re.sub(r"^\d+-", "", Path(letter.name).name)
        diff = letter.text[len(letter.header) :]
        (folder / f"{number:04}-{name}").write_bytes(header + diff)
    return Text.EXPORTED.format(count=len(letters), path=folder)


def _new_files(base: Base, name: str, subject: str, files: Dict[str, bytes]) -> List[Patch]:
    """A patch that adds the given files under upstream's copyright; none if there is no file."""
    if not files:
        return []
    lines = base.patches[0].header.splitlines()
    sender = [line for line in lines if line.startswith((b"From ", b"From: ", b"Date: "))]
    header = b"\n".join([*sender, b"Subject: " + subject.encode(), b"", b""])
    after = {p: d.replace(OUR_COPYRIGHT, UPSTREAM_COPYRIGHT, 1) for p, d in files.items()}
    return [Patch(name, header + make_diff({}, after))]
