"""Report of `favor.eval.long_form`: tables, checks, and the plot of time and memory over minutes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from favor.eval.common import report

DASH = "-"
MEMORY_SHARE = 0.25
Cell = dict[str, Any]


def lines(cells: Sequence[Cell], check: dict[str, Any], arguments: argparse.Namespace, load: Sequence[float]) -> Any:
    """Writes the Markdown report.

    Args:
        cells: all cells, in order.
        check: from `favor.eval.speech.long_form_cell.check`.
        arguments: of the program.
        load: load average of the machine before and after.
    """
    labels = list(dict.fromkeys(cell["backend"] for cell in cells))
    header = ["minutes", *labels]
    found = ["# Whole chapters in one pass", "", *_settings(cells, check, arguments, load), ""]
    found += ["Seconds of one pass, in brackets of the CPU alone:", "", *report.table(header, _rows(cells, _time)), ""]
    found += [
        "Peak memory of one pass in MB (10^6 bytes; output included, features not), in brackets over the loaded model,"
        " audio and features included:",
        "",
        *report.table(header, _rows(cells, _memory)),
        "",
    ]
    found += ["Recordings and their features:", "", *_features(cells), ""]
    if any("wer" in cell for cell in cells):
        found += [
            "Word error rate of the long pass in percent, in brackets of the same utterances one by one:",
            "",
            *report.table(header, _rows(cells, _words)),
            "",
        ]
    missing = [cell for cell in cells if cell["status"] != "ok"]
    if missing:
        found += ["Skipped or failed:", ""]
        found += [f"- {c['backend']} at {c['minutes']:g} minutes {c['status']}: {c['reason']}" for c in missing]
    return found


def _settings(
    cells: Sequence[Cell], check: dict[str, Any], arguments: argparse.Namespace, load: Sequence[float]
) -> list[str]:
    model = f"preset {arguments.preset}, random weights" if arguments.model_name_or_path is None else "a trained model"
    audio = "noise"
    if arguments.data_dir is not None:
        audio = f"utterances of one speaker of {arguments.split}, one after another"
    text = (
        f"ConformerForCTC, {model}; {arguments.num_features} features in the FAVOR backends, float32, batch 1, no "
        f"padding; audio: {audio}. Medians of {arguments.repeats} passes up to 2 minutes and {arguments.long_repeats} "
        "above. Time and memory of a cell each come from a process of its own, after one short pass; the features' "
        "time is not in that of the pass. Memory is the high-water mark of resident memory, while free blocks go back "
        f"to the system at once. A process may take {arguments.max_gigabytes:g} GB beyond its libraries. The load "
        f"average of the machine was {load[0]:.1f} before and {load[1]:.1f} after: where it is above the number of "
        "cores, a pass waits, and only the seconds of the CPU are its own."
    )
    shortest = f"At {cells[0]['minutes']:g} minutes"
    parts = []
    if check["difference"] is not None:
        parts.append(f"logits of sdpa and eager differ by at most {check['difference']:.1g}")
    parts += [
        f"those of {label} from sdpa's by {distance:.2g} (relative norm)"
        for label, distance in check["distance"].items()
        if distance is not None and label not in ("sdpa", "eager")
    ]
    return [text, "", f"{shortest} {', '.join(parts)}."] if parts else [text]


def _rows(cells: Sequence[Cell], show: Any) -> list[list[str]]:
    labels = list(dict.fromkeys(cell["backend"] for cell in cells))
    known = {(cell["minutes"], cell["backend"]): cell for cell in cells}
    return [
        [f"{minutes:g}", *(show(known[minutes, label]) for label in labels)]
        for minutes in dict.fromkeys(cell["minutes"] for cell in cells)
    ]


def _time(cell: Cell) -> str:
    if cell["status"] != "ok":
        return cell["status"]
    return f"{cell['pass']['seconds']:.3g} ({cell['pass']['cpu_seconds']:.3g})"


def _memory(cell: Cell) -> str:
    if cell["status"] != "ok":
        return cell["status"]
    return f"{cell['bytes']['pass'] / 1e6:.0f} ({cell['bytes']['total'] / 1e6:.0f})"


def _words(cell: Cell) -> str:
    return f"{100 * cell['wer']:.1f} ({100 * cell['utterance_wer']:.1f})" if "wer" in cell else DASH


def _features(cells: Sequence[Cell]) -> list[str]:
    rows = []
    for minutes in dict.fromkeys(cell["minutes"] for cell in cells):
        here = [cell for cell in cells if cell["minutes"] == minutes]
        done = next((cell for cell in here if cell["status"] == "ok"), None)
        numbers = [DASH] * 3
        if done is not None:
            numbers = [f"{done['features'][clock]:.3g}" for clock in ("seconds", "cpu_seconds")]
            numbers.append(f"{done['bytes']['features'] / 1e6:.0f}")
        told = "yes" if here[0]["repeated"] else "no"
        rows.append([f"{minutes:g}", f"{here[0]['seconds']:.0f}", str(here[0]["frames"]), told, *numbers])
    header = ["minutes", "seconds of audio", "encoder frames L", "utterances repeated"]
    return report.table([*header, "features, s", "features, s of the CPU", "features, peak MB"], rows)


def checks(cells: Sequence[Cell], max_gigabytes: float) -> list[report.Check]:
    """Checks the first FAVOR backend against exact attention at the longest duration that both have run."""
    favors = [cell for cell in cells if cell["backend"] not in ("sdpa", "eager")]
    if not favors:
        return []
    label = favors[0]["backend"]
    own = {cell["minutes"]: cell for cell in favors if cell["backend"] == label}
    done = {minutes: cell for minutes, cell in own.items() if cell["status"] == "ok"}
    longest = own[max(own)]
    peak = longest["bytes"]["resident"] / 1e9 if longest["status"] == "ok" else float("inf")
    found = [
        report.Check(
            f"{label} transcribes {longest['minutes']:g} minutes in one pass within {max_gigabytes:g} GB",
            f"{peak:.3g} GB resident, libraries included" if longest["status"] == "ok" else longest["reason"],
            peak <= max_gigabytes,
        )
    ]
    eager, sdpa = (_longest(cells, name, done) for name in ("eager", "sdpa"))
    if eager is not None:
        here, there = done[eager["minutes"]]["bytes"], eager["bytes"]
        share = here["pass"] / there["pass"]
        found.append(
            report.Check(
                f"at {eager['minutes']:g} minutes {label} needs at most {MEMORY_SHARE:g} of eager's peak memory",
                f"{here['pass'] / 1e6:.0f} of {there['pass'] / 1e6:.0f} MB, {share:.3f}; over the loaded model "
                f"{here['total'] / there['total']:.3f}",
                share <= MEMORY_SHARE,
            )
        )
    sdpas = {cell["minutes"]: cell for cell in cells if cell["backend"] == "sdpa" and cell["status"] == "ok"}
    for minutes in sorted({cell["minutes"] for cell in (eager, sdpa) if cell is not None} & set(sdpas)):
        mine, other = done[minutes]["pass"], sdpas[minutes]["pass"]
        found.append(
            report.Check(
                f"at {minutes:g} minutes {label} takes less time than sdpa",
                f"{mine['seconds']:.3g} and {other['seconds']:.3g} s, of the CPU {mine['cpu_seconds']:.3g} and "
                f"{other['cpu_seconds']:.3g} s",
                mine["seconds"] < other["seconds"],
            )
        )
    return found


def _longest(cells: Sequence[Cell], label: str, done: dict[float, Cell]) -> Cell | None:
    """Finds the longest cell of a backend that has run, among those with the minutes of a cell in `done`."""
    own = [cell for cell in cells if cell["backend"] == label and cell["status"] == "ok" and cell["minutes"] in done]
    return max(own, key=lambda cell: cell["minutes"], default=None)


def plot(cells: Sequence[Cell], path: Path) -> None:
    """Draws time and peak memory of a pass over minutes of audio, all axes logarithmic; nothing if no cell has run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    done = [cell for cell in cells if cell["status"] == "ok"]
    if not done:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8))
    for label in dict.fromkeys(cell["backend"] for cell in done):
        own = [cell for cell in done if cell["backend"] == label]
        minutes = [cell["seconds"] / 60 for cell in own]
        style = {"linestyle": "-" if label.startswith("favor") else "--", "marker": "o", "markersize": 4}
        left.plot(minutes, [cell["pass"]["seconds"] for cell in own], label=label, **style)
        right.plot(minutes, [cell["bytes"]["pass"] / 1e6 for cell in own], label=label, **style)
    for axes, name in ((left, "time of a pass, s"), (right, "peak memory of a pass, MB")):
        axes.set(xscale="log", yscale="log", xlabel="minutes of audio", ylabel=name)
        ticks = sorted({cell["minutes"] for cell in done})
        axes.set_xticks(ticks, [f"{minutes:g}" for minutes in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
