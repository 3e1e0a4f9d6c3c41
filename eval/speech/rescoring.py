"""Texts of a beam search, scored a second time by a Whisper."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from favor.train.speech.data import Utterance, read_audio
from favor.train.speech.whisper import label_ids

Texts = Sequence[Sequence[tuple[str, float]]]

TEXTS = 32  # scored at once: the probabilities of all tokens take 6 MB a word


@torch.no_grad()
def text_scores(model: Any, processor: Any, utterances: Sequence[Utterance], texts: Texts) -> list[list[float]]:
    """Computes the log probability that a Whisper gives to each text of each utterance, its end included.

    Texts in capitals alone become small letters, since Whisper has few tokens for words in capitals. Audio after 30
    seconds is not heard.

    Args:
        model: a Whisper.
        processor: that of the model.
        utterances: the audio.
        texts: of each utterance, with the scores of the search, which are not used.
    """
    extractor, start = processor.feature_extractor, model.config.decoder_start_token_id
    found = []
    for utterance, own in zip(utterances, texts, strict=True):
        audio = read_audio(utterance, extractor.sampling_rate)
        features = extractor(audio, sampling_rate=extractor.sampling_rate, return_tensors="pt").input_features
        states = model.model.encoder(features).last_hidden_state
        # All texts begin with one token, so keys and values of the audio are computed once and repeated.
        first = model.model.decoder(torch.tensor([[start]]), encoder_hidden_states=states, use_cache=True)
        rows = [torch.tensor(ids) for ids in label_ids(processor.tokenizer, [text for text, _ in own])]
        scores: list[float] = []
        for place in range(0, len(rows), TEXTS):
            scores += _following(model, first, states, pad_sequence(rows[place : place + TEXTS], True, -100))
        found.append(scores)
    return found


def _following(model: Any, first: Any, states: Tensor, labels: Tensor) -> list[float]:
    """Computes the log probabilities of texts `[n, U]`, padded with -100, after the first step of the decoder."""
    cache = copy.deepcopy(first.past_key_values)
    cache.batch_repeat_interleave(len(labels))
    states = states.expand(len(labels), -1, -1)
    rest = model.model.decoder(
        labels[:, :-1].clamp_min(0), encoder_hidden_states=states, past_key_values=cache, use_cache=True
    )
    begun = first.last_hidden_state.expand(len(labels), -1, -1)
    log_probs = model.proj_out(torch.cat([begun, rest.last_hidden_state], 1)).log_softmax(-1)
    said = log_probs.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    scores: list[float] = said.masked_fill(labels < 0, 0.0).sum(1).tolist()
    return scores


def best_texts(texts: Texts, scores: Sequence[Sequence[float]], weight: float) -> list[str]:
    """Chooses the text with the best sum of the score of the search and `weight` times the second score."""
    chosen = []
    for own, second in zip(texts, scores, strict=True):
        sums = [score + weight * other for (_, score), other in zip(own, second, strict=True)]
        chosen.append(own[max(range(len(own)), key=lambda place: sums[place])][0])
    return chosen
