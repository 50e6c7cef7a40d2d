# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Small real models, their input, and forward-backward runs of them."""

from typing import Callable, Dict, Optional

import torch
from torch import Tensor

from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

# No power of two, and no two alike: a transposed or a wrongly sharded dimension can't fit.
HIDDEN_SIZE = 40
VOCAB_SIZE = 88
SEQ_LENGTH = 20


class RMSNorm(torch.nn.Module):
    """Stands in for the local specs' norm, which refuses sequence parallelism without apex."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        # Its gradient is a part only on each rank that sees a shard of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension, in fp32."""
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(
            x.dtype
        ) * self.weight


def device() -> torch.device:
    """Where models live."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_config(**overrides) -> TransformerConfig:
    """Configuration of a small model under the parallel sizes that are in place."""
    settings = dict(
        num_layers=2,
        hidden_size=HIDDEN_SIZE,
        num_attention_heads=4,
        ffn_hidden_size=48,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        use_cpu_initialization=True,
        # Larger than usual: logits far from zero show errors that small ones hide.
        init_method_std=0.2,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        # No fused kernel exists on CPU.
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
    )
    settings.update(overrides)
    if settings.get("bf16"):
        settings.update(params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16)
    return TransformerConfig(**settings)


def make_gpt_model(
    config: TransformerConfig,
    *,
    core_attention: Optional[type] = None,
    pre_process: bool = True,
    post_process: bool = True,
    final_norm: bool = True,
    seed: int = 7,
    **kwargs,
) -> GPTModel:
    """A GPTModel of Megatron's local layers, the same weights for the same seed.

    Without `final_norm` the decoder ends with its last layer: what a schedule plan of a dense
    model computes, asked for or not, where upstream's bug is not patched.
    """
    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    if core_attention is not None:
        layer.submodules.self_attention.submodules.core_attention = core_attention
    num_layers = config.num_layers // config.pipeline_model_parallel_size
    num_layers //= config.virtual_pipeline_model_parallel_size or 1
    torch.manual_seed(seed)
    model = GPTModel(
        config,
        TransformerBlockSubmodules(
            layer_specs=[layer] * num_layers, layer_norm=RMSNorm if final_norm else None
        ),
        vocab_size=VOCAB_SIZE,
        max_sequence_length=128,
        pre_process=pre_process,
        post_process=post_process,
        **{"parallel_output": True, "position_embedding_type": "rope", **kwargs},
    )
    return model.to(device())


def make_batch(batch_size: int, seq_length: int = SEQ_LENGTH, seed: int = 3) -> Dict[str, Tensor]:
    """Input of a model, the same on every rank for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB_SIZE, (batch_size, seq_length), generator=generator)
    future = torch.ones(1, 1, seq_length, seq_length, dtype=torch.bool).triu(1)
    return dict(
        input_ids=tokens.to(device()),
        position_ids=torch.arange(seq_length).expand(batch_size, -1).contiguous().to(device()),
        attention_mask=future.to(device()),
    )


def gradients(model: torch.nn.Module) -> Dict[str, Tensor]:
    """Copies of the gradients by parameter name, and an end to the old ones.

    `main_grad`, where the head and others accumulate into that, else `grad`.
    """
    found = {}
    for name, parameter in model.named_parameters():
        gradient = getattr(parameter, "main_grad", None)
        if gradient is None:
            gradient = parameter.grad
        assert gradient is not None, f"{name} has no gradient"
        found[name] = gradient.detach().clone()
        parameter.grad = None
    return found


def weights_of_loss(shape, seed: int = 11) -> Tensor:
    """Weights of a loss that is linear in the logits, so that they are the logits' gradient."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device())


def rows_of_this_rank(mask: Tensor, sequence_parallel: bool) -> Tensor:
    """The mask `[s, b]`, or `[s / tp, b]` with sequence parallelism, of this rank's hidden states."""
    rows = mask.transpose(0, 1)
    if sequence_parallel:
        tp_size = parallel_state.get_tensor_model_parallel_world_size()
        rows = rows.chunk(tp_size)[parallel_state.get_tensor_model_parallel_rank()]
    return rows.to(device())


MASKS: Dict[str, Callable[[int, int, int], Tensor]] = {}


def _mask(build: Callable) -> Callable:
    MASKS[build.__name__.lstrip("_")] = build
    return build


@_mask
def _random(batch_size: int, seq_length: int, tp_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.rand(batch_size, seq_length, generator=generator) < 0.4


@_mask
def _empty(batch_size: int, seq_length: int, tp_size: int) -> Tensor:
    return torch.zeros(batch_size, seq_length, dtype=torch.bool)


@_mask
def _full(batch_size: int, seq_length: int, tp_size: int) -> Tensor:
    return torch.ones(batch_size, seq_length, dtype=torch.bool)


@_mask
def _one_row(batch_size: int, seq_length: int, tp_size: int) -> Tensor:
    mask = _empty(batch_size, seq_length, tp_size)
    mask[-1, seq_length // 3] = True
    return mask


@_mask
def _last_shard(batch_size: int, seq_length: int, tp_size: int) -> Tensor:
    mask = _empty(batch_size, seq_length, tp_size)
    mask[:, seq_length - seq_length // max(tp_size, 2) :] = True
    return mask


@_mask
def _alternating(batch_size: int, seq_length: int, tp_size: int) -> Tensor:
    return (torch.arange(batch_size * seq_length) % 2 == 0).view(batch_size, seq_length)


@_mask
def _holes(batch_size: int, seq_length: int, tp_size: int) -> Tensor:
    """Spans as of a conversation, of unlike lengths in each sequence; the last has none."""
    mask = _empty(batch_size, seq_length, tp_size)
    for sequence in range(max(batch_size - 1, 1)):
        mask[sequence, 3 + sequence : 9] = True
        mask[sequence, 12 : 17 + sequence] = True
    return mask
