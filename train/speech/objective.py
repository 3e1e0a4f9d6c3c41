"""What a step of a speech training minimises: the model's loss, in chunks or not, and the teacher's part in it.

With a teacher, a Conformer also predicts the hidden states of a Whisper's encoder for the same sound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedConfig, WhisperForConditionalGeneration

from favor.models.conformer import Chunks, ConformerConfig
from favor.models.conformer.chunks import check_chunks
from favor.models.conformer.modeling_conformer import ConformerPreTrainedModel
from favor.models.whisper_ctc import WhisperCTCConfig, WhisperCTCFeatureExtractor, WhisperForCTC
from favor.train.speech.arguments import HIDDEN_WEIGHT, SpeechTrainArguments
from favor_command.saved import load_model, load_processor

# Least and greatest length of a chunk in seconds; one is drawn per batch (Zhang et al. 2020, arXiv:2012.05481).
CHUNK_SECONDS = (0.16, 1.28)
FEATURES, MASK = "teacher_features", "teacher_mask"


class Objective:
    """Computes the loss of a batch: that of the model, and of the teacher if there is one.

    Attributes:
        module: what is trained: the model, or a `TaughtModel` around it.
        extractor: of the teacher's features; None without a teacher.

    Raises:
        ValueError: for a model, features or a teacher that do not fit the options; the message says which.
    """

    def __init__(self, accelerator: Accelerator, given: SpeechTrainArguments, model: Any, processor: Any) -> None:
        self.accelerator, self.probability = accelerator, given.dynamic_chunk
        self.module, self.extractor, self.teacher = model, None, None
        for option in ("dynamic_chunk", "whisper_teacher"):
            if getattr(given, option) and not isinstance(model, ConformerPreTrainedModel):
                raise ValueError(
                    f"{option} is for Conformers, got {type(model).__name__}: leave it out. CTC on the encoder of a "
                    "Whisper streams by windows, without it"
                )
        self.sizes = _chunk_sizes(model, processor) if given.dynamic_chunk else (1, 1)
        if given.whisper_teacher is not None:
            self.teacher = WhisperTeacher(given.whisper_teacher, accelerator.device)
            self.module = TaughtModel(model, self.teacher.width, HIDDEN_WEIGHT)
            self.extractor, self.win_length = self.teacher.extractor, processor.feature_extractor.win_length

    def model_in(self, module: Any) -> Any:
        """Gives the model in `module` or in a copy of it, without what the teacher needs."""
        return module if self.teacher is None else module.student

    def __call__(self, prepared: Any, batch: dict[str, Tensor]) -> Tensor:
        """Computes the loss of `module`, prepared for training."""
        chunks = draw_chunks(self.probability, self.sizes)
        extra: dict[str, Any] = {} if chunks is None else {"chunks": chunks}
        if self.teacher is None:
            return prepared(**batch, **extra).loss
        inputs, features, mask = split(batch)
        model = self.model_in(self.accelerator.unwrap_model(prepared))
        frames = model.subsampled_lengths(inputs["input_features"].shape[1])
        places = frame_places(model.config, frames, self.win_length)
        with self.accelerator.autocast():
            goal = self.teacher.states(features, mask, places.to(features.device))
        return prepared(goal, **inputs, **extra)


def draw_chunks(probability: float, sizes: tuple[int, int]) -> Chunks | None:
    """Draws chunks of a number of frames between two sizes, uniformly; None for a batch that sees whole recordings."""
    if not probability or torch.rand(()) >= probability:
        return None
    return Chunks(int(torch.randint(sizes[0], sizes[1] + 1, ())))


def _chunk_sizes(model: Any, processor: Any) -> tuple[int, int]:
    if processor.feature_extractor.normalize != "none":
        raise ValueError(
            "chunks cannot wait for the whole utterance, as the features of this model do: train a new model with "
            "--dynamic_chunk or --causal"
        )
    frame = model.config.samples_per_frame / processor.feature_extractor.sampling_rate
    least, greatest = (max(1, round(seconds / frame)) for seconds in CHUNK_SECONDS)
    check_chunks(model.encoder, Chunks(least))
    return least, greatest


class WhisperTeacher:
    """The encoder of a Whisper, or of a `WhisperForCTC`, which is not trained, and the features that it hears.

    Its hidden states have `width` numbers. Noise and masks of the student's features are not in those of `extractor`.
    Raises ValueError for another model.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        kind = PreTrainedConfig.get_config_dict(path)[0].get("model_type")
        if kind == "whisper":
            exact = {"dtype": torch.float32, "attn_implementation": "sdpa"}
            whisper = load_model(WhisperForConditionalGeneration, path, **exact)
            model = WhisperForCTC.from_whisper(whisper, vocab_size=2, attn_implementation="sdpa")
        elif kind == WhisperCTCConfig.model_type:
            model = load_model(WhisperForCTC, path, dtype=torch.float32)
        else:
            raise ValueError(
                f"whisper_teacher must be a Whisper, or CTC on its encoder; {path} holds {kind or 'no model'}"
            )
        self.encoder = model.encoder.eval().requires_grad_(False).to(device)
        self.width: int = model.config.d_model
        self.samples_per_frame: int = model.config.samples_per_frame
        self.extractor = load_processor(path, WhisperCTCFeatureExtractor)

    @torch.no_grad()
    def states(self, features: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        """Computes hidden states `[B, L, width]` at samples `places [L]`, of features `[B, T, F]` with a mask `[B, T]`.

        Between two frames they are interpolated; after the end of a recording they are those of its last frame.
        """
        found = self.encoder(features, mask).last_hidden_state.float()
        last = (mask.sum(1, keepdim=True) - 1) // 2
        place = places / self.samples_per_frame
        part = (place - place.floor())[:, None]
        first = place.floor().long().expand(len(found), -1)
        before, after = (
            found.gather(1, one.minimum(last).unsqueeze(-1).expand(-1, -1, self.width)) for one in (first, first + 1)
        )
        return before + part * (after - before)


class TaughtModel(nn.Module):
    """A Conformer with a layer that predicts the teacher's hidden states, of `width` numbers, from its own.

    The error of the predictions has this weight in the loss.
    """

    def __init__(self, student: Any, width: int, weight: float) -> None:
        super().__init__()
        self.student, self.weight = student, weight
        self.projection = nn.Linear(student.config.hidden_size, width)

    def forward(self, goal: Tensor, **batch: Any) -> Tensor:
        """Computes the loss of a batch: the student's own, and `weight` times `unexplained`.

        The goal `[B, L, width]` are the teacher's hidden states at the frames of the student.
        """
        found = self.student(**batch, output_hidden_states=True)
        hidden = found.hidden_states[-1] if "hidden_states" in found else found.last_hidden_state
        lengths = self.student.subsampled_lengths(batch["attention_mask"].sum(1))
        real = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]
        return found.loss + self.weight * unexplained(self.projection(hidden)[real], goal[real])


def unexplained(found: Tensor, goal: Tensor) -> Tensor:
    """Computes the part of the variance of states `[N, n]` that a prediction leaves: 0 is the best, the mean gives 1.

    Each number of a state counts the same, whatever its scale: a Whisper has some that are a hundred times greater.
    """
    goal = goal.float()
    scale = goal.var(dim=0, correction=0).clamp(min=1e-8).rsqrt()
    return ((found.float() - goal) * scale).square().mean()


def frame_places(config: ConformerConfig, length: int, win_length: int) -> Tensor:
    """Gives the sample in the middle of what each of `length` frames of a Conformer hears, `[L]`."""
    width, stride = config.subsampling_conv_kernel_size, config.subsampling_conv_stride
    heard = (width - 1) * (1 + stride) * config.feature_hop_length + win_length
    return torch.arange(length) * config.samples_per_frame + heard / 2


def split(batch: Mapping[str, Any]) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Gives the student's arguments of a batch, and the teacher's features and mask."""
    return {name: own for name, own in batch.items() if name not in (FEATURES, MASK)}, batch[FEATURES], batch[MASK]
