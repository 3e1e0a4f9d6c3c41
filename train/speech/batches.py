"""Batches of speech: samples made on access, and batches of similar length in an order that a resumed run repeats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Sampler
from transformers import WhisperProcessor

from favor.models.speech.encoder import IGNORED
from favor.train.common.loop import mix
from favor.train.speech.augment import Acoustics, SpecAugment, change_speed
from favor.train.speech.data import Skipped, Utterance, keep, read_audio

Key = tuple[int, int]


class SpeechDataset(Dataset):
    """A data set of features and labels of utterances, read from disk and computed on access.

    `dataset[epoch, index]` depends on the seed, the epoch and the index alone, whichever worker or process makes it;
    `dataset[index]` is the sample of epoch 0.

    Args:
        utterances: with their lengths, which `prepare` finds.
        processor: a `ConformerProcessor`.
        speeds: factors of `change_speed`, one of them drawn for each sample. Default (1.0,): no change. Usual for
            training are (0.9, 1.0, 1.1).
        acoustics: adds noise, reverberation and changes of volume, after the speed. Default None: nothing.
        dither: standard deviation of noise on the samples, after all else. Default 0.
        augment: masks the features. Default None: no masks.
        seed: draws speeds, acoustics, dither and masks. Default 0.
        teacher: makes features of the waveform at its speed, without noise and masks, for a teacher. Default None.

    Raises:
        ValueError: if there are no utterances or no speeds.
    """

    def __init__(
        self,
        utterances: Sequence[Utterance],
        processor: Any,
        *,
        speeds: Sequence[float] = (1.0,),
        acoustics: Acoustics | None = None,
        dither: float = 0.0,
        augment: SpecAugment | None = None,
        seed: int = 0,
        teacher: Any = None,
    ) -> None:
        if len(utterances) == 0 or len(speeds) == 0:
            raise ValueError(f"utterances and speeds must not be empty, got {len(utterances)} and {len(speeds)}.")
        self.utterances, self.speeds, self.dither = list(utterances), tuple(speeds), dither
        self.extractor, self.seed = processor.feature_extractor, seed
        self.acoustics, self.augment, self.teacher = acoustics, augment, teacher
        self.labels = self._labels(processor, [utterance.text for utterance in utterances])

    @property
    def durations(self) -> list[float]:
        """Seconds of every utterance at its own speed."""
        return [utterance.seconds or 0.0 for utterance in self.utterances]

    def __len__(self) -> int:
        return len(self.utterances)

    def __getitem__(self, key: int | Key) -> dict[str, Any]:
        """Makes one sample; raises ValueError, which names the file, if the audio cannot be read.

        Returns:
            `input_features [T, F]`, `labels [U]`, the `index` of the utterance, and `teacher_features` for a teacher.
        """
        epoch, index = (0, key) if isinstance(key, int) else key
        utterance = self.utterances[index]
        rate = self.extractor.sampling_rate
        generator = torch.Generator().manual_seed(mix(self.seed, epoch, index))
        speed = self.speeds[int(torch.randint(len(self.speeds), (), generator=generator))]
        waveform = change_speed(read_audio(utterance, rate), speed)
        heard = {}
        if self.teacher is not None:
            heard["teacher_features"] = self.teacher(waveform, sampling_rate=rate)["input_features"][0]
        if self.acoustics is not None:
            waveform = self.acoustics(waveform, rate, generator)
        features, frames = self._features(waveform, generator)
        if self.augment is not None:
            features = self.augment(features, torch.tensor([frames]), generator)
        return {"input_features": features[0], "labels": self.labels[index].long(), "index": index, **heard}

    def _labels(self, processor: Any, texts: Sequence[str]) -> list[Tensor]:
        return [torch.tensor(ids, dtype=torch.int32) for ids in processor.tokenizer(list(texts))["input_ids"]]

    def _features(self, waveform: np.ndarray, generator: torch.Generator) -> tuple[Tensor, int]:
        """Gives features `[1, T, F]` and how many frames are of the waveform."""
        rate = self.extractor.sampling_rate
        features = self.extractor(
            waveform, sampling_rate=rate, return_tensors="pt", dither=self.dither, generator=generator
        )["input_features"]
        return features, features.shape[1]


def collate(samples: Sequence[dict[str, Any]], with_index: bool = False) -> dict[str, Tensor]:
    """Makes a batch of samples of `SpeechDataset`.

    With `with_index` it has `index [B]`, so that an evaluation knows which utterances it has seen, and which twice.

    Returns:
        `input_features [B, T, F]` padded with 0, `attention_mask [B, T]` bool, `labels [B, U]` padded with -100; for a
        teacher `teacher_features` and `teacher_mask` of the same form.
    """
    batch: dict[str, Tensor] = {}
    for features, mask in (("input_features", "attention_mask"), ("teacher_features", "teacher_mask")):
        if features in samples[0]:
            rows = [sample[features] for sample in samples]
            lengths = torch.tensor([len(frames) for frames in rows])
            batch |= {features: pad_sequence(rows, True), mask: torch.arange(int(lengths.max())) < lengths[:, None]}
    batch["labels"] = pad_sequence([sample["labels"] for sample in samples], True, IGNORED)
    if with_index:
        batch["index"] = torch.tensor([sample["index"] for sample in samples])
    return batch


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
    """Makes a batch of samples of `WhisperDataset`, as `collate` does: `input_features [B, F, T]`, without a mask."""
    batch = collate(samples, with_index)
    del batch["attention_mask"]
    batch["input_features"] = batch["input_features"].transpose(1, 2).contiguous()
    return batch


def label_ids(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Gives the tokens of transcripts, from the one after the first special token to the end of the text."""
    spoken = [" " + (text.lower() if text.isupper() else text) for text in texts]
    return [ids[1:] for ids in tokenizer(spoken)["input_ids"]] if spoken else []


def fitting(
    utterances: Sequence[Utterance], processor: WhisperProcessor, skipped: Skipped, *, slowest: float, most: int | None
) -> list[Utterance]:
    """Selects the utterances that a Whisper can hear; the others go to `skipped`, which may raise.

    They must end in time at the `slowest` speed factor, and have at `most` so many tokens, if they are trained on.
    """
    longest = processor.feature_extractor.chunk_length
    tokens = label_ids(processor.tokenizer, [utterance.text for utterance in utterances])

    def fault(utterance: Utterance, ids: list[int]) -> str | None:
        seconds = (utterance.seconds or 0.0) / slowest
        if seconds > longest:
            return f"{seconds:.2f} s at the slowest speed, and this Whisper hears {longest:g}"
        if most is not None and len(ids) > most:
            return f"{len(ids)} tokens, and the decoder has {most} places"
        return None

    return keep(utterances, map(fault, utterances, tokens), skipped)


class DurationBatchSampler(Sampler[list[Key]]):
    """A sampler of batches: utterances of similar length, at most `max_seconds` of padded audio per batch.

    Utterances are sorted by length and cut into buckets of `batches_per_bucket` batches. The longest utterance of a
    bucket decides how many utterances its batches have. Each epoch shuffles every bucket, cuts it into batches, and
    shuffles the batches. The order depends on the seed and the epoch alone, and every epoch has the same number of
    batches, so that a number of steps says the place in the run. A batch is a list of keys `(epoch, index)` for
    `SpeechDataset`: workers need not be told the epoch.

    A prepared `DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)` gives batch i to process i % n, and
    repeats the first batches so that every process has `ceil(len(sampler) / n)`. Its `set_epoch` reaches the sampler;
    a loader from `skip_first_batches` passes the epoch on with one process only. In an evaluation utterances may come
    twice: gather `index` too, since `gather_for_metrics` does not know how many to drop.

    Args:
        durations: seconds of every utterance, at its own speed.
        max_seconds: greatest length times number of utterances of a batch.
        seed: draws the order. Default 0.
        speeds: speed factors of the dataset; a batch leaves room for the slowest. Default (1.0,).
        shuffle: False gives the longest utterances first, in as few batches as possible. Default True.
        batches_per_bucket: a greater number mixes utterances better and pads more. Default 8.
        allow_long: whether an utterance longer than max_seconds is a batch of its own. Default False: it is an error.
        names: names of the utterances, for this error. Default None: their numbers.

    Raises:
        ValueError: if there are no utterances, or one is too long.
    """

    def __init__(
        self,
        durations: Sequence[float],
        max_seconds: float,
        seed: int = 0,
        *,
        speeds: Sequence[float] = (1.0,),
        shuffle: bool = True,
        batches_per_bucket: int = 8,
        allow_long: bool = False,
        names: Sequence[str] | None = None,
    ) -> None:
        if len(durations) == 0 or min(durations) <= 0:
            raise ValueError("durations must hold positive seconds, at least one.")
        self.seed, self.shuffle, self.epoch = seed, shuffle, 0
        room = max_seconds * min(speeds)
        order = sorted(range(len(durations)), key=lambda index: (-durations[index], index))
        longest = order[0]
        if durations[longest] > room and not allow_long:
            name = longest if names is None else names[longest]
            raise ValueError(
                f"utterance {name} lasts {durations[longest]:.2f} s, more than max_seconds times the slowest speed, "
                f"{room:.2f} s: raise max_seconds, leave it out, or pass allow_long=True for a batch of its own."
            )
        self.buckets: list[tuple[int, list[int]]] = []
        place = 0
        while place < len(order):
            size = max(1, int(room / durations[order[place]]))
            width = size * batches_per_bucket if shuffle else size
            self.buckets.append((size, order[place : place + width]))
            place += width

    @property
    def sampler(self) -> DurationBatchSampler:
        """The sampler itself: with several processes accelerate looks for `set_epoch` in an attribute `sampler`."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of an epoch, from 0."""
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(-(-len(bucket) // size) for size, bucket in self.buckets)

    def __iter__(self) -> Iterator[list[Key]]:
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        batches = []
        for size, bucket in self.buckets:
            order = torch.randperm(len(bucket), generator=generator).tolist() if self.shuffle else range(len(bucket))
            mixed = [(self.epoch, bucket[place]) for place in order]
            batches += [mixed[start : start + size] for start in range(0, len(mixed), size)]
        places = torch.randperm(len(batches), generator=generator).tolist() if self.shuffle else range(len(batches))
        yield from (batches[place] for place in places)
