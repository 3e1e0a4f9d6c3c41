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
import difflib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from favor.eval import asr
from favor.eval.common import report
from favor.eval.common.program import add_results
from favor.eval.language.models import load as load_language_model
from favor.eval.speech.scores import check_alike, frame_scores, language_scores, rescored, text_scores, texts_before
from favor.eval.speech.whisper_report import edits_of, interval
from favor.eval.whisper import load as load_whisper
from favor.models.speech import (
    ConformerProcessor,
    Pronunciations,
    WordLexicon,
    ctc_align,
    ctc_emissions,
    ctc_greedy,
    ctc_lexicon_beam,
    join_words,
)
from favor.models.speech.pronunciations import lexicon_of
from favor.train.common.program import Parser, program
from favor.train.speech.data import Utterance
from favor.train.speech.sources import load_speech
from favor.train.speech.word_errors import word_errors
from favor_command.saved import load_processor


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments; ends the program for bad ones."""
    parser = Parser("favor.eval.whisper_ctc", __doc__)
    add = parser.add_argument
    text = "folder of a model that favor.train.asr has saved; of several, log probabilities of tokens are averaged"
    parser.add_place("model_name_or_path", "models", text, nargs="+")
    add("--data_dir", type=Path, required=True, help="folder in LibriSpeech's layout, or with manifests")
    add("--choose_on", default="dev", help="split on which weights are chosen")
    add("--split", default="test", help="split to evaluate; several are joined by +")
    add("--language_model", type=Path, help="ARPA file or binary file of KenLM; default: greedy search alone")
    add("--lexicon", type=Path, help="pronunciations for a model of phonemes; default: those in its folder, if any")
    add("--causal_model", help="folder of a causal language model that rescores, or gemma; default: none")
    add("--context_texts", type=int, default=0, help="texts of a chapter that the causal model reads before each text")
    add("--whisper", type=Path, help="folder of a Whisper that rescores; default: no rescoring")
    weights = {
        "lm_weights": ([0.3, 0.5, 0.7], "weights of the n-gram model"),
        "word_scores": ([0.5, 1.5, 2.5], "scores of a word"),
        "causal_weights": ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], "weights of the causal model's log probability"),
        "ngram_weights": (None, "weights of the n-gram model beside the first one that rescores (that of the search)"),
        "whisper_weights": ([0.0, 0.2, 0.5, 1.0, 2.0, 4.0], "weights of Whisper's log probability"),
    }
    for name, (default, text) in weights.items():
        add(f"--{name}", type=float, nargs="+", default=default, help=f"{text}, to choose from")
    sizes = {
        "beam_size": (500, "hypotheses of the beam search"),
        "choose_beam_size": (100, "hypotheses while weights are chosen"),
        "choose_samples": (None, "utterances on which they are chosen, evenly spaced; default: all"),
        "rescored_texts": (30, "texts of each utterance that are rescored"),
        "max_eval_samples": (None, "utterances per split, evenly spaced; default: all"),
    }
    for name, (number, text) in sizes.items():
        add(f"--{name}", type=int, default=number, help=text)
    add_results(parser, "whisper_ctc")
    arguments = parser.parse_args(argv)
    if any(getattr(arguments, name) is not None and getattr(arguments, name) < 1 for name in sizes):
        parser.error(f"{', '.join(f'--{name}' for name in sizes)} must be at least 1")
    if arguments.context_texts < 0:
        parser.error(f"--context_texts must be at least 0, got {arguments.context_texts}")
    if arguments.context_texts and arguments.causal_model is None:
        parser.error("--context_texts is what the causal model reads, so it needs --causal_model")
    used = [name for name in ("causal_model", "whisper") if getattr(arguments, name) is not None]
    if used and arguments.language_model is None:
        parser.error(f"--{used[0]} rescores the texts of the beam search, so it needs --language_model")
    if arguments.ngram_weights and not used:
        parser.error("--ngram_weights are for texts that are rescored, so they need --causal_model or --whisper")
    return arguments


NEAR = 0.08  # seconds
Texts = list[list[tuple[str, float]]]
Scores = Callable[[Sequence[Utterance], Texts], list[list[float]]]


def greedy(logits: Sequence[Tensor], tokenizer: Any, blank: int, spoken: Pronunciations | None) -> list[str]:
    """Gives the text of each utterance by greedy search, with words looked up if the tokens are phonemes."""
    rows = [ctc_greedy(row[None], [len(row)], blank=blank)[0] for row in logits]
    texts = [tokenizer.decode(ids, group_tokens=False) for ids in rows]
    return texts if spoken is None else [spoken.read(text) for text in texts]


def beam(logits: Sequence[Tensor], blank: int, lexicon: WordLexicon, size: int) -> Texts:
    """Gives the texts of each utterance by beam search, the best first, with their scores."""
    rows = [ctc_lexicon_beam(row[None], [len(row)], lexicon, size, blank)[0] for row in logits]
    return [[(" ".join(one.words), one.log_prob) for one in row] for row in rows]


def errors(utterances: Sequence[Utterance], texts: Sequence[str]) -> dict[str, Any]:
    """Counts word errors; gives rate, interval over speakers, edits, and the errors of each utterance."""
    edits = edits_of([word_errors([one.text], [text]) for one, text in zip(utterances, texts, strict=True)])
    errors, words = edits["errors_of_pieces"], [len(one.text.split()) for one in utterances]
    speakers = [one.speaker or "" for one in utterances]
    return {"wer": sum(errors) / sum(words), "interval": interval(errors, words, speakers), **edits}


def time_errors(
    logits: Sequence[Tensor],
    utterances: Sequence[Utterance],
    processor: Any,
    config: Any,
    spoken: Pronunciations | None = None,
) -> dict[str, float]:
    """Compares times of words that greedy search finds with those of the forced alignment of the transcript.

    If the tokens are phonemes, a word is found if its phonemes are; transcripts with unknown words do not count. Gives
    how many "words" are found, and the part "within" of them whose start and end both differ by at most 80 ms.
    """
    spans, blank = processor.tokenizer.spans, config.pad_token_id
    most = NEAR * processor.feature_extractor.sampling_rate / config.samples_per_frame
    near: list[bool] = []
    for row, one in zip(logits, utterances, strict=True):
        if spoken is not None and spoken.missing(one.text):
            continue
        length, text = [len(row)], one.text if spoken is None else spoken.write(one.text)
        heard = join_words(spans(ctc_emissions(row[None], length, blank)[0]))
        said = join_words(spans(ctc_align(row[None], length, processor.labels(text), blank=blank)[0]))
        matcher = difflib.SequenceMatcher(None, [word.text for word in heard], [word.text for word in said], False)
        for mine, other, size in matcher.get_matching_blocks():
            for own, true in zip(heard[mine : mine + size], said[other : other + size], strict=True):
                near.append(max(abs(own.start - true.start), abs(own.end - true.end)) <= most)
    return {"words": len(near), "within": sum(near) / max(1, len(near))}


def best_texts(texts: Texts) -> list[str]:
    """Gives the first text of each utterance, an empty one if there is none."""
    return [own[0][0] if own else "" for own in texts]


def choose_words(
    logits: Sequence[Tensor], utterances: Sequence[Utterance], blank: int, words: WordLexicon, arguments: Any
) -> WordLexicon:
    """Finds the weight of the language model and the score of a word with the fewest errors."""
    rates: dict[tuple[float, float], float] = {}
    places = asr.evenly_spaced(range(len(utterances)), arguments.choose_samples)
    few, said = [logits[place] for place in places], [utterances[place] for place in places]
    for weight, score in itertools.product(arguments.lm_weights, arguments.word_scores):
        texts = best_texts(beam(few, blank, words.weighted(weight, score), arguments.choose_beam_size))
        rates[weight, score] = errors(said, texts)["wer"]
        print(f"lm_weight {weight:g}, word_score {score:g}: {100 * rates[weight, score]:.2f} %", flush=True)
    return words.weighted(*min(rates, key=lambda pair: rates[pair]))


def ngram_scores(lexicon: WordLexicon, texts: Texts) -> list[list[float]]:
    """Gives the log probability of each text by the n-gram language model alone."""
    alone = lexicon.weighted(1.0, 0.0)
    return [[alone.score(text.split()) for text, _ in own] for own in texts]


def table_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Makes the Markdown table."""
    header = ["split", "search", "WER %", "95 %", "S / D / I"]
    cells = []
    for row in rows:
        edits = " / ".join(str(row[kind]) for kind in ("substitutions", "deletions", "insertions"))
        low, high = (f"{100 * value:.1f}" for value in row["interval"])
        cells.append([row["split"], row["search"], f"{100 * row['wer']:.2f}", f"{low} to {high}", edits])
    return report.table(header, cells)


def described(models: Sequence[dict[str, Any]]) -> str:
    """Says which models were measured, and that their log probabilities were averaged if they are several."""
    kind, attention = (" and ".join(dict.fromkeys(one[name] for one in models)) for name in ("kind", "attention"))
    several, size = len(models) > 1, f"{sum(one['parameters'] for one in models):,} parameters"
    mean = f"Mean of the log probabilities of {len(models)} models: " * several
    return f"{mean}{kind}, {size}{' together' * several}, attention {attention}"


def second_passes(arguments: Any) -> dict[str, tuple[list[float], Scores]]:
    """Gives the models that score the texts of the search, each by its name, with the weights to choose from."""
    found: dict[str, tuple[list[float], Scores]] = {}
    if arguments.causal_model is not None:
        model, tokenizer = load_language_model(arguments.causal_model)
        model.to(torch.bfloat16)  # half the memory and time; sums differ by some tenths

        def causal(part: Sequence[Utterance], texts: Texts) -> list[list[float]]:
            before = texts_before(part, best_texts(texts), arguments.context_texts)
            return language_scores(model, tokenizer, texts, before)

        found[Path(arguments.causal_model).name] = (arguments.causal_weights, causal)
    if arguments.whisper is not None:
        whisper = load_whisper(arguments.whisper)
        found["Whisper"] = (arguments.whisper_weights, lambda part, texts: text_scores(*whisper, part, texts))
    return found


def measure(arguments: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measures all searches; gives the rows of the table, and what was chosen with facts about models and data."""
    check_alike(arguments.models, arguments.lexicon)
    passes = second_passes(arguments)
    names = {"tune": arguments.choose_on, "split": arguments.split}
    parts = {name: load_speech(arguments.data_dir, split)[0] for name, split in names.items()}
    parts = {name: asr.evenly_spaced(part, arguments.max_eval_samples) for name, part in parts.items()}
    first = arguments.models[0]
    config, processor = asr.speech_config(first), load_processor(first, ConformerProcessor)
    blank, tokenizer = config.pad_token_id, processor.tokenizer
    spoken = lexicon_of(arguments.lexicon, first)
    if spoken is not None:
        spoken.check(tokenizer)
    logits, models = frame_scores(arguments.models, parts)
    searches = {"greedy": {name: greedy(own, tokenizer, blank, spoken) for name, own in logits.items()}}
    chosen: dict[str, float] = {}
    if arguments.language_model is not None:
        lexicon = WordLexicon(tokenizer, arguments.language_model, pronunciations=spoken)
        lexicon = choose_words(logits["tune"], parts["tune"], blank, lexicon, arguments)
        chosen |= {"lm_weight": lexicon.lm_weight, "word_score": lexicon.word_score}
        beams = {name: beam(own, blank, lexicon, arguments.beam_size) for name, own in logits.items()}
        searches["language model"] = {name: best_texts(own) for name, own in beams.items()}
        beams = {name: [own[: arguments.rescored_texts] for own in found] for name, found in beams.items()}
    for number, (name, (weights, score)) in enumerate(passes.items()):
        given = [] if number else arguments.ngram_weights
        ngrams = given or [lexicon.lm_weight]
        scores = {part: [ngram_scores(lexicon, own), score(parts[part], own)] for part, own in beams.items()}
        rates = {}
        for ngram, weight in itertools.product(ngrams, weights):
            own = rescored(beams["tune"], scores["tune"], (ngram - lexicon.lm_weight, weight))
            rates[ngram, weight] = errors(parts["tune"], best_texts(own))["wer"]
            print(f"{name}, weight {weight:g}, n-gram {ngram:g}: {100 * rates[ngram, weight]:.2f} %", flush=True)
        ngram, weight = min(rates, key=lambda pair: rates[pair])
        chosen |= {f"weight of the n-gram with {name}": ngram} if given else {}
        chosen[f"weight of {name}"] = weight
        beams = {part: rescored(own, scores[part], (ngram - lexicon.lm_weight, weight)) for part, own in beams.items()}
        searches[f"rescored by {name}"] = {part: best_texts(own) for part, own in beams.items()}
    rows = [
        {"split": names[name], "search": search, **errors(parts[name], texts[name]), "texts": texts[name]}
        for name in ("tune", "split")
        for search, texts in searches.items()
    ]
    facts = {name: (len(part), sum(one.seconds or 0 for one in part) / 60) for name, part in parts.items()}
    times = {name: time_errors(logits[name], part, processor, config, spoken) for name, part in parts.items()}
    return rows, {"models": models, "chosen": chosen, "utterances": facts, "times": times}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and writes the report."""
    arguments = parse_arguments(argv)
    rows, found = measure(arguments)
    sizes = ", ".join(f"{number} of {minutes:.1f} minutes" for number, minutes in found["utterances"].values())
    chosen = ", ".join(f"{name} {value:g}" for name, value in found["chosen"].items())
    facts = (
        f"{described(found['models'])}; utterances: {sizes}. Less is better. 95 %: bootstrap intervals that draw "
        f"speakers. Chosen on {arguments.choose_on}, so its rates are too good: {chosen or 'nothing'}."
    )
    near = " and ".join(f"{100 * own['within']:.1f} % of {own['words']}" for own in found["times"].values())
    facts += f" Greedy search: {near} words that are right have start and end within 80 ms of the forced alignment."
    content = report.context_of("favor.eval.whisper_ctc", argv, ("transformers", "jiwer"), ["--data_dir"]) | found
    content |= {"rows": rows, "facts": facts}
    names = ", ".join(Path(folder).resolve().name for folder in arguments.models)
    lines = [f"# {names}", "", facts, "", *table_lines(rows)]
    return report.finish(arguments, lines, content)


cli = program("favor.eval.whisper_ctc", main)


if __name__ == "__main__":
    cli()
