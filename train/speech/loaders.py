"""The loaders of speech: of a training, of an evaluation, of a distillation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoFeatureExtractor, AutoProcessor, PreTrainedModel, WhisperProcessor

from favor.models.speech import ConformerProcessor
from favor.train.common.loop import EpochSampler, mix
from favor.train.speech.arguments import SYNTHETIC, Arguments, SpeechDataArguments
from favor.train.speech.augment import Acoustics, SpecAugment, audio_files
from favor.train.speech.batches import (
    DurationBatchSampler,
    Key,
    SpeechDataset,
    WhisperDataset,
    collate,
    collate_whisper,
)
from favor.train.speech.data import Utterance, join, read_audio
from favor.train.speech.sources import load_speech
from favor.train.text.distill_data import HELD_OUT_SAMPLES, check_number
from favor_command.saved import load_processor

if TYPE_CHECKING:
    from favor.train.distill import DistillArguments

DITHER = 1e-5  # standard deviation of noise added to the samples in training
# Range of reverberation times in seconds of responses that are made, those of rooms.
RT60 = (0.2, 0.6)
INPUTS = ("input_features", "input_values")
# Consecutive utterances of a chapter are joined up to this length; a Whisper hears 30 seconds.
JOIN_SECONDS = 28.0


def make_acoustics(data: SpeechDataArguments) -> Acoustics | None:
    """Makes what adds noise and reverberation to the training set; None if nothing is asked for.

    Raises ValueError for a folder without audio, or with a file that cannot be opened.
    """
    noises = () if data.noise_dir is None else audio_files(data.noise_dir, "noise_dir")
    if data.reverb_dir == SYNTHETIC:
        return Acoustics(noises=noises, rt60=RT60)
    responses = () if data.reverb_dir is None else audio_files(data.reverb_dir, "reverb_dir")
    return Acoustics(noises=noises, responses=responses) if noises or responses else None


def make_loaders(
    arguments: Arguments,
    utterances: list[Utterance],
    evaluation: dict[str, list[Utterance]],
    processor: ConformerProcessor | WhisperProcessor,
    seed: int,
    acoustics: Acoustics | None = None,
    teacher: Any = None,
) -> tuple[DataLoader, dict[str, DataLoader]]:
    """Makes the loader of the training set, augmented and shuffled by seed and epoch, and one per evaluation split.

    `acoustics` changes the waveforms of the training set; `teacher` makes features for a teacher, see `SpeechDataset`.
    """
    data, masks = arguments.data, SpecAugment()
    if data.spec_augment is not None:
        *numbers, part = data.spec_augment
        masks = SpecAugment(*map(int, numbers), part)
    kind, put_together = _kinds(processor)
    dataset = kind(
        utterances,
        processor,
        speeds=data.speeds,
        dither=DITHER,
        acoustics=acoustics,
        augment=masks,
        seed=seed,
        teacher=teacher,
    )
    room, workers = arguments.train.per_device_train_batch_seconds, {"num_workers": data.dataloader_num_workers}
    if isinstance(dataset, WhisperDataset):  # all samples are equally long, so all are mixed
        sampler = DurationBatchSampler(dataset.durations, room, seed, batches_per_bucket=len(dataset))
    else:
        sampler = DurationBatchSampler(
            dataset.durations, room, seed, speeds=data.speeds, names=[utterance.id for utterance in utterances]
        )
    train_loader: DataLoader = DataLoader(dataset, batch_sampler=sampler, collate_fn=put_together, **workers)
    eval_loaders = {split: evaluation_loader(part, processor, room, **workers) for split, part in evaluation.items()}
    return train_loader, eval_loaders


def evaluation_loader(
    utterances: Sequence[Utterance],
    processor: ConformerProcessor | WhisperProcessor,
    max_seconds: float,
    *,
    num_workers: int = 0,
    choose: Callable[[list[list[Key]]], list[list[Key]]] | None = None,
) -> DataLoader:
    """Makes a loader of utterances without augmentation, the longest first; each batch has their numbers as `index`.

    A batch has `max_seconds`, padding included; a longer utterance is a batch of its own. `choose` takes the batches
    and returns those to load. `num_workers` processes read audio ahead.
    """
    kind, put_together = _kinds(processor)
    dataset = kind(utterances, processor)
    sampler = DurationBatchSampler(dataset.durations, max_seconds, shuffle=False, allow_long=True)
    batches = sampler if choose is None else choose(list(sampler))
    numbered = partial(put_together, with_index=True)
    return DataLoader(dataset, batch_sampler=batches, collate_fn=numbered, num_workers=num_workers)


def _kinds(processor: ConformerProcessor | WhisperProcessor) -> tuple[type[SpeechDataset], Callable[..., Any]]:
    """Gives the data set and the function that makes batches of its samples."""
    is_whisper = isinstance(processor, WhisperProcessor)
    return (WhisperDataset, collate_whisper) if is_whisper else (SpeechDataset, collate)


class Sounds:
    """Recordings of `--audio_dir`; consecutive utterances are joined up to 28 seconds.

    The processor of the model is to be saved with it. Raises ValueError if there are too few recordings.
    """

    def __init__(self, arguments: DistillArguments, processes: int) -> None:
        self.arguments, self.processes = arguments, processes
        path, folder = arguments.model_name_or_path, str(arguments.audio_dir)
        self.processor, self.extractor = (load_processor(path, kind) for kind in (AutoProcessor, AutoFeatureExtractor))
        if "input_features" not in self.extractor.model_input_names:
            raise ValueError(
                "audio_dir needs a model that hears input_features, such as a Whisper or a Conformer; the extractor of "
                f"{path} gives {', '.join(self.extractor.model_input_names)}"
            )
        rate = self.extractor.sampling_rate
        found = load_speech(folder, arguments.split, sampling_rate=rate, transcripts=arguments.split is not None)[0]
        found = join(found, JOIN_SECONDS)
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(mix(arguments.seed))).tolist()
        check_number(len(found), processes, f"{folder} (joined up to {JOIN_SECONDS:g} seconds)")
        chosen = [found[place] for place in order]
        self.utterances, self._held = chosen[HELD_OUT_SAMPLES:], chosen[:HELD_OUT_SAMPLES]

    def __len__(self) -> int:
        return len(self.utterances)

    @property
    def held_out(self) -> list[dict[str, Tensor]]:
        """Batches of one recording, on which the error is measured."""
        return [self.features([utterance]) for utterance in self._held]

    def first(self, number: int) -> list[dict[str, Tensor]]:
        """Gives the first recordings to learn from, as batches of one."""
        return [self.features([utterance]) for utterance in self.utterances[:number]]

    def features(self, utterances: list[Utterance]) -> dict[str, Tensor]:
        """Makes the model's arguments from recordings."""
        rate = self.extractor.sampling_rate
        sounds: list[np.ndarray] = [read_audio(utterance, rate) for utterance in utterances]
        return dict(self.extractor(sounds, sampling_rate=rate, return_tensors="pt"))

    def loader(self, labels: bool, decoder: bool) -> DataLoader[Any]:
        """Makes a loader of recordings in an order of the seed; there are no labels."""
        size = min(self.arguments.per_device_train_batch_size, len(self) // self.processes)
        sampler = EpochSampler(len(self), self.arguments.seed)
        data: Any = self.utterances  # they are read when a batch needs them
        return DataLoader(data, size, sampler=sampler, drop_last=True, collate_fn=self.features)

    def shaped(self, batch: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        """Gives the batch: recordings keep their length."""
        return batch


def encoder_of(model: PreTrainedModel) -> Any:
    """Gives the part of a model that hears: the encoder of an encoder-decoder, or the model without its head.

    Raises ValueError if its input is no audio.
    """
    part = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
    if part.main_input_name not in INPUTS:
        raise ValueError(
            f"--audio_dir needs a model whose processor gives {' or '.join(INPUTS)}; the input of "
            f"{type(model).__name__} is {part.main_input_name}"
        )
    return part
