# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""A small MambaModel without Mamba layers, whose mixer needs a CUDA extension."""

import sys
from unittest import mock

import torch

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.mamba import MambaModel
from megatron.core.ssm import mamba_block
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from tests.unit_tests.harness.models import VOCAB_SIZE, RMSNorm, device

# Attention and MLP in turn: the config needs a layer for each.
PATTERN = "*-*-"


def make_mamba_model(config: TransformerConfig, **kwargs) -> MambaModel:
    """A MambaModel of Megatron's local layers, the same weights every time."""
    gpt_layer = get_gpt_layer_local_spec().submodules
    stack = ModuleSpec(
        module=mamba_block.MambaStack,
        submodules=mamba_block.MambaStackSubmodules(
            attention_layer=ModuleSpec(
                module=TransformerLayer,
                submodules=TransformerLayerSubmodules(
                    input_layernorm=RMSNorm,
                    self_attention=gpt_layer.self_attention,
                    self_attn_bda=get_bias_dropout_add,
                ),
            ),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(
                    pre_mlp_layernorm=RMSNorm, mlp=gpt_layer.mlp, mlp_bda=get_bias_dropout_add
                ),
            ),
        ),
    )
    torch.manual_seed(7)
    # The stack's own norm is Transformer Engine's, which is not in its spec. Later versions define
    # the stack elsewhere, and the name that they look up is there.
    stack_module = sys.modules[mamba_block.MambaStack.__module__]
    with mock.patch.object(stack_module, "TENorm", RMSNorm):
        model = MambaModel(
            config,
            stack,
            vocab_size=VOCAB_SIZE,
            max_sequence_length=128,
            hybrid_override_pattern=PATTERN,
            **{"position_embedding_type": "rope", **kwargs},
        )
    return model.to(device())
