# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Output layers, and settings beside them, that log-probabilities can't be had from."""

import torch

from megatron.core.models.common.language_module.language_module import LanguageModule
from tests.unit_tests.harness.models import HIDDEN_SIZE, device


def _subclass(**overridden):
    def change(model):
        kind = type(model.output_layer)
        model.output_layer.__class__ = type("Adapted", (kind,), overridden)

    return change


class _ValueHead(torch.nn.Linear):
    """A critic's head in the place of the output layer."""

    sequence_parallel = False

    def forward(self, hidden_states, weight=None, runtime_gather_output=None):
        """As an output layer is called."""
        return super().forward(hidden_states), None


def _set_on_head(**values):
    def change(model):
        for name, value in values.items():
            setattr(model.output_layer, name, value)

    return change


def _value_head(model):
    model.output_layer = _ValueHead(HIDDEN_SIZE, 1, device=device())


def _defer(model):
    model.config.defer_embedding_wgrad_compute = True


def _fsdp(model):
    head = model.output_layer.weight
    head = model.shared_embedding_or_output_weight() if head is None else head
    head.__fsdp_param__ = True


def _scaled(model):
    model._scale_logits = lambda logits: logits * 2


# What is refused, the name that the error gives it, and a change that makes a model so: the refusal
# comes before any use of the setting.
UNSUPPORTED_SETTINGS = {
    "forward overridden": ("output_layer", _subclass(forward=lambda self, *args, **kwargs: None)),
    "product overridden": (
        "output_layer",
        _subclass(_forward_impl=lambda self, *args, **kwargs: None),
    ),
    "forward of the instance": ("output_layer", _set_on_head(forward=lambda *args, **kwargs: None)),
    "product of the instance": (
        "output_layer",
        _set_on_head(_forward_impl=lambda *args, **kwargs: None),
    ),
    "value head": ("output_layer", _value_head),
    "deferred weight gradient": ("defer_embedding_wgrad_compute", _defer),
    "sharded further": ("gtp_remat_size", _set_on_head(gtp_remat_size=2)),
    "fsdp": ("fsdp", _fsdp),
}
if hasattr(LanguageModule, "_scale_logits"):
    UNSUPPORTED_SETTINGS["another scale"] = ("scale_logits", _scaled)
