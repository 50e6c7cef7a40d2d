# Copyright (c) 2026, the megatron-core-selective authors. Licensed under the Apache License, Version 2.0.

"""Peak memory and time of a GPTModel of whose logits some rows are used: stock against selected.

    python benchmarks/model_memory.py --stock /path/to/unpatched/Megatron-LM    # measure, one GPU
    python benchmarks/model_memory.py --table                                   # README's table

A step is what RL post-training does with a micro-batch: forward in `Float16Module`, fp32 logits,
log-probs of the trained tokens by Megatron's own vocabulary-parallel cross entropy, backward. Stock
computes the logits of all tokens and drops the log-probs of the others; the fork selects rows.
Both train the same rows of the same packed sequence. *Output stage* is the same model with a
decoder that returns its input, so head, upcast and log-probs alone.

Every measurement has a process of its own, which imports `megatron.core` from `--stock` or from
where the fork is installed. Rows go to `model_memory.csv` beside this file.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

CSV = Path(__file__).with_suffix(".csv")
REPOSITORY = Path(__file__).resolve().parents[1]
COLUMNS = (
    "date,gpu,torch,transformer_engine,megatron_core,variant,part,pass,tokens,rows,hidden_size,"
    "vocab,layers,peak_gib,ms_p50,ms_p20,ms_p80,largest_log_prob_difference"
).split(",")
PARTS = ("model", "output stage")
PASSES = ("forward", "forward + backward")


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--stock", type=Path, help="an unpatched Megatron tree to compare with")
    parser.add_argument("--table", action="store_true", help="print the table of the CSV and stop")
    parser.add_argument("--tokens", type=int, default=11776, help="packed tokens T")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[2944, 1178, 11776], help="trained rows N"
    )
    parser.add_argument("--hidden", type=int, default=4096, help="hidden size")
    parser.add_argument("--vocab", type=int, default=62080, help="vocabulary")
    parser.add_argument("--layers", type=int, default=2, help="decoder layers")
    parser.add_argument("--steps", type=int, default=15, help="timed steps")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measures every combination, or does one of them in a process that was started for it."""
    arguments = parse_arguments()
    if arguments.table:
        print(make_table())
    elif arguments.measure:
        measure(**json.loads(arguments.measure))
    elif arguments.stock is None or not (arguments.stock / "megatron/core/__init__.py").is_file():
        sys.exit(
            f"error: --stock {arguments.stock}: expected the root of an unpatched Megatron tree"
        )
    else:
        measure_all(arguments)


def measure_all(arguments: argparse.Namespace) -> None:
    """Runs every measurement in a process of its own and writes the CSV."""
    with tempfile.TemporaryDirectory() as folder, CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for part in PARTS:
            for rows in arguments.rows:
                for variant in ("stock", "selected"):
                    job = dict(
                        variant=variant,
                        part=part,
                        tokens=arguments.tokens,
                        rows=rows,
                        hidden_size=arguments.hidden,
                        vocab=arguments.vocab,
                        layers=arguments.layers if part == "model" else 1,
                        steps=arguments.steps,
                        folder=folder,
                    )
                    environment = dict(os.environ)
                    if variant == "stock":
                        environment["PYTHONPATH"] = os.pathsep.join(
                            [str(arguments.stock), environment.get("PYTHONPATH", "")]
                        )
                    subprocess.run(
                        [sys.executable, __file__, "--measure", json.dumps(job)],
                        check=True,
                        env=environment,
                    )
                    writer.writerows(json.loads(Path(folder, "rows.json").read_text()))
                    file.flush()
    print(make_table())


def measure(variant, part, tokens, rows, hidden_size, vocab, layers, steps, folder) -> None:
    """Measures one variant in this process; leaves its rows of the CSV in `folder`."""
    import torch
    import transformer_engine

    import megatron.core
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    # Not a mask of single tokens: model-written spans of some hundred tokens, as in an episode.
    mask = span_mask(tokens, rows)
    model = make_model(part, tokens, hidden_size, vocab, layers)
    generator = torch.Generator("cuda").manual_seed(5)
    ids = torch.randint(0, vocab, (1, tokens), device="cuda", generator=generator)
    targets = torch.randint(0, vocab, (1, tokens), device="cuda", generator=generator)
    advantages = torch.randn(1, tokens, device="cuda", generator=generator)
    inputs = dict(
        input_ids=ids, position_ids=torch.arange(tokens, device="cuda")[None], attention_mask=None
    )
    if part == "output stage":
        inputs["decoder_input"] = torch.randn(
            tokens, 1, hidden_size, device="cuda", dtype=torch.bfloat16, generator=generator
        ).requires_grad_()

    def log_probs_of_trained_rows():
        if variant == "stock":
            logits = model(**inputs)
            # [b s v] => [s b v], the layout of upstream's cross entropy.
            losses = vocab_parallel_cross_entropy(logits.transpose(0, 1), targets.transpose(0, 1))
            return -losses.transpose(0, 1)[mask]
        logits = model(**inputs, output_row_selector=mask)
        return -vocab_parallel_cross_entropy(logits.transpose(0, 1), targets[mask][:, None])[:, 0]

    def step(backward):
        with torch.set_grad_enabled(backward):
            log_probs = log_probs_of_trained_rows()
            if backward:
                (log_probs * advantages[mask]).sum().backward()
        return log_probs.detach()

    def clear():
        for tensor in [*model.parameters(), *inputs.values()]:
            if tensor is not None:
                tensor.grad = None

    base = dict(
        date=date.today().isoformat(),
        gpu=torch.cuda.get_device_name(),
        torch=torch.__version__,
        transformer_engine=transformer_engine.__version__,
        megatron_core=megatron.core.__version__,
        variant=variant,
        part=part,
        tokens=tokens,
        rows=rows,
        hidden_size=hidden_size,
        vocab=vocab,
        layers=layers,
    )
    found = []
    for name, backward in zip(PASSES, (False, True)):
        for _ in range(3):  # kernels are loaded and chosen
            log_probs = step(backward)
            clear()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(backward)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        clear()
        times = []
        for _ in range(steps):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step(backward)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
            clear()
        fifths = statistics.quantiles(times, n=5)
        row = dict(
            base,
            peak_gib=f"{peak / 2**30:.3f}",
            ms_p50=f"{statistics.median(times):.2f}",
            ms_p20=f"{fifths[0]:.2f}",
            ms_p80=f"{fifths[-1]:.2f}",
        )
        row["pass"] = name
        found.append(row)
    # Stock comes first; the other variant says how far its values are from those.
    values = Path(folder) / "log_probs.pt"
    if variant == "stock":
        torch.save(log_probs, values)
    else:
        difference = (log_probs - torch.load(values)).abs().max().item()
        for row in found:
            row["largest_log_prob_difference"] = f"{difference:.2e}"
    Path(folder, "rows.json").write_text(json.dumps(found))
    for row in found:
        print(
            f"{part}, {row['pass']}, {variant}, {rows} rows: {row['peak_gib']} GiB, "
            f"{row['ms_p50']} ms",
            flush=True,
        )
    torch.distributed.destroy_process_group()


def span_mask(tokens: int, rows: int):
    """A mask `[1, tokens]` of `rows` rows, in even spans of about 256."""
    import torch

    spans = max(1, rows // 256)
    mask = torch.zeros(1, tokens, dtype=torch.bool, device="cuda")
    for span in range(spans):
        length = rows * (span + 1) // spans - rows * span // spans
        end = tokens * (span + 1) // spans
        mask[0, end - length : end] = True
    assert mask.sum() == rows, f"{rows} rows do not fit into {tokens} tokens"
    return mask


def make_model(part: str, tokens: int, hidden_size: int, vocab: int, layers: int):
    """A bf16 GPTModel of Transformer Engine layers in Float16Module, on one rank."""
    import torch

    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.cuda.set_device(0)
    torch.distributed.init_process_group(
        "nccl", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    tensor_parallel.random.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden_size,
        num_attention_heads=hidden_size // 128,
        num_query_groups=max(hidden_size // 512, 1),
        ffn_hidden_size=3 * hidden_size,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_with_transformer_engine_spec(),
        vocab_size=vocab,
        max_sequence_length=tokens,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        parallel_output=True,
    ).cuda()
    if part == "output stage":
        model.decoder.forward = lambda hidden_states, **kwargs: hidden_states
    return Float16Module(config, model)


def make_table() -> str:
    """README's table as markdown: whole models, 25 % and all of the tokens."""
    with CSV.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {(row["part"], row["pass"], row["rows"], row["variant"]): row for row in rows}
    lines = [
        "| | rows N of T | peak, stock | selected | ratio | time, stock | selected | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (part, passes, count, variant), stock in found.items():
        if variant != "stock" or part != "model" or count not in ("2944", stock["tokens"]):
            continue
        ours = found[part, passes, count, "selected"]
        peaks = float(stock["peak_gib"]), float(ours["peak_gib"])
        times = float(stock["ms_p50"]), float(ours["ms_p50"])
        lines.append(
            f"| {part}, {passes} | {int(count):,} of {int(stock['tokens']):,} "
            f"| {peaks[0]:.2f} GiB | {peaks[1]:.2f} GiB | {peaks[1] / peaks[0]:.2f} "
            f"| {times[0]:.1f} ms | {times[1]:.1f} ms | {times[1] / times[0]:.2f} |"
        )
    some = rows[0]
    lines += [
        "",
        f"{some['gpu']}, torch {some['torch']}, Transformer Engine {some['transformer_engine']}, "
        f"bf16, H = {some['hidden_size']}, vocabulary {some['vocab']}, TP 1; peaks above weights "
        f"and input, gradients included; medians of one run, {some['date']}.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
