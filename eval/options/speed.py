"""Speed and memory of FAVOR attention, compared with exact attention and other packages, with results checked first.

    python -m favor.eval.speed                             attention, by length, direction and pass
    python -m favor.eval.speed --model_types bert llama    whole models, in tokens per second

The program writes a Markdown table, JSON and a plot. Results are checked in float64 before they are timed: a cell whose
result is wrong shows FAILED and no time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from favor.eval.common.program import device_or_default
from favor.train.common.program import Parser

DTYPES = ("float32", "bfloat16", "float16")
DIRECTIONS = ("bidirectional", "causal")
MODELS = ("bert", "llama")
GROUPS = ("favor", "sdpa", "eager", "performer", "fla")
PASSES = ("forward", "forward+backward")
LONGEST = {"cpu": 1 << 15, "cuda": 1 << 18}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments and fills in defaults that depend on the device; ends the program for bad ones."""
    parser = Parser("favor.eval.speed", __doc__)
    add = parser.add_argument
    add("--model_types", nargs="+", choices=MODELS, help="time whole models instead of attention")
    add("--num_hidden_layers", type=int, default=12, help="layers of the models")
    add("--lengths", type=int, nargs="+", help="default: powers of two from 128 to 32768 (CPU) or 262144 (CUDA)")
    add("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS, help="directions of attention")
    add("--passes", nargs="+", choices=PASSES, default=PASSES, help="passes to time")
    add("--methods", nargs="+", choices=GROUPS, default=GROUPS, help="methods to compare")
    add(
        "--families",
        nargs="+",
        default=["pos"],
        help="registry names of families, one row each; NAME@128 with exact blocks of 128 tokens, landmark+256 "
        "with 256 selected keys, landmark+0 with none",
    )
    add("--per_device_eval_batch_size", type=int, default=1, help="sequences of a batch")
    add("--num_attention_heads", type=int, default=8, help="attention heads")
    add("--num_key_value_heads", type=int, help="heads of keys and values; default: as many as heads")
    add("--head_dim", type=int, default=64, help="width of a head")
    add("--num_features", type=int, default=256, help="random features, or means of landmarks in encoders, per head")
    add("--kernel", choices=("auto", "torch", "triton"), default="auto", help="kernel of favor_attention")
    add(
        "--device",
        choices=("cpu", "cuda"),
        help="device to run on; default: cuda if there is a GPU, else cpu",
    )
    add("--dtype", choices=DTYPES, help="type of the numbers; default: float32 on a CPU, bfloat16 on CUDA")
    add("--repeats", type=int, default=20, help="greatest number of measurements of a method in a cell")
    add("--seconds_per_cell", type=float, default=1.0, help="a method slower than this is repeated less often")
    add("--max_seconds", type=float, default=10.0, help="a method whose pass would take longer is skipped")
    add("--max_gigabytes", type=float, help="GB that a method may need; default: half of the free memory")
    add("--cuda_graph", action="store_true", help="time replays of a CUDA graph, without the time of the host")
    add("--skip_memory", action="store_true", help="do not measure peak memory")
    add("--threads", type=int, help="CPU threads; default: those of torch")
    add("--seed", type=int, default=0, help="seed of all random choices")
    add("--magnitude", type=float, default=1.0, help="standard deviation of the numbers in queries and keys")
    add("--output_dir", type=Path, default=Path("eval/results"), help="folder of the results")
    add("--name", help="name of the files; default: speed_cpu, speed_gpu, models_cpu or models_gpu")
    add("--isolate", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    import torch

    arguments.device = device_or_default(arguments.device)
    cuda = arguments.device == "cuda"
    if cuda and not torch.cuda.is_available():
        parser.error("expected a CUDA device for --device cuda, got none; use --device cpu")
    if arguments.cuda_graph and (not cuda or arguments.model_types):
        parser.error("expected --cuda_graph with --device cuda and without --model_types")
    arguments.dtype = arguments.dtype or ("bfloat16" if cuda else "float32")
    arguments.num_key_value_heads = arguments.num_key_value_heads or arguments.num_attention_heads
    if arguments.num_attention_heads % arguments.num_key_value_heads:
        numbers = f"{arguments.num_attention_heads}, {arguments.num_key_value_heads}"
        parser.error(f"expected --num_attention_heads to be a multiple of --num_key_value_heads, got {numbers}")
    if arguments.lengths is None:
        arguments.lengths = [1 << power for power in range(7, LONGEST[arguments.device].bit_length())]
    sizes = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "num_features")
    for name in (*sizes, "per_device_eval_batch_size", "repeats"):
        if getattr(arguments, name) < 1:
            parser.error(f"expected --{name} of at least 1, got {getattr(arguments, name)}")
    arguments.lengths = sorted(set(arguments.lengths))
    if arguments.lengths[0] < 1:
        parser.error(f"expected --lengths of at least 1, got {arguments.lengths[0]}")
    if arguments.name is None:
        arguments.name = ("models_" if arguments.model_types else "speed_") + ("gpu" if cuda else "cpu")
    return arguments
