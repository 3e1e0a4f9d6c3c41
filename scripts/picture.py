"""Draws docs/images/speed.png from committed results: how many times as fast as exact attention, at each length."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
# label, color, result file, method
CURVES = (
    ("landmark (default: 256 means, 768 selected keys)", "C3", "speed_landmark_cpu", "favor:landmark"),
    ("landmark: 256 means, 256 selected keys", "C2", "speed_landmark_cpu", "favor:landmark+256"),
    ("favor+: 256 random features", "C0", "speed_landmark_cpu", "favor:pos"),
)
PANEL = "bidirectional, forward"


def speeds(name: str, method: str) -> dict[int, float]:
    """Gives, for each length, how many times as fast a method is as PyTorch's fastest exact attention (more is better).

    Args:
        name: a result file of eval/results/speed, without its ending; both times are of the run that it holds.
        method: the method, as the file names it.
    """
    cells = json.loads((ROOT / f"eval/results/speed/{name}.json").read_text())["cells"]
    wanted = [cell for cell in cells if (cell["panel"], cell["method"], cell["status"]) == (PANEL, method, "ok")]
    return {cell["length"]: cell["speedup"] for cell in wanted if cell["speedup"]}


def draw(path: Path) -> None:
    """Writes the picture to `path`."""
    figure, axes = plt.subplots(figsize=(7.5, 4))
    for label, color, name, method in CURVES:
        points = speeds(name, method)
        axes.plot(list(points), list(points.values()), color=color, marker="o", label=label, linewidth=2)
    length, speed = max(speeds(*CURVES[0][2:]).items())
    axes.annotate(
        f"{speed:.0f}x", (length, speed), (6, -16), textcoords="offset points", color="C3", size=15, weight="bold"
    )
    axes.axhline(1, color="black", label="exact attention (PyTorch's fastest)", linewidth=2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = [512, 1024, 2048, 4096, 8192, 16384]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_yticks([0.5, 1, 2, 4, 8, 16], ["0.5", "1", "2", "4", "8", "16"])
    axes.set_xlim(460, 24000)
    axes.set_xlabel("tokens")
    axes.set_ylabel("times as fast (more is better)")
    axes.set_title("Attention of one encoder layer, forward, on a CPU")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(ROOT / "docs/images/speed.png")
