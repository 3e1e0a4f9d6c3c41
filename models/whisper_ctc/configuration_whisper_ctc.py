"""Configuration of a CTC model on Whisper's encoder."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import WhisperConfig

from favor.models.stored_backend import StoredBackend


@strict
class WhisperCTCConfig(StoredBackend, WhisperConfig):
    """Encoder of a Whisper, and what CTC needs on top of it.

    The fields of transformers' `WhisperConfig` keep their names; those of the decoder have no effect.

    Args:
        vocab_size: tokens, the blank included. Default 32.
        pad_token_id: padding of labels, and the blank of CTC. Default 0.
        ctc_loss_reduction: "mean" (default; each loss over its number of labels, then the mean) or "sum", as in
            `torch.nn.functional.ctc_loss`.
        ctc_zero_infinity: an utterance with more labels than frames counts 0 in the loss. Default True.
        head_layers: convolutions of the head, in front of its linear layer. Default 4.
        head_kernel_size: frames that each of them sees, an odd number. Default 15, 0.3 seconds.
        head_dropout: of the head. Default 0.1.
        sliding_window: a frame sees the frames at most this many before and after it, in short recordings too. It is
            meant for those that are longer than `max_source_positions`; 375 (7.5 seconds) measured well. With a FAVOR
            backend it takes linear time and memory. Default None: all frames.
        feature_hop_length: samples between two feature frames. Default 160. Says how far apart the outputs are.
        favor: options of the FAVOR backends, as in `favor.FavorConfig`; None (default) takes its defaults.
        attn_implementation: "sdpa" (default), "eager" or a FAVOR backend; saved with the model.

    Raises:
        ValueError: for a bad value. TypeError: for one of the wrong type.

    Example:
        >>> from favor.models.whisper_ctc import WhisperCTCConfig
        >>> WhisperCTCConfig(d_model=64, encoder_layers=2, encoder_attention_heads=2).samples_per_frame
        320
    """

    is_counterpart = False  # it has no decoder
    model_type = "whisper_ctc"

    vocab_size: int = 32
    pad_token_id: int = 0
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    decoder_start_token_id: int | None = None  # type: ignore[assignment]
    ctc_loss_reduction: str = "mean"
    ctc_zero_infinity: bool = True
    head_layers: int = 4
    head_kernel_size: int = 15
    head_dropout: float | int = 0.1
    sliding_window: int | None = None
    feature_hop_length: int = 160
    favor: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.ctc_loss_reduction not in ("mean", "sum"):
            raise ValueError(f"ctc_loss_reduction must be mean or sum, got {self.ctc_loss_reduction!r}.")
        if self.head_layers < 0 or self.head_kernel_size < 1 or self.head_kernel_size % 2 == 0:
            raise ValueError(
                "head_layers must be at least 0 and head_kernel_size an odd number, so that a frame is in the middle; "
                f"got {self.head_layers} and {self.head_kernel_size}."
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1 frame, or None; got {self.sliding_window}.")
        if kwargs.get("attn_implementation") is None:
            kwargs["attn_implementation"] = "sdpa"
        super().__post_init__(**kwargs)

    @property
    def samples_per_frame(self) -> int:
        """Samples between two frames of the encoder."""
        return 2 * self.feature_hop_length

    @property
    def inputs_to_logits_ratio(self) -> int:
        """`samples_per_frame`, by the name that the pipeline asks for to align its chunks."""
        return self.samples_per_frame
