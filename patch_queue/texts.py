# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""What the queue says, in one place, so that the texts can be read and tested together."""


class QueueError(Exception):
    """Something the user has to know and can act upon; its text is the whole message."""


class Text:
    """The texts; each names the files it is about and the way out."""

    # any tree
    NOT_A_FOLDER = "{path} is not a folder."
    NOT_A_TREE = (
        "{path} holds none of the files that the patches touch ({files})."
        " Is it the root of a Megatron tree?"
    )
    NO_GIT = (
        "git not found; it is needed to apply patches. Install git, or install a prebuilt wheel."
    )
    BAD_PATH = "{where} names {path}, which is outside the tree. Not patching."
    BAD_RECEIPT = "{path} can't be read as a receipt ({error}). Restore it, or the tree."
    LINK = "{path} is a symbolic link; the file behind it would be replaced. Nothing was written."
    NOT_WRITTEN = "can't write in {path}: {error}. It is as it was before."
    HALF_WRITTEN = (
        "can't write in {path}: {error}; undoing what was written failed as well: {undo_error}."
        " Run the command again once that is mended: it first brings the old files back."
    )
    EDITED_SINCE_INTERRUPTION = (
        "{path} was edited after an interrupted run. Its old text is {backup}; put back the text"
        " that you want, then delete {journal}."
    )
    WAITING = "waiting for another run on {path} ..."

    # patch
    PATCHED = (
        "patched {path} with selective {selective} ({base}):"
        " {patches} patches, {overlay} files added"
    )
    UNVERIFIED = (
        "; UNVERIFIED, this tree is not {base}: every hunk fitted and the files compile,"
        " nothing else is known"
    )
    ALREADY = "already patched with selective {selective}, nothing to do"
    ALREADY_KEPT = (
        "already patched with selective {selective}, later edits kept ({files}), nothing to do"
    )
    OTHER = (
        "{path} holds selective {theirs}, this is {ours}:"
        " run unpatch first (python setup.py unpatch {path})."
    )
    OTHER_PATCHES = (
        "{path} holds selective {theirs} of other patches than this repository's:"
        " run unpatch first (python setup.py unpatch {path})."
    )
    EDITED = (
        "{path} was edited since patching: {files}; use --keep to leave it so, or restore the"
        " files (unpatch takes the patches out and keeps other edits)."
    )
    DOES_NOT_FIT = "{patch} does not fit {file} near line {line}"
    DRIFT = (
        "{refusal} ({tree}). Nothing was written. Pins: {pins}."
        " Run `python setup.py patch --show-conflict {path}`."
    )
    UNKNOWN = (
        "{file}{line} is not what {base} has there ({tree}). Nothing was written. Pins: {pins}."
        " Every hunk fits: `python setup.py patch --unverified {path}` applies them all the same."
    )
    CRLF = (
        "{file} has CRLF line ends, {base} has LF ({tree}). Nothing was written."
        " `git config core.autocrlf false`, then check out again."
    )
    STALE_LOCK = (
        "lock.json does not list the files that the series of {base} touches."
        " Run `python setup.py refresh --lock --base {base}`."
    )
    NO_COMPILE = "{file}:{line} does not compile after patching: {error}. Nothing was written."
    NO_CHANGE = "{patch} changed no file: hash of {file} is still upstream's. Nothing was written."
    WRONG_RESULT = (
        "{file} has sha256 {found} after the patches, lock.json says {wanted}. Nothing was"
        " written. If the patches were edited on purpose, run `python setup.py refresh --lock`."
    )
    OVERLAY_EXISTS = "{file} exists in {path} already and is not ours. Nothing was written."
    NO_CONFLICT = "every patch fits {path}."

    # unpatch
    NOT_PATCHED = "{path} is not patched (there is no receipt in it), nothing to do"
    UNPATCHED = (
        "took selective {selective} out of {path}: {files} files restored, {overlay} removed"
    )
    UNPATCHED_KEPT = "; later edits kept in {kept}."
    UNPATCH_CONFLICT = (
        "{file} was edited near line {line} since patching, where our change is. Nothing was"
        " written. Take that edit back, then run unpatch again."
    )
    UNPATCH_WRONG = (
        "taking the patches out of {file} does not give upstream's text. Nothing was written."
    )
    OVERLAY_EDITED = (
        "{files} came with the patches and was edited since; unpatch would delete it. Nothing was"
        " written. --keep leaves it in the tree."
    )

    # status
    STATUS_PATCHED = "patched with selective {selective}, base {base} ({revision})."
    STATUS_UNVERIFIED = " UNVERIFIED: before that it was none of the pins ({pins})."
    STATUS_INCOMPLETE = "patched with selective {selective}, but {files} is missing or differs."
    STATUS_EDITED = "patched with selective {selective}, base {base}; edited since: {files}."
    STATUS_UPSTREAM = "not patched, it is {base} ({revision}) as upstream made it."
    STATUS_RESTORED = "not patched any more, upstream's files were put back."
    STATUS_UNKNOWN = "unknown, {files} match none of the pins ({pins})."
    STATUS_INTERRUPTED = "half patched, a run was interrupted."
    ADVICE_PATCH = " Run `python setup.py patch {path}`."
    ADVICE_INSTALL = " Run `pip install .` in {root}."
    NOT_INSTALLED = "megatron.core is not installed for {python}. Run `pip install .` in {root}."
    COMES_FROM = "megatron.core comes from {tree} ({how}), {version}"
    SHADOWED = "; the installed {installed} is not used"

    # refresh and export
    NO_SUCH_BASE = "there is no base {name!r} in lock.json. Pins: {pins}."
    NO_SUCH_PATCH = "there is no patch {name!r} in the series of {base}: {names}."
    NO_PATCH_FOR = (
        "{file} was edited, and no patch touches it. Name the patch it belongs to: --into NAME."
    )
    INTO_CONFLICT = (
        "the edit of {file} does not fit the text that {patch} sees."
        " Name a later patch with --into."
    )
    NOT_ITS_UPSTREAM = "{file} as upstream has it is not what {path} was patched from."
    REFRESH_UNVERIFIED = (
        "{path} was patched with --unverified; refresh needs a tree that was {base}."
    )
    OVERLAY_CONFLICT = "{file} was edited both in {path} and here. Bring the two together first."
    EMPTY_PATCH = "{patch} would be empty. Take it out of the series, then run refresh again."
    REFRESHED = "refreshed {files}"
    NOTHING_NEW = (
        "the patches, the overlay and lock.json say already what {path} holds, nothing to do"
    )
    SHARED = (
        "\n{patch} is also in the series of {base}:"
        " run `python setup.py refresh --lock --base {base}`."
    )
    STRAY = "\nnot taken over, because neither upstream nor the overlay has it: {files}"
    EXPORT_EXISTS = "{path} is not empty."
    EXPORTED = "wrote {count} patches to {path}: git am {path}/*.patch"

    # the sdist, and the tree that a wheel is built from
    NO_INDEX = (
        "megatron-core {base} sdist: no package index reachable. Put {name} (sha256 {sha256}) in a"
        " folder and set PIP_FIND_LINKS=<folder>, or MCORE_SDIST=<file>. pip said: {said}"
    )
    WRONG_SDIST = (
        "{path} has sha256 {found}, lock.json says {wanted}. Not patching."
        " Delete the cached file if it was cut short."
    )
    NO_FILE = "MCORE_SDIST={path} is no file; expected {name} (sha256 {sha256})."
    BAD_MEMBER = "{archive} holds {member}, which is no plain file inside of it. Not unpacking."
    OLD_PYTHON = "megatron-core {base} needs Python {wanted}, this is {found}."
    OTHER_BASE = " For this Python: pip install -C mcore={base} ..."
    NO_SDIST = "{base} has no sdist; name a checkout of it (-C mcore=<checkout>, refresh PATH)."
    NEITHER = (
        "-C mcore={value} is neither a base ({pins}) nor the root of a Megatron checkout: it has no"
        " megatron/core/__init__.py."
    )
    INTERRUPTED = (
        "{path} is half patched, a run was interrupted. Run `python setup.py patch {path}`."
    )
    NO_HELPERS = (
        "helpers_cpp was not built ({reason}). Install g++, or set MCORE_NO_HELPERS=1 to build"
        " without it; GPT datasets will not import."
    )
    NO_COMPILER = "no C++ compiler found"
    COMPILER_FAILED = "the compiler's messages are above"
    EDITABLE_OLD = (
        "{path} holds other patches than this repository's by now. Save what you edited there,"
        " delete the folder, then install again."
    )
