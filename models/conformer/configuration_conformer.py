"""Configuration of the Performer Conformer."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import LasrEncoderConfig

from favor.models.speech.encoder import Count
from favor.models.stored_backend import StoredBackend

TRANSDUCER = "ConformerForTransducer"
PREDICTION_NETWORKS = ("lstm", "stateless")


_SIZES = ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "conv_kernel_size"]
_SIZES += ["subsampling_conv_channels", "prediction_hidden_size", "joint_hidden_size"]
PRESETS = {
    name: dict(zip(_SIZES, sizes, strict=True))
    for name, *sizes in (
        # 1.7 M parameters with CTC: for tests and demonstrations on a CPU.
        ("tiny", 128, 4, 4, 512, 15, 128, 128, 128),
        # 19 M parameters, between Conformer (S) and (M) of Gulati et al. 2020.
        ("small", 256, 12, 4, 1024, 31, 256, 320, 320),
        # 124 M parameters. FAVOR# paper, sections 5.3.1 and B.3.1: 20 layers, model_dim 512, 8 heads.
        ("paper", 512, 20, 8, 2048, 31, 512, 640, 640),
    )
}


def subsampled_frames(frames: Count, width: int = 5, stride: int = 2) -> Count:
    """Counts encoder frames of `frames` feature frames, after two unpadded convolutions of this width and stride."""
    for _ in range(2):
        frames = (frames - width) // stride + 1
    return frames.clamp_min(0) if isinstance(frames, Tensor) else max(0, frames)


@strict
class ConformerConfig(StoredBackend, LasrEncoderConfig):
    """Conformer encoder with rotary positions, and what CTC and Transducer need on top of it.

    The fields of transformers' `LasrEncoderConfig` keep their names; the defaults are those of the Conformer
    (Gulati et al. 2020, arXiv:2005.08100): half-step feed-forward layers, plain residuals, odd kernels.

    Args:
        causal: True makes the encoder causal, for streaming: a frame sees the frames before it and, through the
            subsampling, 120 ms of what comes after. Default False.
        vocab_size: tokens, the blank included. Default 256.
        pad_token_id: padding of labels, and the blank of CTC and Transducer. Default 0.
        ctc_loss_reduction: "mean" (default; each loss over its number of labels, then the mean) or "sum", as in
            `torch.nn.functional.ctc_loss`.
        ctc_zero_infinity: an utterance with more labels than frames counts 0 in the CTC loss. Default True.
        ctc_weight: share w of a CTC loss, with a head of its own, in the loss of the Transducer: loss = (1 - w)
            Transducer + w CTC. Default 0: no such head.
        prediction_network: "lstm" (default) or "stateless", an embedding and a convolution over the last tokens
            (Ghodsi et al. 2020, "RNN-transducer with stateless prediction network").
        prediction_hidden_size: its width. Default 512.
        prediction_num_layers: layers of the LSTM. Default 1.
        prediction_context_size: tokens that the stateless network sees. Default 2.
        prediction_dropout: after its embedding. Default 0.1.
        joint_hidden_size: width of the joint network. Default 512.
        max_cells: positions (frame, token) of the joint network that exist at once in training. Default 65536.
        feature_hop_length: samples between two feature frames. Default 160. Says how far apart the outputs are.
        favor: options of the FAVOR backends, as in `favor.FavorConfig`; None (default) takes its defaults.
        attn_implementation: a FAVOR backend (default "favor#"), "sdpa" or "eager"; saved with the model.

    Raises:
        ValueError: for a bad value. TypeError: for one of the wrong type.

    Example:
        >>> from favor.models.conformer import ConformerConfig
        >>> ConformerConfig.preset("tiny", vocab_size=32).num_hidden_layers
        4
    """

    model_type = "conformer"

    num_mel_bins: int = 80
    conv_kernel_size: int = 31
    layerdrop: float | int = 0.0
    feed_forward_residual_weights: list[float] | tuple[float, ...] = (1.0, 0.5)
    conv_residual_weights: list[float] | tuple[float, ...] = (1.0, 1.0)
    batch_norm_momentum: float = 0.1

    causal: bool = False
    vocab_size: int = 256
    pad_token_id: int = 0
    ctc_loss_reduction: str = "mean"
    ctc_zero_infinity: bool = True
    ctc_weight: float | int = 0.0
    prediction_network: str = "lstm"
    prediction_hidden_size: int = 512
    prediction_num_layers: int = 1
    prediction_context_size: int = 2
    prediction_dropout: float | int = 0.1
    joint_hidden_size: int = 512
    max_cells: int = 65536
    feature_hop_length: int = 160
    favor: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.prediction_network not in PREDICTION_NETWORKS:
            raise ValueError(
                f"prediction_network must be one of {', '.join(PREDICTION_NETWORKS)}, got {self.prediction_network!r}."
            )
        if self.ctc_loss_reduction not in ("mean", "sum"):
            raise ValueError(f"ctc_loss_reduction must be mean or sum, got {self.ctc_loss_reduction!r}.")
        if not 0 <= self.ctc_weight < 1:
            raise ValueError(f"ctc_weight must be in [0, 1), got {self.ctc_weight}; use ConformerForCTC for CTC alone.")
        if not 1 <= self.num_attention_heads <= self.hidden_size:
            raise ValueError(f"num_attention_heads must be 1 to hidden_size, got {self.num_attention_heads}.")
        if not self.causal and self.conv_kernel_size % 2 == 0:
            raise ValueError(
                f"conv_kernel_size must be odd unless causal=True, so that a frame is in the middle; "
                f"got {self.conv_kernel_size}."
            )
        super().__post_init__(**kwargs)

    @property
    def samples_per_frame(self) -> int:
        """Samples between two frames of the encoder."""
        return self.feature_hop_length * self.subsampling_conv_stride**2

    @property
    def inputs_to_logits_ratio(self) -> int:
        """`samples_per_frame`, by the name that the pipeline asks for to align its chunks.

        Raises:
            ValueError: for a Transducer, whose texts of overlapping chunks cannot be joined by frames.
        """
        if TRANSDUCER in (self.architectures or ()):
            raise ValueError(
                "chunk_length_s is for CTC models, this is a Transducer: leave it out. With a FAVOR backend memory "
                "and time are linear in the length."
            )
        return self.samples_per_frame

    @classmethod
    def preset(cls, name: str, **changes: Any) -> ConformerConfig:
        """Makes a configuration by the name of its size, "tiny", "small" or "paper", with some fields changed.

        Raises:
            ValueError: for another name.
        """
        if name not in PRESETS:
            raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}.")
        return cls(**{**PRESETS[name], **changes})
