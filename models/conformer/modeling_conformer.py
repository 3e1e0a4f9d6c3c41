"""Performer Conformer: encoder and CTC model."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCTC
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.models.lasr.modeling_lasr import (
    LasrEncoderRotaryEmbedding,
    LasrEncoderSubsampling,
    LasrPreTrainedModel,
)
from transformers.utils.output_capturing import capture_outputs

from favor.attention.parallel import unshard
from favor.models.conformer.chunks import EXACT, Chunks, check_chunks
from favor.models.conformer.configuration_conformer import TRANSDUCER, ConformerConfig, subsampled_frames
from favor.models.conformer.encoder_layers import ConformerAttention, ConformerBlock
from favor.models.conformer.pieces import FramePieces
from favor.models.conformer.streaming import ConformerStream, TranscriptStream
from favor.models.speech.encoder import Count, EncoderOutput, check_features, right_padded
from favor.models.speech.spans import EndpointRules
from favor.models.speech.tokenizer import ConformerProcessor
from favor.models.speech.transcription import TranscribesCTC, processor_of

_OF_CONFIG = ("architectures", "cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


class ConformerPreTrainedModel(LasrPreTrainedModel):
    """Base class of the Conformer models: initial weights, lengths after subsampling."""

    config: ConformerConfig
    config_class = ConformerConfig
    base_model_prefix = "encoder"
    _no_split_modules = ["ConformerBlock"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": ConformerBlock, "attentions": ConformerAttention}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Linear | nn.Conv1d):
            # Deviations depend on the width, as in torch: a fixed deviation of 0.02 is too small for narrow models.
            init.kaiming_uniform_(module.weight, a=5**0.5)

    def subsampled_lengths(self, lengths: Count) -> Count:
        """Counts encoder frames, given numbers of feature frames: of an utterance, or `[B]`."""
        return subsampled_frames(lengths, self.config.subsampling_conv_kernel_size, self.config.subsampling_conv_stride)

    def stream(
        self, feature_extractor: Any = None, batch_size: int = 1, chunks: Chunks | None = None
    ) -> ConformerStream:
        """Starts a recording that comes in pieces; see `favor.models.conformer.ConformerStream`.

        It gives logits and tokens. Models that recognise speech have `transcribe_stream`, which gives text.
        """
        return ConformerStream(cast(Any, self), feature_extractor, batch_size, chunks)

    def transcribe_stream(
        self,
        processor: ConformerProcessor | None = None,
        rules: EndpointRules | None = None,
        reset_encoder: bool = False,
        chunks: Chunks | None = None,
    ) -> TranscriptStream:
        """Starts the transcription of audio that comes in pieces; see `favor.models.conformer.TranscriptStream`.

        Without a processor it takes the one in the folder of the model.
        """
        return TranscriptStream(self, processor or processor_of(self.name_or_path), rules, reset_encoder, chunks)


class ConformerModel(ConformerPreTrainedModel):
    """Conformer encoder: subsampling of time by 4, then blocks of attention and convolution.

    Example:
        >>> import torch
        >>> from favor.models.conformer import ConformerConfig, ConformerModel
        >>> model = ConformerModel(ConformerConfig.preset("tiny")).eval()
        >>> model(input_features=torch.randn(1, 100, 80)).last_hidden_state.shape
        torch.Size([1, 22, 128])
    """

    base_model_prefix = "encoder"

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__(config)
        self.gradient_checkpointing = False
        self.subsampler = LasrEncoderSubsampling(config)
        self.rotary_emb = LasrEncoderRotaryEmbedding(config)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(ConformerBlock(config, index) for index in range(config.num_hidden_layers))
        self.out_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=False)
        self.post_init()

    @capture_outputs
    def forward(
        self, input_features: Tensor, attention_mask: Tensor | None = None, chunks: Chunks | None = None, **kwargs: Any
    ) -> EncoderOutput:
        """Encodes log-mel features.

        Args:
            input_features: `[B, T, num_mel_bins]`.
            attention_mask: `[B, T]`, 1 for real frames, which come first (padding on the right). Default: all real.
            chunks: a frame sees its own and earlier ones, as in a stream with these chunks. Default None: all frames,
                or earlier ones if the encoder is causal.
            **kwargs: for the attention backend.

        Returns:
            L = floor((floor((T - 5) / 2) - 4) / 2) + 1 frames with the default subsampling, 40 ms apart.

        Raises:
            ValueError: if T is too short for one frame, the mask has another shape or padding on the left, or the model
                cannot run in these chunks, or in pieces. Inside `favor.sequence_parallel` all processes have whole
                recordings, and get all frames; each computes a piece of them. Recorded hidden states are those of the
                piece.
        """
        check_features(input_features, self.config.num_mel_bins)
        every = None  # the real frames of whole recordings
        if attention_mask is not None:
            lengths = self.subsampled_lengths(right_padded(attention_mask, input_features).sum(-1))
            frames = self.subsampled_lengths(input_features.shape[1])
            every = torch.arange(frames, device=lengths.device) < lengths.unsqueeze(-1)
        pieces, real, first = FramePieces.of(self, input_features, in_chunks=chunks is not None), every, 0
        if pieces is not None:
            (input_features, real), first = pieces.cut(input_features, every), pieces.first
        hidden_states = self.dropout(self.subsample(input_features))
        positions = first + torch.arange(hidden_states.shape[1], device=hidden_states.device)
        mask = self._mask(hidden_states, real) if chunks is None else self._chunk_mask(hidden_states, real, chunks)
        embeddings = self.rotary_emb(hidden_states, positions.unsqueeze(0))
        for layer in self.layers:
            if self.training and self.config.layerdrop > 0 and torch.rand([]) < self.config.layerdrop:
                continue
            hidden_states = layer(
                hidden_states, attention_mask=mask, position_embeddings=embeddings, real=real, chunks=chunks, **kwargs
            )
        hidden_states = self.out_norm(hidden_states)
        if pieces is not None:
            hidden_states = unshard(hidden_states, pieces.group)[:, : pieces.shape[1]]
        return EncoderOutput(last_hidden_state=hidden_states, attention_mask=every)

    def subsample(self, input_features: Tensor) -> Tensor:
        """Turns features `[B, T, num_mel_bins]` into frames `[B, L, C]`; raises ValueError if L would be 0."""
        check_features(input_features, self.config.num_mel_bins)
        length = input_features.shape[1]
        if self.subsampled_lengths(length) == 0:
            raise ValueError(f"{length} feature frames are too few for one frame of the encoder; pad the audio.")
        return self.subsampler(input_features)

    def _mask(self, hidden_states: Tensor, real: Tensor | None) -> Any:
        make_mask: Any = create_causal_mask if self.config.causal else create_bidirectional_mask
        extra = {"past_key_values": None} if self.config.causal else {}
        return make_mask(config=self.config, inputs_embeds=hidden_states, attention_mask=real, **extra)

    def _chunk_mask(self, hidden_states: Tensor, real: Tensor | None, chunks: Chunks) -> Tensor | None:
        """Makes the mask `[B, 1, L, L]` of exact attention in chunks; FAVOR backends need none."""
        if not torch.compiler.is_compiling():
            check_chunks(self, chunks)
        backend, length = self.config._attn_implementation, hidden_states.shape[1]
        if backend not in EXACT:
            return None
        seen = chunks.visible(length, length, hidden_states.device)[None, None]
        if real is not None:
            seen = seen & real[:, None, None]
        if backend == "sdpa":
            return seen
        lowest = torch.finfo(hidden_states.dtype).min
        return torch.zeros_like(seen, dtype=hidden_states.dtype).masked_fill(~seen, lowest)


class ConformerForCTC(TranscribesCTC, ConformerPreTrainedModel):
    """Conformer encoder with a linear CTC head (Graves et al. 2006).

    Example:
        >>> import torch
        >>> from favor.models.conformer import ConformerConfig, ConformerForCTC
        >>> model = ConformerForCTC(ConformerConfig.preset("tiny", vocab_size=32)).eval()
        >>> model(input_features=torch.randn(1, 100, 80)).logits.shape
        torch.Size([1, 22, 32])
    """

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__(config)
        self.encoder = ConformerModel(config)
        self.ctc_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """Loads a saved model, as in transformers, but refuses a Transducer that was not asked for.

        `architectures=["ConformerForCTC"]` takes the encoder of a Transducer, with its CTC head if it has one.

        Raises:
            ValueError: for a Transducer, unless `architectures` says otherwise; a pipeline then loads it as a
                Transducer.
        """
        saved = config
        if not isinstance(config, ConformerConfig):
            given = {name: kwargs[name] for name in _OF_CONFIG if name in kwargs}
            saved = ConformerConfig.from_pretrained(config or pretrained_model_name_or_path, **given)
        if TRANSDUCER in (saved.architectures or ()):
            head = "takes its CTC head alone" if saved.ctc_weight else "adds a CTC head with random weights to train"
            raise ValueError(
                f"{pretrained_model_name_or_path} must be a {cls.__name__}, got a Transducer: load it with "
                f'{TRANSDUCER}.from_pretrained. architectures=["{cls.__name__}"] here {head}.'
            )
        return super().from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)


AutoConfig.register(ConformerConfig.model_type, ConformerConfig, exist_ok=True)
AutoModel.register(ConformerConfig, ConformerModel, exist_ok=True)
AutoModelForCTC.register(ConformerConfig, ConformerForCTC, exist_ok=True)
