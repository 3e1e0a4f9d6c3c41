"""Performer Conformer Transducer."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForSpeechSeq2Seq, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from favor.models.conformer.chunks import Chunks
from favor.models.conformer.configuration_conformer import ConformerConfig
from favor.models.conformer.modeling_conformer import ConformerModel, ConformerPreTrainedModel
from favor.models.speech.encoder import IGNORED, ctc_loss, frame_counts
from favor.models.speech.lattice import joint_transducer_loss
from favor.models.speech.spans import Emission
from favor.models.speech.transcription import Transcribes
from favor.models.speech.transducer import transducer_emissions, transducer_greedy

State = tuple[Tensor, ...]


class LSTMPrediction(nn.Module):
    """Prediction network of Graves 2012: embedding, LSTM, projection."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        width, self.num_layers = config.prediction_hidden_size, config.prediction_num_layers
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.dropout = nn.Dropout(config.prediction_dropout)
        self.lstm = nn.LSTM(width, width, self.num_layers, batch_first=True)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Outputs `[B, U, P]` after each token `[B, U]`, and the state, whose tensors are `[B, layers, P]`."""
        before = None if state is None else tuple(part.transpose(0, 1).contiguous() for part in state)
        # Under autocast a CPU without bfloat16 instructions has no LSTM, and the error of torch does not say so.
        with torch.autocast("cpu", enabled=False):
            out, after = self.lstm(self.dropout(self.embedding(tokens)), before)
        return out, tuple(part.transpose(0, 1) for part in after)


class StatelessPrediction(nn.Module):
    """Embedding and convolution over the last tokens alone (Ghodsi et al. 2020)."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        width, self.context_size = config.prediction_hidden_size, config.prediction_context_size
        self.blank = config.pad_token_id
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.dropout = nn.Dropout(config.prediction_dropout)
        self.convolution = nn.Conv1d(width, width, self.context_size)
        self.activation = nn.ReLU()

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Outputs `[B, U, P]` after each token `[B, U]`, and the state, the last tokens `[B, context - 1]`."""
        past = tokens.new_full((len(tokens), self.context_size - 1), self.blank) if state is None else state[0]
        tokens = torch.cat((past, tokens), dim=1)
        embedded = self.dropout(self.embedding(tokens)).transpose(1, 2)
        out = self.activation(self.convolution(embedded)).transpose(1, 2)
        return out, (tokens[:, tokens.shape[1] - self.context_size + 1 :],)


class Joint(nn.Module):
    """Logits from an encoder frame and a prediction: tanh of the sum of two projections, then a linear layer."""

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        self.encoder_projection = nn.Linear(config.hidden_size, config.joint_hidden_size)
        self.prediction_projection = nn.Linear(config.prediction_hidden_size, config.joint_hidden_size, bias=False)
        self.head = nn.Linear(config.joint_hidden_size, config.vocab_size)

    def forward(self, hidden: Tensor, prediction: Tensor) -> Tensor:
        """Computes logits `[..., V]` of frames `[..., H]` and predictions `[..., P]`; leading dimensions broadcast."""
        return self.head(torch.tanh(self.encoder_projection(hidden) + self.prediction_projection(prediction)))


@dataclass
class TransducerOutput(ModelOutput):
    """Output of a Transducer.

    Attributes:
        loss: what to minimise, if labels were given.
        transducer_loss, ctc_loss: its parts, detached; `ctc_loss` only with `config.ctc_weight`.
        last_hidden_state: encoder frames `[B, L, C]`.
        attention_mask: `[B, L]`, True for real frames; None if none was given.
    """

    loss: Tensor | None = None
    transducer_loss: Tensor | None = None
    ctc_loss: Tensor | None = None
    last_hidden_state: Tensor | None = None
    attention_mask: Tensor | None = None


class ConformerForTransducer(Transcribes, ConformerPreTrainedModel):
    """Conformer encoder, prediction network and joint network (Graves 2012, arXiv:1211.3711).

    The blank is `config.pad_token_id`; it also starts every sequence of the prediction network.

    Example:
        >>> import torch
        >>> from favor.models.conformer import ConformerConfig, ConformerForTransducer
        >>> model = ConformerForTransducer(ConformerConfig.preset("tiny", vocab_size=32)).eval()
        >>> loss = model(input_features=torch.randn(1, 100, 80), labels=torch.tensor([[3, 4]])).loss
        >>> bool(loss > 0)
        True
    """

    def __init__(self, config: ConformerConfig) -> None:
        super().__init__(config)
        config.architectures = [type(self).__name__]  # before it is saved too: see inputs_to_logits_ratio
        self.encoder = ConformerModel(config)
        networks = {"lstm": LSTMPrediction, "stateless": StatelessPrediction}
        self.prediction = networks[config.prediction_network](config)
        self.joint = Joint(config)
        self.ctc_head = nn.Linear(config.hidden_size, config.vocab_size) if config.ctc_weight else None
        self.post_init()
        # The pipeline leaves alone what is set here; otherwise it asks for five beams and 256 tokens.
        own = {"num_beams": 1, "max_length": sys.maxsize, "pad_token_id": config.pad_token_id}
        self.generation_config = GenerationConfig(**own)

    @can_return_tuple
    def forward(
        self, input_features: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> TransducerOutput:
        """Computes the encoder's frames, and the loss if there are labels.

        Args:
            input_features, attention_mask, **kwargs: as in `ConformerModel`.
            labels: `[B, U]`, padded with -100.

        Returns:
            The loss is the mean over the batch of the Transducer's negative log-likelihood (nats), weighted with the
            CTC loss if `config.ctc_weight` is not 0. The `[B, L, U + 1, V]` logits never exist at once.
        """
        encoded = self.encoder(input_features, attention_mask, **kwargs)
        out = TransducerOutput(last_hidden_state=encoded.last_hidden_state, attention_mask=encoded.attention_mask)
        if labels is None:
            return out
        lengths, weight = frame_counts(encoded), self.config.ctc_weight
        blank, counts = self.config.pad_token_id, (labels != IGNORED).sum(-1)
        targets = labels.masked_fill(labels == IGNORED, blank)
        prediction, _ = self.predict(torch.nn.functional.pad(targets, (1, 0), value=blank))
        inputs = (encoded.last_hidden_state, prediction, self.joint, labels, lengths, counts)
        loss = joint_transducer_loss(*inputs, blank=blank, max_cells=self.config.max_cells)
        out.transducer_loss = loss.detach()
        if self.ctc_head is not None:
            aligned = ctc_loss(self.ctc_head(encoded.last_hidden_state), lengths, labels, self.config)
            out.ctc_loss = aligned.detach()
            loss = (1 - weight) * loss + weight * aligned
        out.loss = loss
        return out

    def encode(
        self, input_features: Tensor, attention_mask: Tensor | None = None, chunks: Chunks | None = None
    ) -> tuple[Tensor, Tensor]:
        """Computes encoder frames `[B, L, C]` and how many of them are real, `[B]`; arguments as in `forward`."""
        encoded = self.encoder(input_features, attention_mask, chunks)
        return encoded.last_hidden_state, frame_counts(encoded)

    def predict(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Runs the prediction network: outputs `[B, U, P]` after each token `[B, U]`, and the state to go on from.

        Args:
            tokens: tokens so far, or the next ones if there is a state; the first of all is the blank.
            state: what an earlier call returned; each of its tensors has the batch in dimension 0.
        """
        return self.prediction(tokens, state)

    def join(self, hidden: Tensor, prediction: Tensor) -> Tensor:
        """Computes logits `[..., V]` of frames `[..., C]` and predictions `[..., P]`; leading dimensions broadcast."""
        return self.joint(hidden, prediction)

    def emissions(self, input_features: Tensor, attention_mask: Tensor | None = None) -> list[list[Emission]]:
        """Tokens of each row by greedy search, with frames and confidences; see `transducer_emissions`."""
        return transducer_emissions(self, *self.encode(input_features, attention_mask))

    @classmethod
    def can_generate(cls) -> bool:
        """Gives True: there is a `generate`, which the pipeline calls."""
        return True

    @torch.no_grad()
    def generate(
        self,
        input_features: Tensor,
        attention_mask: Tensor | None = None,
        max_symbols: int = 10,
        generation_config: Any = None,
    ) -> Tensor:
        """Transcribes greedily: tokens `[B, U]` padded with `config.pad_token_id`.

        A blank stands between equal neighbours: `decode` of a tokenizer for CTC, which takes equal neighbours for one
        token and leaves blanks out, gives the text, as it does with `group_tokens=False`.

        Args:
            input_features, attention_mask: as in `forward`.
            max_symbols: maximum number of tokens per frame. Default 10.
            generation_config: passed by the pipeline and ignored. `transducer_beam` searches with a beam.
        """
        hidden, lengths = self.encode(input_features, attention_mask)
        blank, sequences = self.config.pad_token_id, []
        for tokens in transducer_greedy(self, hidden, lengths, max_symbols=max_symbols):
            after = [[blank, token] if token == last else [token] for last, token in pairwise([blank, *tokens])]
            sequences.append([token for part in after for token in part])
        width = max((len(tokens) for tokens in sequences), default=0)
        padded = [tokens + [blank] * (width - len(tokens)) for tokens in sequences]
        return torch.tensor(padded, dtype=torch.long, device=hidden.device).reshape(len(padded), width)


AutoModelForSpeechSeq2Seq.register(ConformerConfig, ConformerForTransducer, exist_ok=True)
# The pipeline for speech recognition knows by the name of the class which models generate.
MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES[ConformerConfig.model_type] = ConformerForTransducer.__name__
if hasattr(transformers, "AutoModelForRNNT"):  # The oldest supported transformers does not have it.
    transformers.AutoModelForRNNT.register(ConformerConfig, ConformerForTransducer, exist_ok=True)
