"""The two small networks of a Transducer besides its encoder: prediction and joint."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from favor.models.conformer.configuration_conformer import ConformerConfig

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
