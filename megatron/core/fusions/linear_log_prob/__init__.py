# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Log-probabilities and entropy of tokens from hidden states, without the logits of all rows."""

from megatron.core.fusions.linear_log_prob.keep_set import KeepSet
from megatron.core.fusions.linear_log_prob.linear_log_prob import linear_log_prob

__all__ = ["KeepSet", "linear_log_prob"]
