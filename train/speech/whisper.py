"""A pretrained Whisper in the speech programs: the attention of its encoder, its samples of equal length, its words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import WhisperForConditionalGeneration, WhisperProcessor
from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer

import favor
from favor.models.speech.encoder import IGNORED
from favor.train.speech.arguments import Arguments
from favor.train.speech.batches import SpeechDataset
from favor.train.speech.data import Skipped, Utterance
from favor_command.saved import load_model

ENCODER = "model.encoder"
_MOST_TOKENS = 224  # of a transcript, as in OpenAI's program
LARGEST_RATE = 5e-4


def make_whisper(arguments: Arguments, seed: int) -> WhisperForConditionalGeneration:
    """Loads a Whisper; a FAVOR backend replaces the attention of its encoder alone.

    Args:
        arguments: all arguments of the program.
        seed: draws the random features.

    Raises:
        ValueError: for a learning rate that destroys a pretrained model, or options of FAVOR attention without it.
    """
    given, options, rate = arguments.model, arguments.model.favor_options(), arguments.train.learning_rate
    path, backend = str(given.model_name_or_path), given.attn_implementation
    if rate > LARGEST_RATE:
        raise ValueError(f"a learning rate of {rate:g} destroys a pretrained Whisper: add --learning_rate 1e-5")
    exact: dict[str, Any] = {"attn_implementation": backend if backend and backend not in favor.BACKENDS else "sdpa"}
    # Without a backend the saved one stays, with its options and its seed.
    model = load_model(WhisperForConditionalGeneration, path, dtype=torch.float32, **(exact if backend else {}))
    if backend in favor.BACKENDS:
        return favor.configure(model, backend, only=ENCODER, **options, seed=seed)
    if options and model.config._attn_implementation not in favor.BACKENDS:
        raise ValueError(
            f"{', '.join(options)}: options of FAVOR attention, not of {model.config._attn_implementation}: leave them "
            "out or add --attn_implementation landmark"
        )
    return favor.configure(model, only=ENCODER, **options) if options else model


class WhisperDataset(SpeechDataset):
    """Samples of a Whisper: features of 30 seconds, and the tokens that its decoder says after the first one.

    The arguments are those of `SpeechDataset`, with a `WhisperProcessor`. Transcripts in capitals alone, such as
    LibriSpeech's, become small letters, since Whisper has few tokens for words in capitals.
    """

    @property
    def durations(self) -> list[float]:
        """Seconds of every sample, silence at its end included."""
        return [float(self.extractor.chunk_length)] * len(self)

    def _labels(self, processor: Any, texts: Sequence[str]) -> list[Tensor]:
        return [torch.tensor(ids, dtype=torch.int32) for ids in label_ids(processor.tokenizer, texts)]

    def _features(self, waveform: np.ndarray, generator: torch.Generator) -> tuple[Tensor, int]:
        if self.dither:
            waveform = waveform + self.dither * torch.randn(len(waveform), generator=generator).numpy()
        features = self.extractor(waveform, sampling_rate=self.extractor.sampling_rate, return_tensors="pt")
        frames = -(-len(waveform) // self.extractor.hop_length)
        return features["input_features"].transpose(1, 2), min(frames, features["input_features"].shape[2])


def collate_whisper(samples: Sequence[dict[str, Any]], with_index: bool = False) -> dict[str, Tensor]:
    """Makes a batch of samples of `WhisperDataset`.

    Args:
        samples: items of the data set.
        with_index: adds `index [B]`. Default False.

    Returns:
        `input_features [B, F, T]` and `labels [B, U]` padded with -100.
    """
    batch = {
        "input_features": torch.stack([sample["input_features"] for sample in samples]).transpose(1, 2).contiguous(),
        "labels": pad_sequence([sample["labels"] for sample in samples], True, IGNORED),
    }
    if with_index:
        batch["index"] = torch.tensor([sample["index"] for sample in samples])
    return batch


def label_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Gives the tokens of transcripts, from the one after the first special token to the end of the text."""
    spoken = [" " + (text.lower() if text.isupper() else text) for text in texts]
    return [ids[1:] for ids in tokenizer(spoken)["input_ids"]] if spoken else []


def fitting(
    utterances: Sequence[Utterance], processor: WhisperProcessor, skipped: Skipped, *, slowest: float, most: int | None
) -> list[Utterance]:
    """Selects the utterances that a Whisper can hear; the others go to `skipped`, which may raise.

    Args:
        utterances: with `seconds`.
        processor: of the model.
        skipped: takes the others.
        slowest: smallest speed factor.
        most: greatest number of tokens of a transcript; None for utterances that are only transcribed.
    """
    kept, total, longest = [], len(utterances) + len(skipped), processor.feature_extractor.chunk_length
    tokens = label_ids(processor.tokenizer, [utterance.text for utterance in utterances])
    for utterance, ids in zip(utterances, tokens, strict=True):
        seconds = (utterance.seconds or 0.0) / slowest
        if seconds > longest:
            reason = f"{seconds:.2f} s at the slowest speed, and this Whisper hears {longest:g}"
            skipped.add(f"{utterance.id} ({utterance.place})", reason)
        elif most is not None and len(ids) > most:
            skipped.add(utterance.id, f"{len(ids)} tokens, and the decoder has {most} places")
        else:
            kept.append(utterance)
    skipped.check(total)
    return kept


@torch.no_grad()
def say(model: WhisperForConditionalGeneration, features: Tensor, tokenizer: Any) -> list[str]:
    """Transcribes features `[B, F, T]` greedily."""
    most = min(_MOST_TOKENS, model.config.max_target_positions - 4)
    ids = model.generate(features, max_new_tokens=most, do_sample=False, num_beams=1)
    texts: list[str] = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return texts


def normalizer(model: WhisperForConditionalGeneration, tokenizer: Any) -> Callable[[str], str]:
    """Gives the function that words of both sides go through before they are compared, as Whisper's authors did."""
    if getattr(model.generation_config, "is_multilingual", False):
        return BasicTextNormalizer()
    return EnglishTextNormalizer(getattr(tokenizer, "english_spelling_normalizer", None) or {})
