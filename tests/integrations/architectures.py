"""Tiny random models of many architectures, each with a padded batch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers as hf

import favor  # noqa: F401  registers the backends

BATCH, LENGTH = 3, 24
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.06}
COMMON = SIZES | {"intermediate_size": 32, "vocab_size": 40, "max_position_embeddings": 64, "pad_token_id": 0}
AUDIO = SIZES | {"intermediate_size": 32, "num_mel_bins": 16, "subsampling_conv_channels": 8, "layerdrop": 0.0}
TOKENS = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 32, "init_std": 0.06}
DECODER = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 32, "forced_eos_token_id": 2}
IMAGE = SIZES | {"image_size": 20, "patch_size": 4}
DISTIL = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 32, "initializer_range": 0.06, "vocab_size": 40}
CONVOLUTIONS = {"conv_dim": (8, 8), "conv_stride": (5, 5), "conv_kernel": (10, 5), "num_conv_pos_embeddings": 4}
CONVOLUTIONS |= {"num_conv_pos_embedding_groups": 2, "conv_depthwise_kernel_size": 3, "layerdrop": 0.0}


def padding_mask() -> torch.Tensor:
    """Row 0 whole, row 1 padded on the right, row 2 padded on the left."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, 16:] = 0
    mask[2, :7] = 0
    return mask


def tokens(padded: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(4, 40, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": padding_mask()} if padded else {"input_ids": ids}


def drawn(name: str, *shape: int, ends: tuple[int, ...] = ()) -> Callable[[bool], dict[str, torch.Tensor]]:
    """Inputs of random numbers under a name; `ends` are the lengths of the rows when they are padded."""

    def inputs(padded: bool) -> dict[str, torch.Tensor]:
        found = {name: torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(0))}
        if padded and ends:
            found["attention_mask"] = (torch.arange(shape[0]) < torch.tensor(ends)[:, None]).long()
        return found

    return inputs


pixels = drawn("pixel_values", 3, 20, 20)
whisper_features = drawn("input_features", 16, 2 * LENGTH)
mel_frames = drawn("input_features", 100, 16, ends=(100, 60, 84))
waveform = drawn("input_values", 600, ends=(600, 400, 520))


def seq2seq(padded: bool) -> dict[str, torch.Tensor]:
    inputs = tokens(padded)
    generator = torch.Generator().manual_seed(1)
    inputs["decoder_input_ids"] = torch.randint(4, 40, (BATCH, 9), generator=generator)
    return inputs


@dataclass
class Architecture:
    """How to build one model and feed it."""

    name: str
    model: type[hf.PreTrainedModel]
    config: Callable[[], hf.PretrainedConfig]
    inputs: Callable[[bool], dict[str, torch.Tensor]] = tokens
    can_pad: bool = True

    def build(self, attn_implementation: str = "sdpa", **options: object) -> hf.PreTrainedModel:
        config = self.config()
        config.favor = options
        torch.manual_seed(0)
        return self.model._from_config(config, attn_implementation=attn_implementation).eval()

    def real(self, output: torch.Tensor, padded: bool) -> torch.Tensor:
        """The rows of an output that belong to real tokens."""
        if not padded or self.inputs is seq2seq:
            return output
        mask = self.inputs(True)["attention_mask"]
        if self.inputs is tokens:
            return output[mask.bool()]
        # Audio: outputs are subsampled; take the frames that surely are real.
        lengths = (mask.sum(-1) * output.shape[1] // mask.shape[1] - 1).clamp(min=1)
        return output[torch.arange(output.shape[1]) < lengths[:, None]]


ARCHITECTURES = [
    Architecture("bert", hf.BertModel, lambda: hf.BertConfig(**COMMON)),
    Architecture("roberta", hf.RobertaModel, lambda: hf.RobertaConfig(**COMMON)),
    Architecture("distilbert", hf.DistilBertModel, lambda: hf.DistilBertConfig(**DISTIL)),
    Architecture("electra", hf.ElectraModel, lambda: hf.ElectraConfig(**COMMON, embedding_size=16)),
    Architecture(
        "modernbert",
        hf.ModernBertModel,
        lambda: hf.ModernBertConfig(
            **COMMON | TOKENS | {"num_hidden_layers": 4}, local_attention=8, cls_token_id=1, sep_token_id=2
        ),
    ),
    Architecture("vit", hf.ViTModel, lambda: hf.ViTConfig(**IMAGE, intermediate_size=32), pixels, can_pad=False),
    Architecture(
        "whisper-encoder",
        hf.models.whisper.modeling_whisper.WhisperEncoder,
        lambda: hf.WhisperConfig(
            **ENCODER | TOKENS, d_model=32, num_mel_bins=16, max_source_positions=LENGTH, pad_token_id=0,
            decoder_start_token_id=1,
        ),
        whisper_features,
        can_pad=False,
    ),
    Architecture("lasr", hf.LasrEncoder, lambda: hf.LasrEncoderConfig(**AUDIO, conv_kernel_size=5), mel_frames),
    Architecture(
        "wav2vec2-conformer",
        hf.Wav2Vec2ConformerModel,
        lambda: hf.Wav2Vec2ConformerConfig(
            **SIZES | CONVOLUTIONS, intermediate_size=32, position_embeddings_type="rotary", mask_time_prob=0.0
        ),
        waveform,
    ),
    Architecture(
        "gpt2", hf.GPT2Model, lambda: hf.GPT2Config(**TOKENS, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    ),
    Architecture("llama", hf.LlamaModel, lambda: hf.LlamaConfig(**COMMON, num_key_value_heads=2)),
    # Cross attention, a rotary protein encoder, a vision model, rotation of a part of the width, shared layers.
    Architecture(
        "bart",
        hf.BartModel,
        lambda: hf.BartConfig(
            **ENCODER | DECODER | TOKENS, d_model=32, max_position_embeddings=64, pad_token_id=0,
            decoder_start_token_id=2,
        ),
        seq2seq,
    ),
    Architecture(
        "esm",
        hf.EsmModel,
        lambda: hf.EsmConfig(**COMMON, mask_token_id=3, position_embedding_type="rotary", token_dropout=False),
    ),
    Architecture("dinov2", hf.Dinov2Model, lambda: hf.Dinov2Config(**IMAGE), pixels, can_pad=False),
    Architecture("gpt-neox", hf.GPTNeoXModel, lambda: hf.GPTNeoXConfig(**COMMON)),
    Architecture("albert", hf.AlbertModel, lambda: hf.AlbertConfig(**COMMON, embedding_size=16)),
]  # fmt: skip
BY_NAME = {own.name: own for own in ARCHITECTURES}
BERT, LLAMA, BART = BY_NAME["bert"], BY_NAME["llama"], BY_NAME["bart"]
