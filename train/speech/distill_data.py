"""The recordings of a distillation, and the part of a model that hears them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import AutoFeatureExtractor, AutoProcessor, PreTrainedModel

from favor.train.common.batches import EpochSampler, mix
from favor.train.speech.data import Utterance, join, read_audio
from favor.train.speech.sources import load_speech
from favor.train.text.distill_data import HELD_OUT_SAMPLES, check_number
from favor_command.saved import load_processor

if TYPE_CHECKING:
    from favor.train.distill import DistillArguments

INPUTS = ("input_features", "input_values")
# Consecutive utterances of a chapter are joined up to this length; a Whisper hears 30 seconds.
JOIN_SECONDS = 28.0


class Listed(Dataset[Utterance]):
    """Utterances, which a loader reads when it needs them."""

    def __init__(self, utterances: list[Utterance]) -> None:
        self.utterances = utterances

    def __len__(self) -> int:
        return len(self.utterances)

    def __getitem__(self, index: int) -> Utterance:
        return self.utterances[index]


class Sounds:
    """Recordings of `--audio_dir`; consecutive utterances are joined up to 28 seconds.

    Args:
        arguments: of the program.
        processes: that learn.

    Attributes:
        processor: of the model, to be saved with it.

    Raises:
        ValueError: if there are too few recordings.
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
        return DataLoader(Listed(self.utterances), size, sampler=sampler, drop_last=True, collate_fn=self.features)

    def shaped(self, batch: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        """Gives the batch: recordings keep their length."""
        return batch


def encoder_of(model: PreTrainedModel) -> Any:
    """Gives the part of a model that hears: the encoder of an encoder-decoder, or the model without its head.

    Raises:
        ValueError: if its input is no audio.
    """
    part = model.get_encoder() if model.config.is_encoder_decoder else model.base_model
    if part.main_input_name not in INPUTS:
        raise ValueError(
            f"--audio_dir needs a model whose processor gives {' or '.join(INPUTS)}; the input of "
            f"{type(model).__name__} is {part.main_input_name}"
        )
    return part
