"""Time and peak memory of the Transducer loss, compared with log_softmax and autograd through the recursion.

    python -m favor.eval.transducer_loss

Times are of a forward and backward pass in float32, for sequences without padding. There are two tables: one starts at
logits `[B, T, U + 1, V]`, the other at the inputs of the joint network that makes the logits. A method is only timed if
its loss and its gradients for the first sequence agree with float64. Peak memory is the memory that a pass allocates at
its peak, without its inputs; on a CPU each number is measured in a fresh process (see `favor.eval.speed.measure`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from favor.eval.common.program import add_results
from favor.train.common.program import Parser


@dataclass(frozen=True)
class Cell:
    """Sizes of one comparison: batch, frames, labels, vocabulary, and widths of the joint network."""

    B: int
    T: int
    U: int
    V: int
    width: int = 128
    device: str = "cpu"
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> tuple[int, int, int, int]:
        """Reads `BxTxUxV`."""
        numbers = tuple(int(part) for part in text.split("x"))
        if len(numbers) != 4 or min(numbers) < 1 or numbers[3] < 2:
            raise argparse.ArgumentTypeError(f"expected BxTxUxV like 4x200x50x128, V at least 2; got {text!r}")
        return numbers

    @property
    def label(self) -> str:
        """Gives the sizes in the form that `parse` reads."""
        return f"{self.B}x{self.T}x{self.U}x{self.V}"

    @property
    def logits_bytes(self) -> int:
        """Bytes of all logits in float32."""
        return 4 * self.B * self.T * (self.U + 1) * self.V


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.transducer_loss", __doc__)
    sizes = ["4x200x50x128", "4x200x50x1024", "8x400x100x256"]
    parser.add_argument(
        "--sizes",
        type=Cell.parse,
        nargs="+",
        default=[*map(Cell.parse, sizes)],
        metavar="BxTxUxV",
        help="batch, frames, tokens and vocabulary",
    )
    parser.add_argument("--width", type=int, default=128, help="width of the joint network")
    parser.add_argument("--max_cells", type=int, default=4096, help="argument of joint_transducer_loss")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device to run on")
    parser.add_argument(
        "--kernels", nargs="+", choices=("torch", "triton"), help="kernels of the loss; default: torch; on CUDA both"
    )
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each method")
    parser.add_argument("--seconds_per_cell", type=float, default=30.0, help="a slower method is repeated less often")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices")
    add_results(parser, "transducer_loss")
    parser.add_argument("--isolate", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    import torch

    from favor.eval.speed import measure

    if min(arguments.repeats, arguments.threads, arguments.max_cells, arguments.width) < 1:
        parser.error("--repeats, --threads, --max_cells and --width must be at least 1")

    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("expected a CUDA device for --device cuda, got none")
    if arguments.device == "cpu" and (problem := measure.MemoryServer.problem()):
        parser.error(problem)
    arguments.kernels = arguments.kernels or (["torch", "triton"] if arguments.device == "cuda" else ["torch"])
    return arguments
