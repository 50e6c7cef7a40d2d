# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""What `linear_log_prob` refuses, and what it does with values that nobody looked at.

Everything is refused before anything is sent, with the same words on every rank, so that no rank
waits for another.
"""

import math
import sys
from unittest import mock

import pytest
import torch

from megatron.core import parallel_state
from megatron.core.fusions.linear_log_prob import KeepSet, linear_log_prob
from tests.unit_tests.fusions.problems import IMPLS, unwritten_memory_is_nan
from tests.unit_tests.harness.compare import assert_same_bits
from tests.unit_tests.harness.models import device
from tests.unit_tests.harness.ranks import Layout, run_on_ranks
from tests.unit_tests.harness.record import RecordOps

_ROWS, _HIDDEN, _COLUMNS = 6, 8, 20
_IMPLS = pytest.mark.parametrize("impl", IMPLS)
# The module, which the package hides behind the function of its name.
_MODULE = sys.modules[linear_log_prob.__module__]


def _tensor(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=device())


def _arguments():
    """A call that is fine, of a vocabulary of 40 on two ranks."""
    generator = torch.Generator().manual_seed(1)
    return dict(
        hidden=torch.randn(_ROWS, _HIDDEN, generator=generator).to(device()),
        weight=torch.randn(_COLUMNS, _HIDDEN, generator=generator).to(device()),
        targets=_tensor(0, 39, 20, 19, 5, 30),
        bias=torch.randn(_COLUMNS, generator=generator).to(device()),
        temperature=torch.full((_ROWS,), 0.7, device=device()),
        keep=_keep(),
        entropy=True,
        vocab_size=40,
    )


def _keep(offsets=(0, 2, 2, 3, 5, 6, 8), ids=(0, 39, 7, 20, 21, 3, 9, 31), **options):
    offsets = offsets if isinstance(offsets, torch.Tensor) else _tensor(*offsets)
    ids = ids if isinstance(ids, torch.Tensor) else _tensor(*ids)
    return KeepSet(offsets, ids, **options)


def _temperatures(value):
    return lambda a: dict(temperature=a["temperature"].index_fill(0, _tensor(2), value))


def _to(name, *args):
    return lambda a: {name: a[name].to(*args)}


def _set(**values):
    return lambda a: values


# Name: (what changes, the error, what it says)
_BAD = {
    "hidden is a list": (_set(hidden=[1.0]), TypeError, "hidden: got list"),
    "hidden of 3 dimensions": (lambda a: dict(hidden=a["hidden"][None]), ValueError, "flatten"),
    "hidden of 1 dimension": (lambda a: dict(hidden=a["hidden"][0]), ValueError, "hidden, weight"),
    "hidden size": (lambda a: dict(hidden=a["hidden"][:, :-1]), ValueError, "hidden, weight"),
    "hidden in fp64": (_to("hidden", torch.float64), TypeError, "hidden: got torch.float64"),
    "hidden in integers": (_to("hidden", torch.int32), TypeError, "hidden: got torch.int32"),
    "weight is None": (_set(weight=None), TypeError, "weight: got NoneType"),
    "weight of 1 dimension": (lambda a: dict(weight=a["weight"][0]), ValueError, "shapes"),
    "weight without columns": (lambda a: dict(weight=a["weight"][:0]), ValueError, "one column"),
    "weight in bf16": (_to("weight", torch.bfloat16), TypeError, "weight: got torch.bfloat16"),
    "weight elsewhere": (_to("weight", "meta"), ValueError, "weight: is on meta"),
    "bias of another size": (lambda a: dict(bias=a["bias"][:-1]), ValueError, r"bias: .*\[19\]"),
    "bias in fp64": (_to("bias", torch.float64), TypeError, "bias: got torch.float64"),
    "bias elsewhere": (_to("bias", "meta"), ValueError, "bias: is on meta"),
    "bias is a number": (_set(bias=1.0), TypeError, "bias: got float"),
    "targets in int16": (_to("targets", torch.int16), TypeError, "targets: got torch.int16"),
    "targets in fp32": (_to("targets", torch.float32), TypeError, "targets: got torch.float32"),
    "targets are a list": (_set(targets=[1] * _ROWS), TypeError, "targets: got list"),
    "too few targets": (
        lambda a: dict(targets=a["targets"][:-1]),
        ValueError,
        "targets: got shape",
    ),
    "targets [1, N]": (
        lambda a: dict(targets=a["targets"][None]),
        ValueError,
        "targets: got shape",
    ),
    "targets elsewhere": (_to("targets", "meta"), ValueError, "targets: is on meta"),
    "no temperature": (_set(temperature=None), TypeError, "temperature: got NoneType"),
    "temperature is a bool": (_set(temperature=True), TypeError, "temperature: got bool"),
    "temperature 0": (_set(temperature=0.0), ValueError, "temperature: got 0.0"),
    "temperature below 0": (_set(temperature=-1), ValueError, "temperature: got -1"),
    "temperature nan": (_set(temperature=math.nan), ValueError, "temperature: got nan"),
    "temperature inf": (_set(temperature=math.inf), ValueError, "temperature: got inf"),
    "temperatures [1]": (
        lambda a: dict(temperature=a["temperature"][:1]),
        ValueError,
        "temperature: got shape",
    ),
    "temperatures of integers": (_to("temperature", torch.int64), TypeError, "temperature: got"),
    "temperatures elsewhere": (_to("temperature", "meta"), ValueError, "temperature: is on meta"),
    "temperature trained": (
        lambda a: dict(temperature=a["temperature"].clone().requires_grad_()),
        ValueError,
        "temperature: requires",
    ),
    "keep is a mask": (_set(keep=torch.ones(_ROWS, 40) > 0), TypeError, "keep: got Tensor"),
    "keep.empty": (_set(keep=_keep(empty="all")), ValueError, "keep.empty: got 'all'"),
    "keep.entropy": (_set(keep=_keep(entropy="yes")), TypeError, "keep.entropy"),
    "offsets of N": (_set(keep=_keep((0, 2, 2, 3, 5, 8))), ValueError, "keep.offsets: got 6"),
    "offsets in fp32": (
        _set(keep=_keep(_keep().offsets.float())),
        TypeError,
        "keep.offsets: got torch.float32",
    ),
    "ids in fp32": (_set(keep=_keep(ids=_keep().ids.float())), TypeError, "keep.ids: got"),
    "ids in bool": (_set(keep=_keep(ids=_keep().ids > 0)), TypeError, "keep.ids: got torch.bool"),
    "ids of 2 dimensions": (_set(keep=_keep(ids=_keep().ids[None])), ValueError, "one dimension"),
    "ids elsewhere": (_set(keep=_keep(ids=_keep().ids.to("meta"))), ValueError, "keep.ids: is on"),
    "entropy of another kind": (_set(entropy="grad"), ValueError, "entropy: got 'grad'"),
    "entropy is a number": (_set(entropy=1), ValueError, "entropy: got 1"),
    "logit_scale 0": (_set(logit_scale=0.0), ValueError, "logit_scale: got 0.0"),
    "logit_scale nan": (_set(logit_scale=math.nan), ValueError, "logit_scale: got nan"),
    "logit_scale of text": (_set(logit_scale="1"), TypeError, "logit_scale: got str"),
    "cap 0": (_set(logit_softcap=0), ValueError, "logit_softcap: got 0"),
    "cap below 0": (_set(logit_softcap=-1.0), ValueError, "logit_softcap: got -1.0"),
    "cap inf": (_set(logit_softcap=math.inf), ValueError, "logit_softcap: got inf"),
    "vocabulary 0": (_set(vocab_size=0), ValueError, "vocab_size: got 0"),
    "vocabulary beyond the shards": (_set(vocab_size=41), ValueError, "vocab_size: got 41"),
    "vocabulary of 40.0": (_set(vocab_size=40.0), TypeError, "vocab_size: got 40.0"),
    "start without size": (_set(vocab_size=None, vocab_start=0), ValueError, "needs vocab_size"),
    "start below 0": (_set(vocab_start=-1), ValueError, "vocab_start: got -1"),
    "ignore_index is None": (_set(ignore_index=None), TypeError, "ignore_index: got None"),
    "logits_dtype": (_set(logits_dtype=torch.float32), ValueError, "logits_dtype: got"),
    "budget below 0": (_set(logits_budget=-1), ValueError, "logits_budget: got -1"),
    "budget in fp": (_set(logits_budget=1e9), TypeError, "logits_budget: got 1000000000.0"),
    "wgrad": (_set(wgrad=None), ValueError, "wgrad: got None"),
    "impl": (_set(impl="cuda"), ValueError, "impl: got 'cuda'"),
    # Values, which are looked at on the CPU and under the debug switch.
    "target beyond the vocabulary": (
        lambda a: dict(targets=a["targets"].index_fill(0, _tensor(3), 40)),
        ValueError,
        "targets: row 3 has 40",
    ),
    "target -1": (
        lambda a: dict(targets=a["targets"].index_fill(0, _tensor(3), -1)),
        ValueError,
        "targets: row 3 has -1",
    ),
    "a temperature 0": (_temperatures(0.0), ValueError, "temperature: row 2 has 0.0"),
    "a temperature nan": (_temperatures(math.nan), ValueError, "temperature: row 2 has nan"),
    "a temperature inf": (_temperatures(math.inf), ValueError, "temperature: row 2 has inf"),
    "offsets from 1": (_set(keep=_keep((1, 2, 2, 3, 5, 6, 8))), ValueError, "keep.offsets: must"),
    "falling offsets": (_set(keep=_keep((0, 2, 1, 3, 5, 6, 8))), ValueError, "smallest step -1"),
    "offsets to 7": (_set(keep=_keep((0, 2, 2, 3, 5, 6, 7))), ValueError, "got 0 to 7"),
    "offsets to 9": (_set(keep=_keep((0, 2, 2, 3, 5, 6, 9))), ValueError, "got 0 to 9"),
    "id 40": (_set(keep=_keep(ids=(0, 39, 7, 20, 21, 3, 9, 40))), ValueError, "keep.ids: got"),
    "id -1": (_set(keep=_keep(ids=(-1, 39, 7, 20, 21, 3, 9, 31))), ValueError, "keep.ids: got"),
}


def _call(arguments):
    return linear_log_prob(**arguments)


def _check_refused(names):
    group = parallel_state.get_tensor_model_parallel_group()
    with mock.patch.dict("os.environ", MCORE_SELECTIVE_DEBUG="1"):
        for name in names:
            change, error, says = _BAD[name]
            arguments = _arguments()
            arguments.update(change(arguments))
            with RecordOps() as record, pytest.raises(error, match=says) as raised:
                _call(arguments)
            assert not record.collectives, name
            messages = [None] * group.size()
            torch.distributed.all_gather_object(messages, str(raised.value), group=group)
            assert len(set(messages)) == 1, f"{name}: {messages}"
        # What is changed there is fine as it is.
        assert all(result.isfinite().all() for result in _call(_arguments()))


# Name: (what changes, the rows that are NaN for it)
_UNSEEN = {
    "target beyond the vocabulary": (_BAD["target beyond the vocabulary"][0], [3]),
    "target far beyond": (
        lambda a: dict(targets=a["targets"].index_fill(0, _tensor(1, 4), 2**40)),
        [1, 4],
    ),
    "target below 0": (lambda a: dict(targets=a["targets"].index_fill(0, _tensor(0), -2)), [0]),
    "temperature 0": (_temperatures(0.0), [2]),
    "temperature below 0": (_temperatures(-0.5), [2]),
    "temperature nan": (_temperatures(math.nan), [2]),
    "temperature inf": (_temperatures(math.inf), [2]),
    "id beyond the vocabulary": (_set(keep=_keep(ids=(0, 40, 7, 20, 21, 3, 9, 31))), [0]),
    "id far beyond": (_set(keep=_keep(ids=(0, 39, 7, 20, 2**40, 3, 9, 31))), [3]),
    "id below 0": (_set(keep=_keep(ids=(0, 39, -1, 20, 21, 3, 9, 31))), [2]),
    "falling offsets": (_set(keep=_keep((0, 2, 1, 3, 5, 6, 8))), [1]),
    "offsets beyond the ids": (_set(keep=_keep((0, 2, 2, 3, 5, 6, 2**40))), [5]),
    "offsets below 0": (_set(keep=_keep((-5, 2, 2, 3, 5, 6, 8))), [0]),
}


def _check_unseen(impl, name, budget):
    change, rows = _UNSEEN[name]
    bad = torch.zeros(_ROWS, dtype=torch.bool)
    bad[rows] = True
    bad = bad.to(device())

    def run(**changed):
        arguments = {**_arguments(), **changed}
        hidden = arguments["hidden"].requires_grad_()
        with unwritten_memory_is_nan(), mock.patch.object(_MODULE, "check_values"):
            log_prob, entropy = _call({**arguments, "impl": impl, "logits_budget": budget})
            (gradient,) = torch.autograd.grad((log_prob[~bad].sum() + entropy[~bad].sum()), hidden)
        return log_prob, entropy, gradient

    found, expected = run(**change(_arguments())), run()
    others = ~bad
    if name == "falling offsets":
        # Rows 0 and 2 share an id then, one more than row 2 has in the good call.
        others[[0, 2]] = False
        assert found[0][[0, 2]].isfinite().all()
    for what, actual, due in zip(("log_prob", "entropy", "gradient"), found, expected):
        assert_same_bits(what, actual[others], due[others])
    assert found[0][bad].isnan().all(), f"{name}: {found[0][bad]}"
    if not name.startswith(("id", "offsets", "falling")):
        assert found[1][bad].isnan().all(), f"{name}: {found[1][bad]}"
    # A row that is NaN and that nobody asked for has no gradient.
    assert not found[2][bad].any()


def _check_debug_switch():
    """Which names them where values are not looked at by themselves."""
    arguments = _arguments()
    arguments["targets"][3] = 40
    device_type = arguments["hidden"].device.type
    assert device_type in ("cpu", "cuda")
    with mock.patch.dict("os.environ", MCORE_SELECTIVE_DEBUG="1"):
        with pytest.raises(ValueError, match="targets: row 3 has 40"):
            _call(arguments)
    with mock.patch.dict("os.environ", MCORE_SELECTIVE_DEBUG="0"):
        if device_type == "cpu":
            with pytest.raises(ValueError, match="targets: row 3 has 40"):
                _call(arguments)
        else:
            assert _call(arguments)[0].isnan().tolist() == [row == 3 for row in range(_ROWS)]


class TestRefused:
    """TypeError and ValueError."""

    def test_before_anything_is_sent(self):
        """In the same words on both ranks."""
        run_on_ranks(Layout(tp=2), _check_refused, list(_BAD))

    def test_debug_switch(self):
        """Values of tensors on a GPU are looked at where it is set."""
        run_on_ranks(Layout(tp=2), _check_debug_switch)


class TestUnseenValues:
    """Values that can't be, which nobody looks at on a GPU."""

    @_IMPLS
    @pytest.mark.parametrize("name", list(_UNSEEN))
    def test_make_nan_in_their_row(self, impl, name):
        """There, and with the same bits as ever in the others."""
        for budget in (0, 2**30) if impl == "torch" else (2**30,):
            run_on_ranks(Layout(tp=2), _check_unseen, impl, name, budget)
