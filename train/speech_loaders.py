"""The loaders of a speech training."""

from __future__ import annotations

from functools import partial

from torch.utils.data import DataLoader

from favor.models.conformer import ConformerProcessor
from favor.train.asr_arguments import Arguments
from favor.train.speech_augment import SpecAugment
from favor.train.speech_batches import DurationBatchSampler, SpeechDataset, collate
from favor.train.speech_data import Utterance


def make_loaders(
    arguments: Arguments,
    utterances: list[Utterance],
    evaluation: dict[str, list[Utterance]],
    processor: ConformerProcessor,
    seed: int,
) -> tuple[DataLoader, dict[str, DataLoader]]:
    """Loaders of the training set, augmented and shuffled by seed and epoch, and of each evaluation split."""
    data = arguments.data
    masks = SpecAugment(data.frequency_masks, data.frequency_width, data.time_masks, data.time_part)
    dataset = SpeechDataset(
        utterances,
        processor,
        speeds=data.speeds,
        dither=data.dither,
        augment=masks,
        seed=seed,
        resample=data.resample,
    )
    room, workers = arguments.train.max_batch_seconds, {"num_workers": data.num_workers}
    sampler = DurationBatchSampler(
        dataset.durations, room, seed, speeds=data.speeds, names=[utterance.id for utterance in utterances]
    )
    train_loader: DataLoader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, **workers)
    eval_loaders = {}
    for split, part in evaluation.items():
        whole = SpeechDataset(part, processor, resample=data.resample)
        sampler = DurationBatchSampler(whole.durations, room, shuffle=False, allow_long=True)
        numbered = partial(collate, with_index=True)
        eval_loaders[split] = DataLoader(whole, batch_sampler=sampler, collate_fn=numbered, **workers)
    return train_loader, eval_loaders
