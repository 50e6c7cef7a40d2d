# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""One tensor-parallel rank: builds the model, runs one way of computing log-probs, measures it."""

import os
import re
import resource
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import numpy
import torch
import torch.distributed as dist

from selective_output_demo.megatron_on_cpu import PackedCausalAttention, RMSNorm, use_cpu_as_device
from selective_output_demo.packing import PackedSequence

PADDED_VOCABULARY = 152064
TENSOR_PARALLEL = 2


@dataclass
class Job:
    """What a pair of processes does.

    Attributes:
        selected: Whether only `rows` are projected to the vocabulary, or all and `rows` are
            picked afterwards.
        packed: The micro-batch.
        rows: One bool a row of the micro-batch; those whose log-probs are in the loss.
        bf16: Whether the model computes in bfloat16 and Float16Module upcasts its output, or all
            is float32.
        layers: Number of transformer layers.
        hidden_size: Hidden size.
        steps: Timed steps of each kind.
        values_folder: Where to leave the last log-probs of each kind and all gradients, in fp32, if
            anywhere.
    """

    selected: bool
    packed: PackedSequence
    rows: List[bool]
    bf16: bool
    layers: int
    hidden_size: int
    steps: int
    values_folder: Optional[Path] = None


@dataclass
class Step:
    """Sent to the parent after every step that a rank has run."""


@dataclass
class RankResult:
    """Sent to the parent when a rank is done. Bytes are of this rank alone.

    Attributes:
        logits_bytes: Size of the fp32 logits.
        idle_bytes: Peak memory before the first step, libraries and model included.
        peak_bytes: Peak memory of the process, by kind of step.
        seconds: Duration of each step, by kind of step.
    """

    logits_bytes: int
    idle_bytes: int
    peak_bytes: Dict[str, int]
    seconds: Dict[str, List[float]]


@dataclass
class Failure:
    """Sent to the parent instead of a result."""

    error: str


FORWARD, TRAINING = "forward only", "training"


def run_rank(job: Job, rank: int, rendezvous: str, threads: int, connection: Connection) -> None:
    """Runs `job` as one rank of two; sends a Step each, then a RankResult, or else a Failure.

    Args:
        job: What to run.
        rank: This process's tensor-parallel rank.
        rendezvous: Path of a file that does not exist yet, the same on both ranks.
        threads: Number of threads to compute with.
        connection: The parent's other end.
    """
    # Ctrl-C is the parent's to handle: it ends its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        # Megatron warns of every GPU package that is missing.
        warnings.simplefilter("ignore")
        torch.set_num_threads(threads)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        dist.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=TENSOR_PARALLEL
        )
        connection.send(Rank(job, rank).measure(connection.send))
        dist.barrier()
        dist.destroy_process_group()
    except BrokenPipeError:  # the parent is gone
        raise SystemExit(1) from None
    except Exception:
        connection.send(Failure(traceback.format_exc()))
        raise SystemExit(1) from None


class Rank:
    """The model and the micro-batch of one rank.

    Args:
        job: What to run.
        rank: This process's tensor-parallel rank.
    """

    def __init__(self, job: Job, rank: int):
        self.job = job
        self.rank = rank
        packed = job.packed
        self.tokens = torch.tensor([packed.tokens])
        self.positions = torch.tensor([packed.positions])
        self.rows = torch.tensor([job.rows])
        self.targets = torch.tensor([packed.targets])
        self.advantages = torch.tensor([packed.advantages])
        self.model = build_model(job)
        self.packed_seq_params = describe_packing(packed)
        self.logits_bytes = 0

    def measure(self, report: Callable[[Any], None]) -> RankResult:
        """Runs every step, forward only first because a peak never goes down again.

        An untimed step comes before all: it is the one that waits for memory from the system.
        """
        idle_bytes = peak_memory()
        self.forward_step()
        report(Step())
        values, peak_bytes, seconds = {}, {}, {}
        for kind, step in ((FORWARD, self.forward_step), (TRAINING, self.training_step)):
            durations = []
            for _ in range(self.job.steps):
                dist.barrier()
                start = time.perf_counter()
                values[kind] = step().numpy()
                dist.barrier()
                durations.append(time.perf_counter() - start)
                report(Step())
            peak_bytes[kind] = peak_memory()
            seconds[kind] = durations
        if self.job.values_folder:
            for name, parameter in self.model.named_parameters():
                values[name] = parameter.grad.float().numpy()
            numpy.savez(self.job.values_folder / f"rank{self.rank}.npz", **values)
        return RankResult(self.logits_bytes, idle_bytes, peak_bytes, seconds)

    def forward_step(self) -> torch.Tensor:
        """Computes the rows' log-probs as the old policy's or the reference's are."""
        self.model.eval()
        with torch.no_grad():
            return self.compute_log_probs()

    def training_step(self) -> torch.Tensor:
        """Computes a policy-gradient loss over the rows and its gradients."""
        self.model.train()
        self.model.zero_grad(set_to_none=True)
        log_probs = self.compute_log_probs()
        loss = -(self.advantages[self.rows] * log_probs).sum() / log_probs.numel()
        loss.backward()
        return log_probs.detach()

    def compute_log_probs(self) -> torch.Tensor:
        """Returns the log-probs [N] of the rows' targets, fp32, equal on both ranks."""
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        selector = {"output_row_selector": self.rows} if self.job.selected else {}
        logits = self.model(
            self.tokens,
            self.positions,
            attention_mask=None,
            packed_seq_params=self.packed_seq_params,
            **selector,
        )
        self.logits_bytes = logits.numel() * logits.element_size()
        if self.job.selected:
            return -vocab_parallel_cross_entropy(logits, self.targets[self.rows][None])[0]
        return -vocab_parallel_cross_entropy(logits, self.targets)[self.rows]


def build_model(job: Job) -> torch.nn.Module:
    """Builds Megatron's GPTModel at tensor parallel 2 with sequence parallelism, on the CPU."""
    use_cpu_as_device()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=TENSOR_PARALLEL)
    # The one that saves no CUDA generator; nothing here draws a random number.
    initialize_rng_tracker(inference_rng_tracker=True)
    config = TransformerConfig(
        num_layers=job.layers,
        hidden_size=job.hidden_size,
        ffn_hidden_size=3 * job.hidden_size,
        num_attention_heads=job.hidden_size // 64,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=TENSOR_PARALLEL,
        sequence_parallel=True,
        bf16=job.bf16,
        params_dtype=torch.bfloat16 if job.bf16 else torch.float32,
        use_cpu_initialization=True,
        # Megatron would build the whole vocabulary's weight on each rank and cut it: a peak of
        # memory that has nothing to do with the steps.
        perform_initialization=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    layer = get_gpt_layer_local_spec()
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.self_attention.submodules.core_attention = PackedCausalAttention
    model = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[layer] * job.layers, layer_norm=RMSNorm),
        vocab_size=PADDED_VOCABULARY,
        max_sequence_length=len(job.packed.tokens),
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    initialise(model)
    return Float16Module(config, model) if job.bf16 else model


def initialise(model: torch.nn.Module) -> None:
    """Fills the weight matrices, all sharded: each rank its own, the same on every run."""
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)


def describe_packing(packed: PackedSequence) -> Any:
    """Returns Megatron's description of a packed ("thd") sequence."""
    from megatron.core.packed_seq_params import PackedSeqParams

    boundaries = torch.tensor(packed.boundaries, dtype=torch.int32)
    longest = int(boundaries.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def peak_memory() -> int:
    """Returns the most memory this process has ever had resident, in bytes."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Not ru_maxrss, which on Linux is inherited from the process that started this one.
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)[1]) * 1024
