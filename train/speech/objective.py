"""What a step of a speech training minimises: the model's loss, in chunks or not, and the teacher's part in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from favor.models.conformer import Chunks
from favor.models.conformer.chunks import check_chunks
from favor.models.conformer.modeling_conformer import ConformerPreTrainedModel
from favor.train.speech.objective_arguments import CHUNK_SECONDS, ObjectiveArguments
from favor.train.speech.teacher import WhisperTeacher, frame_places, split


@dataclass(frozen=True)
class DynamicChunks:
    """Draws chunks for a batch (Zhang et al. 2020, arXiv:2012.05481).

    Attributes:
        probability: of chunks; the other batches see whole recordings.
        sizes: least and greatest number of frames of a chunk.
        left: least and greatest number of chunks before; None for all.
    """

    probability: float
    sizes: tuple[int, int]
    left: tuple[int, int] | None = None

    def draw(self) -> Chunks | None:
        """Draws with torch's generator, uniformly; None for a batch without chunks."""
        if torch.rand(()) >= self.probability:
            return None
        size, *left = (_uniform(*range_) for range_ in (self.sizes, self.left) if range_ is not None)
        return Chunks(size, *left)


@dataclass
class Objective:
    """Computes the loss of a batch.

    Attributes:
        accelerator: of the training.
        chunks: that are drawn; None for none.
        teacher: whose hidden states are predicted; None without.
        config: of the student.
        win_length: samples of a window of its features.
    """

    accelerator: Accelerator
    chunks: DynamicChunks | None
    teacher: WhisperTeacher | None
    config: Any
    win_length: int

    def __call__(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        """Computes the loss of a model that is prepared for training; with a teacher it is a `TaughtModel`."""
        extra: dict[str, Any] = {}
        if self.chunks is not None and (chunks := self.chunks.draw()) is not None:
            extra["chunks"] = chunks
        if self.teacher is None:
            loss: Tensor = model(**batch, **extra).loss
            return loss
        inputs, features, mask = split(batch)
        length = self.accelerator.unwrap_model(model).student.subsampled_lengths(inputs["input_features"].shape[1])
        places = frame_places(self.config, length, self.win_length).to(features.device)
        with self.accelerator.autocast():
            extra["goal"] = self.teacher.states(features, mask, places)
        found: Tensor = model(**inputs, **extra)
        return found


def make_chunks(given: ObjectiveArguments, model: Any, processor: Any) -> DynamicChunks | None:
    """Makes what draws the chunks of a training; None if nothing is asked for.

    Raises:
        ValueError: for a model, an attention or features that do not work in chunks.
    """
    if not given.dynamic_chunk:
        return None
    if not isinstance(model, ConformerPreTrainedModel):
        raise ValueError(
            f"dynamic_chunk is for Conformers, got {type(model).__name__}: leave it out. CTC on the encoder of a "
            "Whisper streams by windows, without it"
        )
    if processor.feature_extractor.normalize != "none":
        raise ValueError(
            "chunks cannot wait for the whole utterance, as normalize 'utterance' of the features does: add "
            "--normalize none, or name a processor with it"
        )
    frame = model.config.samples_per_frame / processor.feature_extractor.sampling_rate
    least, greatest = (max(1, round(seconds / frame)) for seconds in given.chunk_seconds or CHUNK_SECONDS)
    left = None if given.left_chunks is None else (given.left_chunks[0], given.left_chunks[1])
    check_chunks(model.encoder, Chunks(least, None if left is None else left[0]))
    return DynamicChunks(given.dynamic_chunk, (least, greatest), left)


def make_teacher(given: ObjectiveArguments, model: Any, device: torch.device) -> WhisperTeacher | None:
    """Loads the teacher; None if there is none.

    Raises:
        ValueError: for a teacher that is no Whisper, or a student that is no Conformer.
    """
    if given.teacher is None:
        return None
    if not isinstance(model, ConformerPreTrainedModel):
        raise ValueError(
            f"teacher is for a Conformer that learns from a Whisper, got {type(model).__name__}: leave it out"
        )
    return WhisperTeacher(given.teacher, device)


def _uniform(least: int, greatest: int) -> int:
    return int(torch.randint(least, greatest + 1, ()))
