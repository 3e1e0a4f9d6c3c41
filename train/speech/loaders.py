"""The loaders of a speech training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.utils.data import DataLoader
from transformers import WhisperProcessor

from favor.models.speech import ConformerProcessor
from favor.train.speech.acoustics import Acoustics, audio_files
from favor.train.speech.arguments import SYNTHETIC, Arguments, SpeechDataArguments
from favor.train.speech.augment import SpecAugment
from favor.train.speech.batches import DurationBatchSampler, Key, SpeechDataset, collate
from favor.train.speech.data import Utterance
from favor.train.speech.whisper import WhisperDataset, collate_whisper

# Standard deviation of noise added to the samples in training.
DITHER = 1e-5
# Range of reverberation times in seconds of responses that are made, those of rooms.
RT60 = (0.2, 0.6)


def make_acoustics(data: SpeechDataArguments) -> Acoustics | None:
    """Makes what adds noise and reverberation to the training set; None if nothing is asked for.

    Raises:
        ValueError: for a folder without audio, or with a file that cannot be opened.
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

    Args:
        arguments: all arguments of the program.
        utterances: the training set.
        evaluation: utterances of each evaluation split.
        processor: that of the model.
        seed: draws the order and the augmentation.
        acoustics: changes the waveforms of the training set. Default None: they stay.
        teacher: makes features for a teacher, see `SpeechDataset`. Default None.
    """
    data = arguments.data
    masks = SpecAugment(data.frequency_masks, data.frequency_width, data.time_masks, data.time_part)
    kind, put_together = _kinds(processor)
    dataset = kind(
        utterances,
        processor,
        speeds=data.speeds,
        dither=DITHER,
        acoustics=acoustics,
        augment=masks,
        seed=seed,
        resample=data.resample,
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
    eval_loaders = {
        split: evaluation_loader(part, processor, room, resample=data.resample, **workers)
        for split, part in evaluation.items()
    }
    return train_loader, eval_loaders


def evaluation_loader(
    utterances: Sequence[Utterance],
    processor: ConformerProcessor | WhisperProcessor,
    max_seconds: float,
    *,
    resample: bool = False,
    num_workers: int = 0,
    choose: Callable[[list[list[Key]]], list[list[Key]]] | None = None,
) -> DataLoader:
    """Makes a loader of utterances without augmentation, the longest first; each batch has their numbers as `index`.

    Args:
        utterances: with their lengths.
        processor: of the model.
        max_seconds: seconds of a batch, padding included; a longer utterance is a batch of its own.
        resample: whether audio of another rate is resampled. Default False.
        num_workers: processes that read audio ahead. Default 0: none.
        choose: takes the batches and returns those to load. Default None: all.
    """
    kind, put_together = _kinds(processor)
    dataset = kind(utterances, processor, resample=resample)
    sampler = DurationBatchSampler(dataset.durations, max_seconds, shuffle=False, allow_long=True)
    batches = sampler if choose is None else choose(list(sampler))
    numbered = partial(put_together, with_index=True)
    return DataLoader(dataset, batch_sampler=batches, collate_fn=numbered, num_workers=num_workers)


def _kinds(processor: ConformerProcessor | WhisperProcessor) -> tuple[type[SpeechDataset], Callable[..., Any]]:
    """Gives the data set and the function that makes batches of its samples."""
    is_whisper = isinstance(processor, WhisperProcessor)
    return (WhisperDataset, collate_whisper) if is_whisper else (SpeechDataset, collate)
