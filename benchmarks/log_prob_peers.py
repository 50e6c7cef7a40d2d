# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""The op and its peers, each as a `Provider` of `linear_log_prob.py`.

All get the same bf16 operands and the same N compact rows, except slime's way, which computes all T
tokens. Only the op has `main_grad`; the others return the gradient of the weight in bf16, which
somebody has still to add up. A peer that isn't installed or doesn't run here is skipped by name.
"""

import importlib
import importlib.util
import site
from importlib import metadata
from pathlib import Path
from typing import Callable, Dict, List, Optional, Tuple

import torch
from log_prob_cases import OP, OP_0, OP_0_RETURNS, OP_ALL, OP_RETURNS, OP_TORCH, SLIME
from log_prob_measure import Inputs, Provider

KEEP_ALL = 1 << 40
# As in slime's and miles' scripts (--log-probs-chunk-size 1024).
_LOG_PROBS_CHUNK = 1024
_VALUE = ("value", "gradient")
_NONE = ("none",)


class Unavailable(Exception):
    """A peer that can't run here; the text says why."""


def load_providers(
    keys: List[str], peers: Optional[Path], slime: Optional[Path], device: torch.device
) -> Tuple[List[Provider], Dict[str, str]]:
    """Loads providers.

    Args:
        keys (list): Which, as in :data:`LOADERS`.
        peers (Path, optional): A folder of packages, see `fetch_peers.sh`.
        slime (Path, optional): A slime checkout; by default the one among the peers.
        device (torch.device): Where they are going to run.

    Returns:
        Tuple[list, dict]: Providers in the order of the keys, and why others are skipped.
    """
    if peers is not None:
        # Not PYTHONPATH: nvidia-cutlass-dsl needs its .pth file to be read.
        site.addsitedir(str(peers.resolve()))
        importlib.invalidate_caches()
        slime = slime or peers / "slime"
    providers, skipped = [], {}
    for key in keys:
        try:
            providers += [LOADERS[key](key, slime, device)]
        except Unavailable as error:
            skipped[key] = str(error)
        except Exception as error:  # whatever a peer's import raises, the others can be measured
            skipped[key] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return providers, skipped


def _op(key: str, slime: Optional[Path], device: torch.device) -> Provider:
    import megatron.core
    from megatron.core.fusions.linear_log_prob import linear_log_prob
    from megatron.core.fusions.linear_log_prob.linear_log_prob import DEFAULT_LOGITS_BUDGET

    budget = {"op-0": 0, "op-0-returns": 0, "op-all": KEEP_ALL}.get(key, DEFAULT_LOGITS_BUDGET)
    returns = key.endswith("returns")
    impl = "torch" if key == "op-torch" else "auto"
    name = {
        "op": OP,
        "op-0": OP_0,
        "op-all": OP_ALL,
        "op-torch": OP_TORCH,
        "op-returns": OP_RETURNS,
        "op-0-returns": OP_0_RETURNS,
    }[key]
    if device.type == "cuda" and impl == "auto":
        impl = "triton"  # or an error: not the reference by accident
    kinds = {"none": False, "value": "no_grad", "gradient": True}

    def run(inputs: Inputs, entropy: str):
        return linear_log_prob(
            inputs.hidden,
            inputs.plain_weight if returns else inputs.weight,
            inputs.targets,
            entropy=kinds[entropy],
            logits_budget=budget,
            impl=impl,
        )

    return Provider(
        key,
        name,
        megatron.core.__version__,
        run,
        # Without entropy only where peers without entropy are compared with it.
        _VALUE if key in ("op-all", "op-torch") else ("none",) + _VALUE,
        ours=True,
        main_grad=not returns,
        budget=budget,
        forward=key in ("op", "op-torch"),
        rows=(256, 2944, 8192) if key == "op-torch" else None,
    )


def _slime_function(slime: Optional[Path]) -> Tuple[Callable, str]:
    """slime's calculate_log_probs_and_entropy, of the file alone: the package needs ray.

    Without a process group its reductions over tensor-parallel ranks are left out, as on one rank.
    """
    for root in [] if slime is None else [slime, slime / "slime"]:
        file = root / "utils" / "ppo_utils.py"
        if file.is_file():
            spec = importlib.util.spec_from_file_location("slime_ppo_utils", file)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            commit = root / "COMMIT"
            version = slime.resolve().name.replace("slime-", "")
            version = commit.read_text().strip() if commit.is_file() else version
            return module.calculate_log_probs_and_entropy, version
    raise Unavailable("no slime checkout; pass --slime or set SLIME_SOURCE")


def _slime(key: str, slime: Optional[Path], device: torch.device) -> Provider:
    """slime's way: logits of all tokens, upcast to fp32 as Float16Module does, its functions."""
    function, version = _slime_function(slime)

    def run(inputs: Inputs, entropy: str):
        inputs.add_tokens()
        logits = (inputs.all_hidden @ inputs.plain_weight.t()).float()
        log_prob, found = function(
            logits,
            inputs.all_targets,
            None,
            with_entropy=entropy != "none",
            with_entropy_grad=entropy == "gradient",
            chunk_size=-1,
        )
        rows = inputs.selected
        return log_prob.squeeze(-1)[rows], None if found is None else found[rows]

    # 25 and 100 % of T = 11,776, 25 % of 65,536 and #1767's.
    rows = (2944, 11776, 16384, 86528)
    return Provider(key, SLIME, version, run, _VALUE, all_tokens=True, rows=rows)


def _rows(key: str, slime: Optional[Path], device: torch.device) -> Provider:
    """The selected rows' logits in fp32, and torch's log_softmax."""

    def run(inputs: Inputs, entropy: str):
        log_p = torch.log_softmax((inputs.hidden @ inputs.plain_weight.t()).float(), -1)
        log_prob = log_p.gather(1, inputs.targets[:, None])[:, 0]
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy == "gradient"):
            return log_prob, -(log_p.exp() * log_p).sum(-1)

    return Provider(key, "selected rows, eager fp32", torch.__version__, run, _VALUE)


def _deferred(key: str, slime: Optional[Path], device: torch.device) -> Provider:
    """Deferred upcast per chunk: miles' way since #2764.

    The logits of all selected rows stay in bf16, as the output layer made them; chunks of 1,024
    rows are upcast one after the other, each inside an autograd function of its own. In forward
    alone that leaves one chunk in fp32. With gradients it saves nothing but the upcast copy: the
    functions keep each chunk's fp32 softmax for backward, as miles' fused cross entropy does, and
    nothing is checkpointed. The functions are slime's, which upcast in the same place and take
    log-probability and entropy from one softmax, where miles takes one each.
    """
    function, version = _slime_function(slime)

    def run(inputs: Inputs, entropy: str):
        log_prob, found = function(
            inputs.hidden @ inputs.plain_weight.t(),
            inputs.targets,
            None,
            with_entropy=entropy != "none",
            with_entropy_grad=entropy == "gradient",
            chunk_size=_LOG_PROBS_CHUNK,
        )
        return log_prob.squeeze(-1), found

    return Provider(key, "selected rows, deferred upcast", version, run, _VALUE)


def _verl(key: str, slime: Optional[Path], device: torch.device) -> Provider:
    """verl's fused kernel, with the entropy that it always computes."""
    _need_cuda(device)
    function = importlib.import_module("verl.utils.kernel.linear_cross_entropy")
    function = function.linear_cross_entropy

    def run(inputs: Inputs, entropy: str):
        # Its sign is a log-probability's; reduction "none", no process group.
        return function(inputs.hidden, inputs.plain_weight, inputs.targets, 1.0, "none", None)

    return Provider(key, "verl fused", metadata.version("verl"), run, _VALUE)


def _liger_sm90(key: str, slime: Optional[Path], device: torch.device) -> Provider:
    """Liger's fused linear scaled cross entropy in CuTe, for compute capability 9.0."""
    _need_cuda(device)
    if torch.cuda.get_device_capability(device) != (9, 0):
        raise Unavailable("its CuTe kernels need compute capability 9.0")
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    def run(inputs: Inputs, entropy: str):
        # Arguments: temperature, ignore_index, m_tiles_per_cluster, return_entropy. The entropy
        # is bf16.
        found = LigerFusedLinearScaledCrossEntropyFunction.apply(
            inputs.hidden, inputs.plain_weight, inputs.targets, 1.0, -100, 1, entropy != "none"
        )
        return (-found, None) if entropy == "none" else (-found[0], found[1])

    version = metadata.version("liger-kernel")
    return Provider(key, "Liger SM90 scaled CE", version, run, ("none",) + _VALUE)


def _liger_chunked(key: str, slime: Optional[Path], device: torch.device) -> Provider:
    """Liger's chunked selective log-probability, of its fused PPO and GRPO losses."""
    from liger_kernel.chunked_loss import fused_linear_ppo

    # Private, but what the public losses call for exactly this job.
    function = fused_linear_ppo._ChunkedSelectiveLogProbFunction
    vocab_chunk = fused_linear_ppo._SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE

    def run(inputs: Inputs, entropy: str):
        operands = inputs.hidden, inputs.plain_weight, inputs.targets
        return function.apply(*operands, None, 1.0, vocab_chunk), None

    return Provider(key, "Liger chunked", metadata.version("liger-kernel"), run, _NONE)


def _cce(key: str, slime: Optional[Path], device: torch.device) -> Provider:
    """Cut cross-entropy without its gradient filter, which drops what is below an epsilon."""
    _need_cuda(device)
    from cut_cross_entropy import linear_cross_entropy

    def run(inputs: Inputs, entropy: str):
        operands = inputs.hidden, inputs.plain_weight, inputs.targets
        return -linear_cross_entropy(*operands, reduction="none", filter_eps=None), None

    return Provider(key, "CCE exact", metadata.version("cut-cross-entropy"), run, _NONE)


def _quack(key: str, slime: Optional[Path], device: torch.device) -> Provider:
    """quack's linear cross entropies, another job: one sum, whose gradient forward knows.

    They take the gradient of every row to be the same, so that forward makes the gradients at once
    and projects nothing again; no gradient per row and no entropy can be had from them.
    """
    _need_cuda(device)
    from quack import linear_cross_entropy as quack

    if key == "quack-chunked":
        # Its default would pick the other pipeline where that is eligible.
        function, options = quack.chunked_linear_cross_entropy, dict(use_scaled_exp=False)
        name, rows = "quack chunked CE", (2944, 8192)  # it tunes itself for every size
    else:
        function, options = quack.scaled_exp_linear_cross_entropy, {}
        name, rows = "quack scaled-exp CE", (2944, 8192, 16384, 86528)

    def run(inputs: Inputs, entropy: str):
        if key != "quack-chunked" and inputs.shape.vocab % 128:
            raise Unavailable(f"needs V % 128 == 0, V is {inputs.shape.vocab}")
        operands = inputs.hidden, inputs.plain_weight, inputs.targets
        return function(*operands, reduction="sum", **options), None

    return Provider(
        key,
        name,
        metadata.version("quack-kernels"),
        run,
        _NONE,
        same_job=False,
        rows=rows,
        note="a different job: no gradient per row, no entropy",
    )


def _need_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        raise Unavailable("needs CUDA")


# In the order of measuring: should a peer's kernel take the device down, the op has been measured.
LOADERS = {
    "op": _op,
    "op-0": _op,
    "op-all": _op,
    "op-torch": _op,
    "op-returns": _op,
    "op-0-returns": _op,
    "rows": _rows,
    "deferred": _deferred,
    "slime": _slime,
    "verl": _verl,
    "cce": _cce,
    "liger-sm90": _liger_sm90,
    "liger-chunked": _liger_chunked,
    "quack-scaled-exp": _quack,
    "quack-chunked": _quack,
}
OUR_KEYS = tuple(key for key in LOADERS if key.startswith("op"))
# quack changes CuTe's tensor classes for the whole process, in which Liger's kernels are compiled.
ALONE = ("quack-scaled-exp", "quack-chunked")
