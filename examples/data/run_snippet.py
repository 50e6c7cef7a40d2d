# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The Python tool of the episodes: runs the code on standard input, prints what a model would read.

An error becomes a traceback of the snippet's own frames, written here rather than by the
interpreter, whose wording (carets, source lines) differs from one Python to the next.
"""

import linecache
import os
import sys
import traceback

SNIPPET = "<snippet>"


def print_error(error: BaseException) -> None:
    """Prints a traceback that keeps to the snippet and to files in the working directory."""
    print("Traceback (most recent call last):")
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == SNIPPET or frame.filename.startswith(os.getcwd()):
            print(f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}')
            print(f"    {frame.line}")
    print(*traceback.format_exception_only(type(error), error), sep="", end="")


def main() -> None:
    """Runs standard input as a program in the working directory."""
    code = sys.stdin.read()
    sys.path[0] = os.getcwd()
    linecache.cache[SNIPPET] = (len(code), None, code.splitlines(keepends=True), SNIPPET)
    try:
        exec(compile(code, SNIPPET, "exec"), {"__name__": "__main__"})
    except Exception as error:
        print_error(error)


if __name__ == "__main__":
    main()
