# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Full against selected output on packed tool-use episodes: memory, time, equality; no GPU.

    python examples/demo.py [--help]
"""

import sys

if __name__ == "__main__":
    # Imported here because every measured process imports this file anew, and what only the
    # parent needs must not count in their memory.
    try:
        from selective_output_demo.cli import main
    except ModuleNotFoundError as error:
        sys.exit(f"error: {error.name} is missing; `make demo` installs everything the demo needs.")

    main()
