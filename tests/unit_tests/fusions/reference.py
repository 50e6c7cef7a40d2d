# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""What `linear_log_prob` has to return, one row after the other, from the dense projection.

Shares no line with the op: each row's ids are looked up, its logits taken, and autograd does the
gradients.
"""

from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor


@dataclass(frozen=True)
class Outcome:
    """Results of a call, and gradients by the operand's name."""

    log_prob: Tensor
    entropy: Optional[Tensor]
    gradients: Dict[str, Tensor]


@dataclass(frozen=True)
class Rows:
    """What is asked of the rows of a projection; the names are those of `linear_log_prob`."""

    targets: Tensor
    vocab_size: int
    temperature: Union[float, Tensor] = 1.0
    # Of each row, as the caller lists them; None keeps all of all rows.
    kept: Optional[List[List[int]]] = None
    empty: str = "unmasked"
    kept_entropy: bool = False
    scale: float = 1.0
    softcap: Optional[float] = None
    ignore_index: int = -100

    def logits(self, x: Tensor) -> Tensor:
        """Logits before temperature of a projection with its bias, in its dtype."""
        y = x[:, : self.vocab_size]
        if self.scale != 1.0:
            y = y * self.scale
        if self.softcap is not None:
            y = self.softcap * torch.tanh(y / self.softcap)
        return y

    def results(self, x: Tensor) -> Tuple[Tensor, Tensor]:
        """Log-probabilities and entropies `[N]`, in fp32 or, of an fp64 projection, in that."""
        y = self.logits(x)
        y = y if y.dtype is torch.float64 else y.float()
        log_probs, entropies = [], []
        for row, target in enumerate(self.targets.tolist()):
            if target == self.ignore_index:
                log_probs.append(y.new_zeros(()))
                entropies.append(y.new_zeros(()))
                continue
            temperature = self.temperature
            if isinstance(temperature, Tensor):
                temperature = temperature[row].to(y.dtype)
            z = y[row] / temperature
            log_p = everywhere = z.log_softmax(0)
            of_target = target
            ids = self.ids(row, target)
            if ids is not None:
                log_p = z[torch.tensor(ids, device=z.device)].log_softmax(0)
                of_target = ids.index(target)
            log_probs.append(log_p[of_target])
            if not self.kept_entropy:
                log_p = everywhere
            entropies.append(-(log_p.exp() * log_p).sum())
        return torch.stack(log_probs), torch.stack(entropies)

    def ids(self, row: int, target: int) -> Optional[List[int]]:
        """The ids that a row is normalised over; None where that is all of them."""
        if self.kept is None or not self.kept[row] and self.empty == "unmasked":
            return None
        return sorted({*self.kept[row], target})


def truth(
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    rows: Rows,
    grad_log_prob: Optional[Tensor],
    grad_entropy: Optional[Tensor],
) -> Outcome:
    """Results and gradients in fp64 of the very same operands."""
    leaves = {"hidden": hidden, "weight": weight, "bias": bias}
    leaves = {
        name: tensor.detach().double().requires_grad_()
        for name, tensor in leaves.items()
        if tensor is not None
    }
    x = torch.nn.functional.linear(leaves["hidden"], leaves["weight"], leaves.get("bias"))
    results = rows.results(x)
    gradients = _backward(results, (grad_log_prob, grad_entropy), list(leaves.values()))
    return Outcome(*(result.detach() for result in results), dict(zip(leaves, gradients)))


def plain_torch(
    hidden: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    rows: Rows,
    grad_log_prob: Optional[Tensor],
    grad_entropy: Optional[Tensor],
    *,
    shards: Sequence[int],
    fp32_logits: bool,
) -> Outcome:
    """The same by a linear layer and log_softmax in the operands' dtype.

    Args:
        shards (Sequence[int]): Columns of each tensor-parallel rank. A column-parallel layer adds
            up its ranks' parts of the gradient of `hidden` in its dtype.
        fp32_logits (bool): Whether logits are in fp32; their gradient is in the operands' dtype
            in any case.
    """
    operands = [hidden, weight, bias]
    if fp32_logits:
        operands = [None if tensor is None else tensor.float() for tensor in operands]
    x = torch.nn.functional.linear(*operands).detach().requires_grad_()
    results = rows.results(x)
    (grad_x,) = _backward(results, (grad_log_prob, grad_entropy), [x])
    grad_x = grad_x.to(hidden.dtype)
    parts = [part @ w for part, w in zip(grad_x.split(shards, 1), weight.split(list(shards)))]
    gradients = {"hidden": sum(parts), "weight": grad_x.t() @ hidden}
    if bias is not None:
        gradients["bias"] = grad_x.sum(0)
    return Outcome(*(result.detach() for result in results), gradients)


def _backward(results, upstream, leaves) -> List[Tensor]:
    loss = sum(
        (result * gradient.to(result.dtype)).sum()
        for result, gradient in zip(results, upstream)
        if gradient is not None
    )
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return list(torch.autograd.grad(loss, leaves))
