"""Transducer decoding against plain searches without a state, with small models of random weights."""

import math
from collections import defaultdict

import pytest
import torch
from torch import nn

from favor.models.speech import transducer_beam, transducer_emissions, transducer_greedy


class Recurrent(nn.Module):
    """An LSTM cell and a joint layer; the state has the batch in front."""

    def __init__(self, labels, size=6, scale=3.0):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(labels, size)
        self.cell = nn.LSTMCell(size, size)
        self.output = nn.Linear(size, labels)
        self.scale = scale
        self.double()

    def predict(self, tokens, state=None):
        outputs = []
        for token in tokens.T:
            state = self.cell(self.embedding(token), state)
            outputs.append(state[0])
        return torch.stack(outputs, 1), state

    def join(self, hidden, prediction):
        return self.scale * self.output(torch.tanh(hidden + 3 * prediction))


class Bigram(nn.Module):
    """Without a state: logits depend on the frame and the last token only."""

    def __init__(self, labels):
        super().__init__()
        self.table = torch.randn(labels, labels, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def predict(self, tokens, state=None):
        return self.table[tokens], ()

    def join(self, hidden, prediction):
        return hidden + prediction


def frames(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_probs(model, frame, tokens):
    """Of every label at one frame `[H]` after `tokens`, from the whole sequence and no state."""
    prediction, _ = model.predict(torch.tensor([[0, *tokens]]))
    return model.join(frame, prediction[0, -1]).log_softmax(-1)


@torch.no_grad()
def plain_greedy(model, hidden, max_symbols):
    """Token, first frame, frame after it and probability, step by step."""
    steps = []
    for time, frame in enumerate(hidden):
        for _ in range(max_symbols):
            top, label = log_probs(model, frame, [step[0] for step in steps]).max(-1)
            if label == 0:
                break
            steps.append((int(label), time, time + 1, top.exp().item()))
    return steps


@torch.no_grad()
def plain_beam(model, hidden, beam_size):
    """In a dictionary of plain probabilities; with a large beam, the sum over all alignments of each sequence."""
    beam = {(): 1.0}
    for frame in hidden:
        after = defaultdict(float)
        for tokens, value in beam.items():
            for label, probability in enumerate(log_probs(model, frame, tokens).exp().tolist()):
                after[(*tokens, label) if label else tokens] += value * probability
        beam = dict(sorted(after.items(), key=lambda item: -item[1])[:beam_size])
    return beam


def as_dict(hypotheses):
    assert [h.log_prob for h in hypotheses] == sorted((h.log_prob for h in hypotheses), reverse=True)
    result = {tuple(h.tokens): math.exp(h.log_prob) for h in hypotheses}
    assert len(result) == len(hypotheses)
    return result


@pytest.mark.parametrize(
    ("model", "shape", "beam_size"),
    [(Recurrent(3), (2, length, 6), 400) for length in (1, 5)]
    + [(Bigram(3), (2, 5, 3), 400)]
    + [(Recurrent(7, scale=6.0), (3, 12, 6), size) for size in (1, 4, 9)],
)
def test_beam_is_the_plain_algorithm(model, shape, beam_size):
    hidden = frames(*shape)
    for row, hypotheses in zip(hidden, transducer_beam(model, hidden, [shape[1]] * shape[0], beam_size), strict=True):
        found = as_dict(hypotheses)
        assert found == pytest.approx(plain_beam(model, row, beam_size), rel=1e-9)
        assert beam_size < 400 or sum(found.values()) == pytest.approx(1)


@pytest.mark.parametrize("max_symbols", [1, 2, 10])
def test_greedy_is_the_plain_loop(max_symbols):
    model, hidden = Recurrent(5), frames(4, 15, 6, seed=0)
    lengths = torch.tensor([15, 0, 1, 9])
    found = transducer_greedy(model, hidden, lengths, max_symbols)
    expected = [plain_greedy(model, row[:n], max_symbols) for row, n in zip(hidden, lengths, strict=True)]
    assert found == [[step[0] for step in steps] for steps in expected]
    for row, steps in zip(transducer_emissions(model, hidden, lengths, max_symbols), expected, strict=True):
        assert [(one.token, one.start, one.end) for one in row] == [step[:3] for step in steps]
        assert [one.confidence for one in row] == pytest.approx([step[3] for step in steps])
    assert found[0]
    assert found[1] == []


@pytest.mark.parametrize(("kind", "size"), [(Recurrent, 6), (Bigram, 3)])
def test_ragged_batch_is_that_of_its_rows(kind, size):
    model, hidden, lengths = kind(3), frames(5, 11, size), torch.tensor([4, 0, 1, 11, 10])
    for row, length in enumerate(lengths):
        hidden[row, length:] = math.nan
    greedy, beams = transducer_greedy(model, hidden, lengths), transducer_beam(model, hidden, lengths)
    for row, length, tokens, hypotheses in zip(hidden, lengths, greedy, beams, strict=True):
        alone = row[None, :length]
        assert [tokens] == transducer_greedy(model, alone, [length])
        assert as_dict(hypotheses) == pytest.approx(as_dict(transducer_beam(model, alone, [length])[0]), rel=1e-9)
    assert [(h.tokens, h.log_prob) for h in beams[1]] == [([], 0.0)]


def test_labels_that_cannot_be_said_are_not():
    model, hidden = Bigram(3), frames(1, 4, 3)
    hidden[..., 2] = -math.inf
    found = as_dict(transducer_beam(model, hidden, [4], beam_size=50)[0])
    assert set(found) == {(1,) * count for count in range(5)}
    assert sum(found.values()) == pytest.approx(1)


def test_lower_precision():
    model, hidden, dtype = Bigram(5), frames(1, 30, 5), torch.bfloat16
    model.table = model.table.to(dtype)
    found = transducer_beam(model, hidden.to(dtype), [30], beam_size=3)[0]
    # Rounded inputs may order near ties otherwise; the sums themselves are of float32.
    model.table, rounded = model.table.double(), hidden.to(dtype).double()
    expected = plain_beam(model, rounded[0], 3)
    assert found[0].log_prob == pytest.approx(math.log(max(expected.values())), rel=0.02)


def test_no_change_of_the_model():
    """Whose predictions without a state are views of its parameters."""
    model, hidden = Bigram(4), frames(2, 6, 4)
    model.predict = lambda tokens, state=None: (model.table[None, 0].expand(len(tokens), 1, 4), ())
    before = model.table.clone()
    transducer_greedy(model, hidden, [6, 3])
    transducer_beam(model, hidden, [6, 3])
    assert torch.equal(model.table, before)


def test_empty_batch():
    for decode in (transducer_greedy, transducer_beam):
        assert decode(Bigram(3), torch.zeros(0, 4, 3).double(), []) == []
    assert transducer_greedy(Bigram(3), torch.zeros(2, 0, 3).double(), [0, 0]) == [[], []]


@pytest.mark.parametrize("decode", [transducer_greedy, transducer_beam])
@pytest.mark.parametrize(
    ("hidden", "more", "error", "message"),
    [
        (torch.zeros(4, 3), ([4],), ValueError, "hidden must have three dimensions"),
        (torch.zeros(1, 4, 3), ([5],), ValueError, "between 0 and L = 4"),
        (torch.zeros(1, 4, 3), ([4.0],), TypeError, "lengths must be integers"),
        (torch.full((2, 4, 3), math.nan).double(), ([0, 4],), ValueError, "got NaN"),
        (torch.zeros(1, 4, 3), ([4], 0), ValueError, "must be at least 1, got 0"),
    ],
)
def test_refusals(decode, hidden, more, error, message):
    with pytest.raises(error, match=message):
        decode(Bigram(3), hidden, *more)
