"""What a step of a speech training minimises: the model's loss, in chunks or not, and the teacher's part in it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from favor.models.conformer import Chunks
from favor.models.conformer.chunks import check_chunks
from favor.models.conformer.modeling_conformer import ConformerPreTrainedModel
from favor.train.speech.objective_arguments import ObjectiveArguments
from favor.train.speech.teacher import TaughtModel, WhisperTeacher, frame_places, split

# Least and greatest length of a chunk in seconds; one is drawn per batch.
CHUNK_SECONDS = (0.16, 1.28)


@dataclass(frozen=True)
class DynamicChunks:
    """Draws chunks for a batch (Zhang et al. 2020, arXiv:2012.05481).

    Attributes:
        probability: of chunks; the other batches see whole recordings.
        sizes: least and greatest number of frames of a chunk.
    """

    probability: float
    sizes: tuple[int, int]

    def draw(self) -> Chunks | None:
        """Draws with torch's generator, uniformly; None for a batch without chunks."""
        if torch.rand(()) >= self.probability:
            return None
        least, greatest = self.sizes
        return Chunks(int(torch.randint(least, greatest + 1, ())))


class Objective:
    """Computes the loss of a batch: that of the model, and of the teacher if there is one.

    Args:
        accelerator: of the training.
        given: options of the program.
        model: to be trained.
        processor: that of the model.

    Attributes:
        module: what is trained: the model, or a `TaughtModel` around it.
        extractor: of the teacher's features; None without a teacher.

    Raises:
        ValueError: for a model, features or a teacher that do not fit the options; the message says which.
    """

    def __init__(self, accelerator: Accelerator, given: ObjectiveArguments, model: Any, processor: Any) -> None:
        self.accelerator, self.chunks = accelerator, make_chunks(given, model, processor)
        self.teacher = make_teacher(given, model, accelerator.device)
        self.module, self.extractor = model, None
        if self.teacher is not None:
            self.module = TaughtModel(model, self.teacher.width, given.hidden_weight)
            self.extractor = self.teacher.extractor
            self._places = partial(frame_places, model.config, win_length=processor.feature_extractor.win_length)

    def own_parameters(self) -> list[nn.Parameter]:
        """Lists the parameters that the model does not have."""
        return [] if self.teacher is None else list(self.module.projection.parameters())

    def model_in(self, module: Any) -> Any:
        """Gives the model in `module` or in a copy of it, without what the teacher needs."""
        return module if self.teacher is None else module.student

    def __call__(self, prepared: Any, batch: dict[str, Tensor]) -> Tensor:
        """Computes the loss of `module`, prepared for training."""
        chunks = None if self.chunks is None else self.chunks.draw()
        extra: dict[str, Any] = {} if chunks is None else {"chunks": chunks}
        if self.teacher is None:
            loss: Tensor = prepared(**batch, **extra).loss
            return loss
        inputs, features, mask = split(batch)
        model = self.model_in(self.accelerator.unwrap_model(prepared))
        places = self._places(model.subsampled_lengths(inputs["input_features"].shape[1]))
        with self.accelerator.autocast():
            goal = self.teacher.states(features, mask, places.to(features.device))
        found: Tensor = prepared(goal, **inputs, **extra)
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
    least, greatest = (max(1, round(seconds / frame)) for seconds in CHUNK_SECONDS)
    check_chunks(model.encoder, Chunks(least))
    return DynamicChunks(given.dynamic_chunk, (least, greatest))


def make_teacher(given: ObjectiveArguments, model: Any, device: torch.device) -> WhisperTeacher | None:
    """Loads the teacher; None if there is none.

    Raises:
        ValueError: for a teacher that is no Whisper, or a student that is no Conformer.
    """
    if given.whisper_teacher is None:
        return None
    if not isinstance(model, ConformerPreTrainedModel):
        raise ValueError(
            f"whisper_teacher is for a Conformer that learns from a Whisper, got {type(model).__name__}: leave it out"
        )
    return WhisperTeacher(given.whisper_teacher, device)
