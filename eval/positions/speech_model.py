"""A small Parakeet for `favor.eval.positions.speech`: its audio, its training with exact attention, its recordings."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import ParakeetCTCConfig, ParakeetEncoderConfig, ParakeetForCTC

from favor.eval.speech.long_form_cell import RATE
from favor.models.conformer import ConformerFeatureExtractor
from favor.models.speech import ConformerProcessor, ctc_greedy, train_tokenizer
from favor.train.common.loop import mix, weight_average
from favor.train.speech.batches import DurationBatchSampler
from favor.train.speech.data import Utterance, read_audio
from favor_command.saved import load_model, load_processor

FRAMES = 100  # of features in a second
SIZES: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 4, "intermediate_size": 256, "num_hidden_layers": 4}
SIZES |= {"subsampling_factor": 4, "subsampling_conv_channels": 32}
SHORT = 16.0  # seconds of a batch of utterances
JOINED = (20.0, 60.0)  # seconds of utterances that are joined
EASY, PART_EASY = 5.0, 3  # seconds of the utterances that CTC begins with, for one step in so many
EVERY = 8  # in the second half of the steps such a batch follows so many others
LEARNING_RATE, WARM_UP, DECAY = 1e-3, 200, 0.99


class Heard(NamedTuple):
    """Log-mel features of some speech, `[T, F]`, not normalised, and its transcript."""

    features: Tensor
    text: str
    speaker: str

    @property
    def seconds(self) -> float:
        """Gives its length."""
        return len(self.features) / FRAMES

    @classmethod
    def joined(cls, parts: Sequence[Heard]) -> Heard:
        """Puts speech one after another."""
        text = " ".join(part.text for part in parts)
        return cls(torch.cat([part.features for part in parts]), text, parts[0].speaker)


def hear(utterances: Sequence[Utterance], extractor: ConformerFeatureExtractor) -> list[Heard]:
    """Computes features of all utterances, in order of speakers, chapters and names."""
    order = sorted(utterances, key=lambda own: (own.speaker or "", own.chapter or "", own.id))
    return [
        Heard(extractor.log_mel(torch.from_numpy(read_audio(own, RATE))), own.text, own.speaker or "") for own in order
    ]


def recordings(heard: Sequence[Heard], seconds: float) -> list[Heard]:
    """Joins utterances of each speaker to recordings of at least so many seconds, as few as hold all utterances.

    They start at equal distances, so neighbours may share utterances. Speakers with less give none.
    """
    found = []
    for speaker in dict.fromkeys(own.speaker for own in heard):
        own = [part for part in heard if part.speaker == speaker]
        ends = torch.tensor([part.seconds for part in own]).cumsum(0)
        number = math.ceil(float(ends[-1]) / seconds) if ends[-1] >= seconds else 0
        for place in range(number):
            start = (float(ends[-1]) - seconds) * place / max(number - 1, 1)
            first = int((ends <= start + 1e-3).sum())
            begin = float(ends[first]) - own[first].seconds
            last = int((ends < begin + seconds - 1e-3).sum())
            found.append(Heard.joined(own[first : last + 1]))
    return found


def build(texts: Sequence[str], seed: int, **sizes: Any) -> tuple[ParakeetForCTC, ConformerProcessor]:
    """Makes a model with random weights and exact attention, and the processor, whose tokens are characters."""
    wanted = {**SIZES, **sizes}
    extractor = ConformerFeatureExtractor(wanted.get("num_mel_bins", 80))
    processor = ConformerProcessor(extractor, train_tokenizer(texts, "char"))
    wanted |= dict.fromkeys(("dropout", "activation_dropout", "attention_dropout", "layerdrop"), 0.0)
    encoder = ParakeetEncoderConfig(**wanted, scale_input=False, initializer_range=wanted["hidden_size"] ** -0.5)
    config = ParakeetCTCConfig(vocab_size=len(processor.tokenizer), pad_token_id=0, encoder_config=encoder)
    torch.manual_seed(seed)
    return ParakeetForCTC._from_config(config, attn_implementation="sdpa"), processor


def load(folder: str) -> tuple[ParakeetForCTC, ConformerProcessor]:
    """Loads what `train` saved."""
    return load_model(ParakeetForCTC, folder, attn_implementation="sdpa"), load_processor(folder, ConformerProcessor)


def batches(heard: Sequence[Heard], alone: int, seed: int) -> Iterator[list[Heard]]:
    """Yields batches without end: utterances of alike lengths; after so many `alone` also ones that are joined."""
    sampler = DurationBatchSampler([own.seconds for own in heard], SHORT, seed, allow_long=True)
    draw, step = random.Random(mix(seed)), 0
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        for batch in sampler:
            step += 1
            yield [heard[place] for _, place in batch]
            if step > alone and step % EVERY == 0:
                yield [_run(heard, draw.randrange(len(heard)), draw.uniform(*JOINED))]


def _run(heard: Sequence[Heard], first: int, seconds: float) -> Heard:
    """Joins an utterance and those of its speaker that follow, to about so many seconds."""
    last, length = first + 1, heard[first].seconds
    while last < len(heard) and heard[last].speaker == heard[first].speaker and length + heard[last].seconds <= seconds:
        length, last = length + heard[last].seconds, last + 1
    return Heard.joined(heard[first:last])


def train(
    model: ParakeetForCTC,
    processor: ConformerProcessor,
    heard: Sequence[Heard],
    steps: int,
    seed: int,
    folder: Path,
    is_new: bool = True,
) -> None:
    """Trains with exact attention, and saves the average of the last weights; a new model first hears what is short."""
    easy = [own for own in heard if own.seconds < EASY]
    first = steps // PART_EASY if is_new and easy else 0
    for some, number in ((easy, first), (heard, steps - first)):
        if number:
            _train(model, processor, some, number, seed, folder)


def _train(
    model: ParakeetForCTC,
    processor: ConformerProcessor,
    heard: Sequence[Heard],
    steps: int,
    seed: int,
    folder: Path,
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, (0.9, 0.98), weight_decay=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, 1 - step / steps))
    averaged = weight_average(model, DECAY)
    losses: list[float] = []
    begin = time.monotonic()
    for step, batch in enumerate(itertools.islice(batches(heard, steps // 2, seed), steps), 1):
        rows = [processor.feature_extractor.scale(own.features) for own in batch]
        tokens = [torch.tensor(processor.tokenizer(own.text)["input_ids"]) for own in batch]
        lengths = torch.tensor([len(row) for row in rows]).unsqueeze(1)
        mask = torch.arange(int(lengths.max())) < lengths
        loss = model.train()(pad_sequence(rows, True), mask, labels=pad_sequence(tokens, True, 0)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        losses.append(loss.item())
        if step % 100 == 0 or step == steps:
            mean = sum(losses[-100:]) / len(losses[-100:])
            print(f"step {step} of {steps}, {time.monotonic() - begin:.0f} s: loss {mean:.3f}", flush=True)
            averaged.module.eval().save_pretrained(folder)
            processor.save_pretrained(folder)
    model.load_state_dict(averaged.module.state_dict())


@torch.no_grad()
def read(model: ParakeetForCTC, processor: ConformerProcessor, recording: Heard) -> tuple[str, Tensor]:
    """Transcribes a recording in one pass, by greedy search; gives the encoder's output `[L, D]` too."""
    features = processor.feature_extractor.scale(recording.features).unsqueeze(0)
    out = model.encoder(features, torch.ones(features.shape[:2], dtype=torch.long)).last_hidden_state
    logits = model.ctc_head(out)
    (tokens,) = ctc_greedy(logits, [logits.shape[1]])
    return processor.tokenizer.decode(tokens, group_tokens=False), out[0]
