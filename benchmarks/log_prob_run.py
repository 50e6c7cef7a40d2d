# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Goes through shapes, rows, jobs and providers of `linear_log_prob.py`, and adds to its CSV."""

import argparse
import csv
import gc
import statistics
import sys
from datetime import date
from importlib import metadata
from typing import Dict, Optional, Sequence, Tuple

import torch
from log_prob_cases import (
    BACKWARD,
    COLUMNS,
    FORWARD,
    GEMMS,
    JOBS,
    REPORTED,
    SHAPES,
    TOKENS,
    WEIGHT_GRADIENT,
    WEIGHT_GRADIENT_ROWS,
    Shape,
)
from log_prob_measure import (
    Gemms,
    Inputs,
    Provider,
    Reference,
    add_weight_gradient,
    gemm_milliseconds,
    mark,
    measure,
    milliseconds,
    synchronize,
)
from log_prob_peers import LOADERS, OUR_KEYS, load_providers


class Benchmark:
    """Measures what the command line asks for and adds it to the CSV.

    Args:
        arguments (Namespace): See there.
        parts (Sequence): Which parts.
        keys (Sequence): Which providers, as far as they belong to the parts.
    """

    def __init__(self, arguments: argparse.Namespace, parts: Sequence[str], keys: Sequence[str]):
        self._arguments = arguments
        self._device = torch.device(arguments.device)
        self._parts = parts
        for key in keys:
            if key not in LOADERS:
                sys.exit(f"error: --providers {key}: expected some of {','.join(LOADERS)}")
        if "reported" not in parts:
            keys = [key for key in keys if "op" in parts or key not in OUR_KEYS]
            keys = [key for key in keys if "peers" in parts or key in OUR_KEYS]
        self._providers, skipped = load_providers(
            keys, arguments.peers, arguments.slime, self._device
        )
        self._base = dict(
            date=date.today().isoformat(),
            gpu=torch.cuda.get_device_name() if self._device.type == "cuda" else "CPU",
            torch=torch.__version__,
            triton=_version("triton"),
        )
        for key, reason in skipped.items():
            print(f"skipped: {key}: {reason}", flush=True)
            self._write(provider=key, note=f"skipped: {reason}")

    def run(self) -> None:
        """Measures all parts."""
        size = self._arguments.size
        for key in self._arguments.shapes:
            shape = SHAPES[key]
            if size:
                shape = Shape("test", *size)
            if {"op", "gemms", "peers"} & set(self._parts):
                for rows in self._arguments.rows:
                    tokens = next((tokens for tokens in TOKENS if tokens >= rows), rows)
                    self._measure_rows(shape, tokens, rows)
            if "wgrad" in self._parts:
                for rows in WEIGHT_GRADIENT_ROWS if not size else self._arguments.rows:
                    self._measure_weight_gradients(shape, rows)
        if "reported" in self._parts:
            key, tokens, rows = REPORTED
            shape = SHAPES[key]
            if size:
                shape, tokens, rows = Shape("test", *size), tokens // 1000, rows // 1000
            # Without main_grad: there is no backward, and slime's way needs the memory.
            self._measure_rows(shape, tokens, rows, jobs=(FORWARD,))

    def _measure_rows(
        self, shape: Shape, tokens: int, rows: int, jobs: Optional[Tuple[str, ...]] = None
    ) -> None:
        """Measures the GEMMs and all providers at one number of rows."""
        backward = jobs is None
        jobs = jobs or JOBS
        providers = [provider for provider in self._providers if self._wants(provider, rows)]
        ours = [provider for provider in providers if provider.ours]
        if not providers and "gemms" not in self._parts:
            return
        inputs = Inputs(shape, tokens, rows, self._device, main_grad=backward)
        place = dict(tokens=tokens, rows=rows, hidden_size=shape.hidden_size, vocab=shape.vocab)
        print(f"\n{shape.label}: N = {rows:,} of {tokens:,}", flush=True)
        gemms = Gemms(inputs, backward)
        alone = gemms.measure(min(self._arguments.repeat, 7))
        note = ", ".join(f"{name} {value:.3f}" for name, value in alone.items())
        sums = [(GEMMS, FORWARD, 0)]
        if backward:
            sums += [(GEMMS, BACKWARD, 0), (f"{GEMMS}, forward twice", BACKWARD, 1)]
        for name, job, again in sums if ours or "gemms" in self._parts else []:
            taken = f"{gemm_milliseconds(alone, job, again):.3f}"
            self._report(place, provider=name, job=job, ms_p50=taken, note=note)
        if not providers:
            return
        reference = Reference(inputs)
        for provider in ours:
            self._measure_provider(provider, inputs, jobs, reference, alone, gemms, place)
        # The others' ratios to the GEMMs are no goal: without them between the calls there is
        # more memory, and more of the lease.
        del gemms
        for provider in providers:
            if not provider.ours:
                self._measure_provider(provider, inputs, jobs, reference, alone, None, place)
                inputs.drop_tokens()

    def _wants(self, provider: Provider, rows: int) -> bool:
        if provider.rows is None or self._arguments.everywhere:
            return True
        return rows in provider.rows

    def _measure_provider(
        self,
        provider: Provider,
        inputs: Inputs,
        jobs: Sequence[str],
        reference: Reference,
        alone: Dict[str, float],
        gemms: Optional[Gemms],
        place: Dict,
    ) -> None:
        """Measures one provider in all jobs."""
        if provider.all_tokens:
            inputs.add_tokens()
        kept = self._rows_kept(provider, inputs)
        for job in jobs:
            for entropy in provider.kinds_of_entropy(job):
                row = dict(
                    place,
                    provider=provider.name,
                    provider_version=provider.version,
                    job=job,
                    entropy=entropy,
                    same_job="yes" if provider.same_job else "no",
                    budget=provider.budget,
                    rows_kept=kept if job != FORWARD else None,
                    note=provider.note,
                )
                try:
                    found = measure(
                        provider,
                        inputs,
                        job,
                        entropy,
                        reference,
                        self._arguments.repeat,
                        self._arguments.seconds,
                        gemms,
                    )
                except Exception as error:  # out of memory, or a shape that it doesn't take
                    self._fail(row, error)
                    inputs.clear_gradients()
                    continue
                again = 0.0
                if kept is not None and job != FORWARD:
                    again = 1 - kept / inputs.rows
                products = gemm_milliseconds(found.gemms or alone, job, again)
                row.update(
                    peak_gib=f"{found.peak_gib:.3f}",
                    ms_p50=f"{found.median:.3f}",
                    ms_p20=f"{found.fifths[0]:.3f}",
                    ms_p80=f"{found.fifths[1]:.3f}",
                    gemm_ms=f"{products:.3f}",
                    ratio=f"{found.median / products:.3f}",
                )
                row.update({name: f"{value:.2e}" for name, value in found.errors.items()})
                self._report(row)

    def _rows_kept(self, provider: Provider, inputs: Inputs) -> Optional[int]:
        """Rows whose logits the op keeps, as its own plan says."""
        if not provider.ours:
            return None
        from megatron.core.fusions.linear_log_prob.chunking import plan_chunks

        # fp32 logits.
        plan = plan_chunks(
            inputs.rows,
            4 * inputs.shape.vocab,
            provider.budget,
            columns=inputs.shape.vocab,
            hidden_size=inputs.shape.hidden_size,
            itemsize=4,
        )
        return plan.kept_rows

    def _measure_weight_gradients(self, shape: Shape, rows: int) -> None:
        """Measures apex's accumulation into an fp32 `main_grad` against cuBLAS's through torch."""
        inputs = Inputs(shape, rows, rows, self._device)
        main_grad, hidden = inputs.weight.main_grad, inputs.hidden.detach()
        grad = torch.randn(rows, shape.vocab, device=self._device).bfloat16()
        # As the op has it where the gradient takes the place of the fp32 logits it is made of.
        apart = torch.zeros(rows, 2 * shape.vocab, dtype=grad.dtype, device=self._device)
        apart = apart[:, : shape.vocab].copy_(grad)
        place = dict(tokens=rows, rows=rows, hidden_size=shape.hidden_size, vocab=shape.vocab)
        print(f"\n{shape.label}: weight gradient, N = {rows:,}", flush=True)
        calls = {
            "addmm into fp32": lambda: add_weight_gradient(main_grad, grad, hidden),
            "addmm into fp32, rows 2 V apart": lambda: add_weight_gradient(
                main_grad, apart, hidden
            ),
        }
        try:
            import fused_weight_gradient_mlp_cuda as apex

            calls["apex wgrad_gemm_accum_fp32"] = lambda: apex.wgrad_gemm_accum_fp32(
                hidden, grad, main_grad
            )
        except ImportError as error:
            print(f"skipped: apex: {error}", flush=True)
        results, times = {}, {}
        for name, run in calls.items():
            main_grad.zero_()
            run()
            results[name] = main_grad[:: max(shape.vocab // 64, 1)].clone()
            run()
        # In turns, so that all see the same clocks.
        repeats = [
            {name: (mark(self._device), run(), mark(self._device)) for name, run in calls.items()}
            for _ in range(self._arguments.repeat)
        ]
        synchronize(self._device)
        expected = grad.t()[:: max(shape.vocab // 64, 1)].double() @ hidden.double()
        for name in calls:
            taken = [milliseconds(marks[name][0], marks[name][2]) for marks in repeats]
            times[name] = statistics.median(taken)
            fifths = statistics.quantiles(taken, n=5, method="inclusive")
            error = (results[name] - expected).norm() / expected.norm()
            self._report(
                place,
                provider=name,
                job=WEIGHT_GRADIENT,
                ms_p50=f"{times[name]:.3f}",
                ms_p20=f"{fifths[0]:.3f}",
                ms_p80=f"{fifths[-1]:.3f}",
                gemm_ms=f"{times['addmm into fp32']:.3f}",
                ratio=f"{times[name] / times['addmm into fp32']:.3f}",
                err_dweight=f"{error.item():.2e}",
            )

    def _fail(self, row: Dict, error: Exception) -> None:
        text = (str(error).splitlines() or [""])[0][:160]
        reason = f"skipped: {type(error).__name__}: {text}"
        error.__traceback__ = None  # it holds the tensors
        print(f"  {row['provider']}, {row['job']}: {reason}", flush=True)
        self._write(**dict(row, note=reason))
        gc.collect()
        if self._device.type == "cuda":
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError as lost:
                sys.exit(
                    f"error: {row['provider']} took the device down ({lost}); go on in a new "
                    f"process without it: --skip"
                )

    def _report(self, *rows: Dict, **more) -> None:
        row = {name: value for part in rows for name, value in part.items()}
        row.update(more)
        errors = " ".join(row.get(name) or "-" for name in COLUMNS if name.startswith("err_"))
        entropy = f", entropy {row['entropy']}" if row.get("entropy") else ""
        kept = f", {row['rows_kept']:,} kept" if row.get("rows_kept") is not None else ""
        print(
            f"  {row['provider'] + entropy + kept:58s} {row['job']:42s} {row['ms_p50']:>9s} ms"
            f" {row.get('ratio') or '-':>7s} x {row.get('peak_gib') or '-':>7s} GiB  {errors}",
            flush=True,
        )
        self._write(**row)

    def _write(self, **row) -> None:
        path = self._arguments.csv
        new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(dict(self._base, **row))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
