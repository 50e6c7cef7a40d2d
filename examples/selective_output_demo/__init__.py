# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Full against selected output of a real GPTModel on the CPU; `python examples/demo.py` runs it."""
