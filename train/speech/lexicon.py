"""Transcripts as phonemes, for a model that is trained with a lexicon of pronunciations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from favor.models.speech import Pronunciations
from favor.models.speech.pronunciations import lacking, lexicon_of
from favor.train.speech.arguments import Arguments
from favor.train.speech.data import Skipped, Utterance
from favor.train.speech.model import architecture_of


def run_lexicon(arguments: Arguments) -> Pronunciations | None:
    """Gives the lexicon of a run: the file that the arguments name, else that of the checkpoint, if it has one.

    Raises:
        ValueError: for a file that cannot be used, or a model that is not trained by CTC alone.
    """
    model = arguments.model
    found = lexicon_of(arguments.data.lexicon, model.model_name_or_path or model.processor_name_or_path)
    if found is not None and architecture_of(model) != "ctc":
        raise ValueError("lexicon is for --architecture ctc: the other models are not searched by pronunciations")
    return found


def as_phonemes(utterances: Sequence[Utterance], lexicon: Pronunciations, skipped: Skipped) -> list[Utterance]:
    """Writes the transcripts of utterances as phonemes, by the first pronunciation of each word.

    Args:
        utterances: with transcripts of words.
        lexicon: of the words.
        skipped: takes utterances with words that the lexicon lacks, if it takes any.

    Raises:
        ValueError: if it takes none and words are lacking, or for too many of them; the message names words.
    """
    missing = [word for one in utterances for word in lexicon.missing(one.text)]
    if missing and not skipped.max_bad:
        raise ValueError(f"{lacking(missing)} Or leave their utterances out with --max_bad")
    found = []
    for one in utterances:
        if words := lexicon.missing(one.text):
            skipped.add(one.id, f"has words that the lexicon lacks: {', '.join(words)}")
        else:
            found.append(dataclasses.replace(one, text=lexicon.write(one.text)))
    skipped.check(len(utterances))
    return found
