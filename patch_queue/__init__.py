# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The patch queue: what it knows of a Megatron tree, and everything it does to one.

A *base* is an upstream version that `patches/lock.json` pins. A *series* is the list of mbox
patches against it, the *overlay* is this repository's own `megatron/` folder. A *tree* is a folder
with upstream's files in it: an unpacked sdist, a checkout, or the tree that a wheel is built from.
All of them are patched by the same code.

A tree is recognised by the sha256 of the files that the patches touch, never by its version
string. Patches are applied to a scratch copy by `git apply`, the result is compared with the lock,
and only then written, through a journal that brings the old tree back if anything fails. A receipt
in the tree holds all that taking the patches out again needs.

Used by `setup.py` and by the tests, never installed; it needs the standard library and git.
"""
