# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Requests for log-probabilities of a model, answered by the model and by its own full logits."""

import inspect
from dataclasses import dataclass
from typing import Dict, List, NamedTuple, Optional, Tuple, Union

import torch
from torch import Tensor

from megatron.core.fusions.linear_log_prob import KeepSet
from megatron.core.models.common.log_prob_output import LogProbOutput
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from tests.unit_tests.harness.models import VOCAB_SIZE, device, gradients, weights_of_loss

IGNORED = -100
# Whether models take a selector; where not, LogProbOutput does.
MODEL_SELECTS = "output_row_selector" in inspect.signature(GPTModel.forward).parameters


def call_arguments(targets: Tensor, selector=None, **options) -> Tuple[LogProbOutput, dict]:
    """An output processor, and the arguments of a model's call that uses it on selected rows.

    Args:
        targets (Tensor): `[b, s]`.
        selector (Tensor or OutputRowSelector, optional): None for all rows.
        **options: Of `LogProbOutput`.
    """
    if selector is None:
        processor = LogProbOutput(targets, **options)
        return processor, dict(output_processor=processor)
    if MODEL_SELECTS:
        processor = LogProbOutput(targets, **options)
        return processor, dict(output_processor=processor, output_row_selector=selector)
    processor = LogProbOutput(targets, output_row_selector=selector, **options)
    return processor, dict(output_processor=processor)


class Outcome(NamedTuple):
    """Log-probabilities and entropy `[N, 1 or 2]` of the wanted rows, and gradients by name."""

    values: Tensor
    gradients: Dict[str, Tensor]


# Values of each option of a request, all of which go with each other.
REQUEST_OPTIONS = dict(
    temperature=("one", "float", "of tokens", "of rows"),
    entropy=(False, "no_grad", True),
    keep=(None, "of tokens, unmasked", "of rows, target", "of rows, unmasked, entropy"),
    softcap=(None, 3.0),
    ignored=(False, True),
    vocab_size=(None, VOCAB_SIZE - 7),
    impl=("torch", "triton"),
)
PLAIN = {name: values[0] for name, values in REQUEST_OPTIONS.items()}


@dataclass(frozen=True)
class Request:
    """What is asked for of a micro-batch; see `draw_request`.

    What belongs to rows that aren't selected is nonsense wherever the caller has to say anything
    of these, so that who reads it gets an error or NaN.
    """

    mask: Optional[Tensor]
    targets: Tensor
    # Of all tokens.
    temperature: Union[float, Tensor]
    kept: Optional[List[List[int]]]
    options: dict

    @property
    def rows(self) -> Tensor:
        """The wanted rows among the tokens, `[b, s]` bool."""
        if self.mask is None:
            return torch.ones(self.targets.shape, dtype=torch.bool)
        return self.mask.cpu().bool()

    @property
    def columns(self) -> int:
        """Numbers a row."""
        return 1 if self.options["entropy"] is False else 2

    def call_arguments(
        self, put=lambda tensor: tensor, selector=None
    ) -> Tuple[LogProbOutput, dict]:
        """See the function.

        Args:
            put (Callable): Is called on each tensor of the request but the mask.
            selector (Tensor or OutputRowSelector, optional): Another form of the mask.
        """
        rows = self.rows
        temperature, targets = self.temperature, self.targets.masked_fill(~rows, 10**9)
        if isinstance(temperature, Tensor):
            if self.options["temperature"] == "of rows":
                temperature = temperature[rows]
            else:
                temperature = temperature.masked_fill(~rows, torch.nan)
            temperature = put(temperature)
        keep = None
        if self.kept is not None:
            by, empty, *entropy = self.options["keep"].split(", ")
            kept = self.kept
            if by == "of rows":
                kept = [ids for ids, wanted in zip(kept, rows.flatten().tolist()) if wanted]
            offsets = torch.tensor([0] + [len(ids) for ids in kept]).cumsum(0)
            ids = torch.tensor([i for ids in kept for i in ids], dtype=torch.int64)
            keep = KeepSet(put(offsets), put(ids), empty, bool(entropy))
        return call_arguments(
            put(targets),
            self.mask if selector is None else selector,
            temperature=temperature,
            entropy=self.options["entropy"],
            keep=keep,
            logit_softcap=self.options["softcap"],
            vocab_size=self.options["vocab_size"],
            impl=self.options["impl"],
        )

    def true_values(self, logits: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """`[N, 1 or 2]` of the logits `[b, s, v]` of all tokens, the vocabulary whole."""
        rows, options = self.rows.to(logits.device), self.options
        y = logits[rows].to(dtype)[:, : options["vocab_size"]]
        if options["softcap"]:
            y = options["softcap"] * torch.tanh(y / options["softcap"])
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature.to(y)[rows].unsqueeze(1)
        z = y / temperature
        targets = self.targets.to(y.device)[rows]
        counts = targets != IGNORED
        targets = targets.where(counts, 0)
        log_p = everywhere = z.log_softmax(-1)
        if self.kept is not None:
            allowed = self._allowed(targets, z.size(1))
            log_p = z.masked_fill(~allowed, -torch.inf).log_softmax(-1)
        results = [log_p.gather(1, targets.unsqueeze(1)).squeeze(1)]
        if options["entropy"] is not False:
            kept_part = self.kept is not None and options["keep"].endswith("entropy")
            log_p = log_p if kept_part else everywhere
            entropy = -(log_p.exp() * log_p.masked_fill(log_p.isinf(), 0.0)).sum(-1)
            results.append(entropy if options["entropy"] is True else entropy.detach())
        return torch.stack(results, -1).where(counts.unsqueeze(1), 0.0)

    def _allowed(self, targets: Tensor, vocab_size: int) -> Tensor:
        allowed = torch.zeros(targets.size(0), vocab_size, dtype=torch.bool)
        wanted = self.rows.flatten().nonzero().squeeze(1).tolist()
        for row, token in enumerate(wanted):
            allowed[row, self.kept[token]] = True
            allowed[row, int(targets[row])] = True
            if not self.kept[token] and "unmasked" in self.options["keep"]:
                allowed[row] = True
        return allowed.to(targets.device)


def draw_request(seed: int, mask: Optional[Tensor], shape: Tuple[int, int], **options) -> Request:
    """A request of all tokens `[b, s]`, or of those that a mask selects."""
    options = {**PLAIN, **options}
    generator = torch.Generator().manual_seed(seed)
    vocab_size = options["vocab_size"] or VOCAB_SIZE
    targets = torch.randint(0, vocab_size, shape, generator=generator)
    if options["ignored"]:
        targets[torch.rand(shape, generator=generator) < 0.3] = IGNORED
    temperature = {"one": 1.0, "float": 0.7}.get(options["temperature"])
    if temperature is None:
        temperature = 0.5 + torch.rand(shape, generator=generator)
    kept = None
    if options["keep"]:
        kept = []
        for target in targets.flatten().tolist():
            count = (0, 1, 5, vocab_size)[int(torch.randint(0, 4, (), generator=generator))]
            ids = torch.randint(0, vocab_size, (count,), generator=generator).tolist()
            # With and without the target, which counts in any case.
            kept.append(ids + [target] if count == 5 and target >= 0 else ids)
    return Request(mask, targets, temperature, kept, options)


def model_outcome(model, batch, request: Request, put=lambda tensor: tensor) -> Outcome:
    """What the model makes of a request, and gradients of the loss of `backward_of`."""
    processor, arguments = request.call_arguments(put)
    output = model(**batch, **arguments)
    rows, shape = request.rows, request.targets.shape
    assert output.dtype is torch.float32 and output.requires_grad
    assert output.is_contiguous()
    if request.mask is None:
        assert output.shape == (*shape, request.columns)
        values = output.flatten(0, 1)
    else:
        assert output.shape == (1, rows.sum(), request.columns)
        values = output[0]
        scattered = processor.scatter(output[0], fill_value=-7.0)
        assert scattered.shape == (*shape, request.columns)
        assert torch.equal(scattered[rows], output[0])
        assert bool((scattered[~rows] == -7.0).all())
        assert not processor.scatter(output[0, :, 0])[~rows].any()
    return backward_of(model, values, rows)


def true_outcome(model, batch, request: Request, dtype: torch.dtype = torch.float64) -> Outcome:
    """The same by log_softmax of the model's full logits, gathered over the vocabulary."""
    logits = gather_from_tensor_model_parallel_region(model(**batch))
    return backward_of(model, request.true_values(logits, dtype), request.rows)


def loss_of(values: Tensor, rows: Tensor) -> Tensor:
    """A loss that is linear in all numbers of the wanted rows."""
    weights = weights_of_loss((*rows.shape, values.size(-1)))[rows]
    return (values * weights.to(values.dtype)).sum()


def backward_of(model, values: Tensor, rows: Tensor) -> Outcome:
    """Backward of `loss_of`; parameters' names are without wrappers."""
    loss_of(values, rows).backward()
    found = gradients(model)
    found = {name.replace("module.", ""): gradient for name, gradient in found.items()}
    return Outcome(values.detach(), found)


def put_on_device(tensor: Tensor) -> Tensor:
    """Where the model is."""
    return tensor.to(device())
