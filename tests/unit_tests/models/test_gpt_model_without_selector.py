# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Without a selector the fork is upstream: the same bits by the same operators.

The same function runs on this tree and, in a process of its own, on upstream's unpatched one, of
the sdist that the fork is built from; `MEGATRON_SOURCE` names another one.
"""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves

import megatron.core
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from tests.unit_tests.harness.compare import assert_same_bits, assert_same_gradients
from tests.unit_tests.harness.mamba import PATTERN, make_mamba_model
from tests.unit_tests.harness.models import (
    gradients,
    make_batch,
    make_config,
    make_gpt_model,
    weights_of_loss,
)
from tests.unit_tests.harness.ranks import Layout, run_on_ranks
from tests.unit_tests.harness.record import RecordOps

pytestmark = pytest.mark.skipif(
    "WORLD_SIZE" in os.environ, reason="under torchrun the ranks are this tree's alone"
)

_ROOT = Path(__file__).parents[3]
_LAYOUTS = {
    "tp1": (Layout(), {}),
    "tp2": (Layout(tp=2), {}),
    "tp2sp": (Layout(tp=2), dict(sequence_parallel=True)),
    "moe": (
        Layout(dp=2, ep=2),
        dict(
            num_moe_experts=4,
            moe_ffn_hidden_size=24,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="alltoall",
        ),
    ),
}


# How autograd keeps a gradient: it takes the tensor where nothing else holds it, else a copy. Under
# the plan an all-to-all of another thread may still hold it, on the same tree now and then.
_KEEPS_GRADIENT = ("aten.detach.", "aten.new_empty_strided.", "aten.copy_.")


class _RecordSequence(RecordOps):
    """Notes the operators one by one, with the shapes and dtypes that they are given."""

    def __init__(self):
        super().__init__()
        self.sequence = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        inputs = ", ".join(f"{x.dtype}{list(x.shape)}" for x in tensors)
        self.sequence.append(f"{func}({inputs})")
        return super().__torch_dispatch__(func, types, args, kwargs)


def _models(settings):
    """Every model that the fork touches, by name; bf16 ones bare and in the wrapper."""
    models = {}
    for dtype in ("fp32", "bf16"):
        bf16 = dtype == "bf16"
        for tied in (False, True):
            config = make_config(bf16=bf16, **settings)
            model = make_gpt_model(config, share_embeddings_and_output_weights=tied)
            model = model.bfloat16() if bf16 else model
            models[f"{'tied ' * tied}GPTModel in {dtype}"] = model
        if bf16:
            models["GPTModel in Float16Module"] = Float16Module(config, model)
        if "num_moe_experts" in settings:
            continue
        config = make_config(bf16=bf16, num_layers=len(PATTERN), **settings)
        model = make_mamba_model(config)
        models[f"MambaModel in {dtype}"] = Float16Module(config, model) if bf16 else model
    return models


def _run_plan(model, batch):
    from megatron.core.models.common.model_chunk_schedule_plan import (
        TransformerModelChunkSchedulePlan,
    )

    plan = model.build_schedule_plan(**batch)
    output = TransformerModelChunkSchedulePlan.run(plan, None)
    gradient = weights_of_loss(output.shape).to(output.dtype)
    TransformerModelChunkSchedulePlan.run(None, plan, b_grad=gradient)
    return output


def _run_forward(model, batch):
    output = model(**batch)
    output.backward(weights_of_loss(output.shape).to(output.dtype))
    return output


def _save_runs(settings, folder):
    """Saves output, gradients and operators of every model, for logits and for a loss."""
    runs = {}
    batch = make_batch(2)
    for name, model in _models(settings).items():
        calls = {
            "logits": lambda: _run_forward(model, batch),
            "loss": lambda: _run_forward(model, dict(batch, labels=batch["input_ids"].roll(-1, 1))),
        }
        # Of dense layers the fork's plan is another on purpose: it has the final norm.
        if "num_moe_experts" in settings and isinstance(model, GPTModel):
            calls["logits of the plan"] = lambda: _run_plan(model, batch)
        for call, run in calls.items():
            # It grows with what it was used for, and workers of this tree have run other tests.
            parallel_state.get_global_memory_buffer().buffer.clear()
            with _RecordSequence() as record:
                output = run()
            runs[f"{call} of {name}"] = dict(
                output=output.detach().clone(),
                gradients=gradients(model),
                operators=record.sequence,
                collectives=record.collectives,
            )
    torch.save(runs, Path(folder) / f"rank-{torch.distributed.get_rank()}.pt")


def _save_all(folder):
    """Runs every layout on the tree that is imported here, in a folder each."""
    for name, (layout, settings) in _LAYOUTS.items():
        here = Path(folder) / name
        here.mkdir(parents=True)
        run_on_ranks(layout, _save_runs, settings, here)


def _save_all_of_stock(source, folder):
    """The other process: makes sure that it is not this tree's megatron, then runs every layout."""
    assert Path(megatron.core.__file__).is_relative_to(source), megatron.core.__file__
    overlay = Path(megatron.core.__file__).parent / "models/common/output_row_selector.py"
    assert not overlay.exists(), f"{source} is patched"
    (Path(folder) / "version").write_text(megatron.core.__version__)
    _save_all(folder)


def _find_stock(folder):
    """A folder with upstream's `megatron` and nothing else, so that no `tests` of theirs is ours."""
    source = os.environ.get("MEGATRON_SOURCE")
    if not source:
        fetched = subprocess.run(
            [sys.executable, "setup.py", "fetch"], cwd=_ROOT, capture_output=True, text=True
        )
        assert not fetched.returncode, fetched.stderr
        with tarfile.open(fetched.stdout.strip()) as archive:
            archive.extractall(folder / "unpacked", filter="data")
        (source,) = (folder / "unpacked").iterdir()
    (folder / "source").mkdir()
    (folder / "source/megatron").symlink_to(Path(source, "megatron").resolve())
    return folder / "source"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of both trees, `runs(layout)`: pairs of this tree's and upstream's, by rank."""
    folder = tmp_path_factory.mktemp("trees")
    stock, source = folder / "stock", _find_stock(folder)
    stock.mkdir()
    command = (
        "from tests.unit_tests.models.test_gpt_model_without_selector import _save_all_of_stock as f;"
        f"from pathlib import Path; f(Path({str(source)!r}), Path({str(stock)!r}))"
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(source), str(_ROOT)]))
    process = subprocess.run(
        [sys.executable, "-c", command],
        cwd=_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert not process.returncode, process.stderr
    _save_all(folder / "fork")
    version = (stock / "version").read_text()
    assert megatron.core.__version__.split("+")[0] == version.split("+")[0]

    def load(layout):
        return [
            (
                torch.load(path, weights_only=False),
                torch.load(stock / layout / path.name, weights_only=False),
            )
            for path in sorted((folder / "fork" / layout).iterdir())
        ]

    return load


@pytest.mark.parametrize("layout", list(_LAYOUTS))
class TestWithoutSelector:
    """`None` changes nothing."""

    def test_same_bits(self, layout, runs):
        """Output, with labels the loss, and every gradient, in fp32 and bf16."""
        for fork, stock in runs(layout):
            assert fork.keys() == stock.keys()
            for name, run in fork.items():
                assert run["output"].isfinite().all() and run["output"].any(), name
                assert_same_bits(name, run["output"], stock[name]["output"])
                assert_same_gradients(run["gradients"], stock[name]["gradients"])

    def test_same_operators(self, layout, runs):
        """No copy, no cast, no collective more or less, in the same order and of the same size."""
        for fork, stock in runs(layout):
            for name, run in fork.items():
                operators = [run["operators"], stock[name]["operators"]]
                if "plan" in name:
                    operators = [
                        [operator for operator in each if not operator.startswith(_KEEPS_GRADIENT)]
                        for each in operators
                    ]
                for index, pair in enumerate(zip(*operators)):
                    assert pair[0] == pair[1], f"{name}: operator {index}"
                assert len(operators[0]) == len(operators[1]) > 100, name
                assert run["collectives"] == stock[name]["collectives"], name
                assert run["collectives"] or layout == "tp1", name
