"""Loss of masked words against training steps, for each attention, from the same start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from favor.eval.common import launch, report
from favor.eval.options.mlm_steps import parse_arguments
from favor.train.common.lock import hold, releases_locks
from favor.train.common.program import program


def table_lines(curves: dict[str, dict[int, float]], seconds: dict[str, float]) -> list[str]:
    """Makes the Markdown table: losses at each step, and the time of a step."""
    steps = sorted({step for curve in curves.values() for step in curve})
    rows = [
        [name, *(f"{curve[step]:.3f}" if step in curve else "" for step in steps), f"{seconds[name]:.2f}"]
        for name, curve in curves.items()
    ]
    return report.table(["attention", *(f"step {step}" for step in steps), "seconds a step"], rows)


def plot(curves: dict[str, dict[int, float]], path: Path) -> None:
    """Draws the curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, curve in curves.items():
        axes.plot(list(curve), list(curve.values()), marker="o", label=name)
    axes.set(xlabel="training steps", ylabel="loss of masked words, nats (less is better)")
    figure.legend(loc="outside right upper")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


@releases_locks
def main(argv: Sequence[str] | None = None) -> int:
    """Trains, and writes the report after each run; returns the exit code."""
    arguments, rest = parse_arguments(argv)
    hold(arguments.output_dir)
    folder = arguments.results_dir or arguments.output_dir
    words = report.local_names(arguments.command)
    command = report.shown_command("favor.eval.mlm_steps", words, [], ["--output_dir", "--results_dir"])
    facts = (
        "Cross-entropy of masked words of the evaluation text, in nats; less is better. All rows begin with the "
        f"weights of {Path(arguments.model).name}."
    )
    curves: dict[str, dict[int, float]] = {}
    seconds: dict[str, float] = {}
    machines: set[str] = set()
    versions: dict[str, set[str]] = {}
    for backend in arguments.backends:
        given = ["--model_name_or_path", arguments.model, *backend.arguments(), *rest]
        place = arguments.output_dir / backend.slug
        results, machine, _ = launch.train_once(given, backend, place, program="favor.train.mlm")
        machines.add(machine)
        for package, version in results["versions"].items():
            versions.setdefault(package, set()).add(version)
        curve = {0: results["metrics_before"]["loss"]}
        curve |= {entry["step"]: entry["metrics"]["loss"] for entry in results["history"]}
        curves[backend.label], seconds[backend.label] = curve, results["seconds_per_step"]
        print(f"{backend.label}: {', '.join(f'{loss:.3f}' for loss in curve.values())}", flush=True)
        content = {
            "command": command,
            "machine": "; ".join(sorted(machines)),
            "versions": {package: ", ".join(sorted(found)) for package, found in versions.items()},
            "curves": curves,
            "seconds_per_step": seconds,
        }
        lines = ["# Loss of masked words against training steps", "", facts, "", *table_lines(curves, seconds)]
        report.write(folder, arguments.name, lines, content, [])
        plot(curves, folder / f"{arguments.name}.png")
    print("\n".join(["", *table_lines(curves, seconds)]))
    return 0


cli = program("favor.eval.mlm_steps", main)


if __name__ == "__main__":
    cli()
