"""Word error rates of CTC on Whisper's encoder, pass by pass: greedy search, language models, Whisper's decoder.

    python -m favor.eval.whisper_ctc out/whisper_ctc --data_dir DATA --language_model lm.arpa --whisper whisper

The first pass is greedy search. The second is the beam search among the words of a language model. The third takes the
best texts of the second, and adds to their scores the log probability that a causal language model gives them, after
the texts found before them in the chapter (`--context_texts`). The n-gram model can have another weight beside it
(`--ngram_weights`), since the two know much of the same. The fourth does the same with a Whisper (its own encoder and
decoder, once for each text): rescoring as in U2 (Zhang et al. 2020, arXiv:2012.05481), but by a model that was not
trained with the first one. All weights are chosen on the split `--choose_on`, so error rates of that split are too
good; those of `--split` are not. If the tokens of the model are phonemes, words are found by their pronunciations
(`--lexicon`), and greedy search looks them up. Several folders are measured as one model: the mean of their log
probabilities in each frame, for which they must share their tokens. Transcripts are compared word by word, in capitals.
Bootstrap intervals draw speakers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from favor.eval.common.program import add_results
from favor.train.common.program import Parser


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.whisper_ctc", __doc__)
    add = parser.add_argument
    parser.add_place(
        "model_name_or_path",
        "models",
        "folder of a model that favor.train.asr has saved; of several, log probabilities of tokens are averaged",
        nargs="+",
    )
    add("--data_dir", type=Path, required=True, help="folder in LibriSpeech's layout, or with manifests")
    add("--choose_on", default="dev", help="split on which weights are chosen")
    add("--split", default="test", help="split to evaluate; several are joined by +")
    add("--language_model", type=Path, help="ARPA file or binary file of KenLM; default: greedy search alone")
    add("--lexicon", type=Path, help="pronunciations for a model of phonemes; default: those in its folder, if any")
    add("--lm_weights", type=float, nargs="+", default=[0.3, 0.5, 0.7], help="weights to choose from")
    add("--word_scores", type=float, nargs="+", default=[0.5, 1.5, 2.5], help="scores of a word to choose from")
    add("--beam_size", type=int, default=500, help="hypotheses of the beam search")
    add("--choose_beam_size", type=int, default=100, help="the same while weights are chosen")
    add("--choose_samples", type=int, help="utterances on which they are chosen, evenly spaced; default: all")
    add("--causal_model", help="folder of a causal language model that rescores, or gemma; default: none")
    add(
        "--causal_weights",
        type=float,
        nargs="+",
        default=[0.0, 0.2, 0.4, 0.6, 0.8, 1.0],
        help="weights of its log probability to choose from",
    )
    add(
        "--ngram_weights",
        type=float,
        nargs="+",
        help="weights of the n-gram model to choose from with those of the first model that rescores; default: that of "
        "the search",
    )
    add("--context_texts", type=int, default=0, help="texts of a chapter that the causal model reads before each text")
    add("--whisper", type=Path, help="folder of a Whisper that rescores; default: no rescoring")
    add("--rescored_texts", type=int, default=30, help="texts of each utterance that are rescored")
    add(
        "--whisper_weights",
        type=float,
        nargs="+",
        default=[0.0, 0.2, 0.5, 1.0, 2.0, 4.0],
        help="weights of Whisper's log probability to choose from",
    )
    add("--max_eval_samples", type=int, help="utterances per split, evenly spaced; default: all")
    add_results(parser, "whisper_ctc")
    arguments = parser.parse_args(argv)
    sizes = (arguments.beam_size, arguments.choose_beam_size, arguments.rescored_texts, arguments.max_eval_samples or 1)
    if min(*sizes, arguments.choose_samples or 1) < 1:
        names = "--beam_size, --choose_beam_size, --choose_samples, --rescored_texts and --max_eval_samples"
        parser.error(f"{names} must be at least 1")
    if arguments.context_texts < 0:
        parser.error(f"--context_texts must be at least 0, got {arguments.context_texts}")
    if arguments.context_texts and arguments.causal_model is None:
        parser.error("--context_texts is what the causal model reads, so it needs --causal_model")
    second = {"--causal_model": arguments.causal_model, "--whisper": arguments.whisper}
    for name, model in second.items():
        if model is not None and arguments.language_model is None:
            parser.error(f"{name} rescores the texts of the beam search, so it needs --language_model")
    if arguments.ngram_weights and not any(second.values()):
        parser.error("--ngram_weights are for texts that are rescored, so they need --causal_model or --whisper")
    return arguments
