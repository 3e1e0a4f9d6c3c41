"""Searches of CTC and Transducers, frames of tokens, forced alignment: against all paths, and plain loops."""

import itertools
import math
from collections import defaultdict
from functools import partial

import pytest
import torch
from torch import nn

from favor.models.speech import (
    ctc_align,
    ctc_emissions,
    ctc_greedy,
    ctc_prefix_beam,
    transducer_beam,
    transducer_emissions,
    transducer_greedy,
)


def random_logits(*shape, seed=0, scale=2.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def collapse(path, blank=0):
    return tuple(label for label, _ in itertools.groupby(path) if label != blank)


def enumerated(logits, blank=0):
    """Every labeling of one row `[L, V]`: the probability of each of its paths."""
    probabilities, found = logits.softmax(-1).tolist(), defaultdict(dict)
    for path in itertools.product(range(logits.shape[-1]), repeat=len(logits)):
        found[collapse(path, blank)][path] = math.prod(map(list.__getitem__, probabilities, path))
    return found


@pytest.mark.parametrize("blank", [0, 2])
@pytest.mark.parametrize("length", [0, 1, 5, 6])
def test_a_large_beam_finds_every_labeling_with_its_probability(length, blank):
    logits = random_logits(2, length, 3, seed=length)
    found = ctc_prefix_beam(logits, torch.tensor([length, length]), beam_size=1000, blank=blank)
    for row, hypotheses in zip(logits, found, strict=True):
        truth = {tokens: sum(paths.values()) for tokens, paths in enumerated(row, blank).items()}
        assert {tuple(h.tokens): math.exp(h.log_prob) for h in hypotheses} == pytest.approx(truth, rel=1e-9)
        assert len(hypotheses) == len(truth)
        order = [h.log_prob for h in hypotheses]
        assert order == sorted(order, reverse=True)


def plain_beam(logits, beam_size):
    """The same search with every prefix and every label in a dictionary of plain probabilities."""
    beam = {(): (1.0, 0.0)}
    for row in logits.softmax(-1).tolist():
        after = defaultdict(lambda: [0.0, 0.0])
        for prefix, (blank, token) in beam.items():
            after[prefix][0] += (blank + token) * row[0]
            for label in range(1, len(row)):
                if prefix and prefix[-1] == label:
                    after[prefix][1] += token * row[label]
                    after[(*prefix, label)][1] += blank * row[label]
                else:
                    after[(*prefix, label)][1] += (blank + token) * row[label]
        beam = dict(sorted(after.items(), key=lambda item: -sum(item[1]))[:beam_size])
    return {prefix: sum(values) for prefix, values in beam.items()}


@pytest.mark.parametrize("scale", [0.3, 2.0, 8.0])
@pytest.mark.parametrize("beam_size", [1, 2, 5, 16])
def test_pruned_beam_is_the_plain_algorithm(beam_size, scale):
    # 40 labels and beams of a few: the shortcuts over labels must not change what is kept.
    logits = random_logits(3, 25, 40, seed=beam_size, scale=scale)
    logits[..., 0] += 2
    for row, hypotheses in zip(logits, ctc_prefix_beam(logits, [25] * 3, beam_size), strict=True):
        truth = plain_beam(row, beam_size)
        assert {tuple(h.tokens): math.exp(h.log_prob) for h in hypotheses} == pytest.approx(truth, rel=1e-9)


def test_a_ragged_batch_is_its_rows():
    logits, lengths, counts = random_logits(5, 20, 6), torch.tensor([20, 0, 1, 13, 19]), [5, 0, 1, 12, 9]
    labels = torch.full((5, 12), -100)
    for row, own in enumerate(([1, 1, 2, 5, 5], [], [3], [4, 5] * 6, [1, 2, 3, 4, 5, 4, 3, 2, 1])):
        labels[row, : counts[row]] = torch.tensor(own)
        logits[row, lengths[row] :] = math.nan
    aligned = ctc_align(logits, lengths, labels)
    for beam_size in (1, 4):
        beams = ctc_prefix_beam(logits, lengths, beam_size)
        for row, (length, found) in enumerate(zip(lengths, beams, strict=True)):
            assert [found] == ctc_prefix_beam(logits[row : row + 1, :length], [length], beam_size)
            assert 1 <= len(found) <= beam_size
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        alone = ctc_align(logits[row : row + 1, :length], [length], labels[row : row + 1, :count])
        assert alone == [aligned[row]]
        assert [one.token for one in aligned[row]] == labels[row, :count].tolist()
    assert ctc_greedy(logits, lengths)[1] == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision_is_summed_in_float32(dtype):
    logits = random_logits(1, 40, 5).to(dtype)
    expected = ctc_prefix_beam(logits.double(), [40], 4)[0]
    found = ctc_prefix_beam(logits, [40], 4)[0]
    assert [h.tokens for h in found] == [h.tokens for h in expected]
    assert [h.log_prob for h in found] == pytest.approx([h.log_prob for h in expected], rel=1e-5)
    labels = torch.tensor([[1, 2, 2, 4]])
    aligned, truth = (ctc_align(one, [40], labels)[0] for one in (logits, logits.double()))
    assert [(one.start, one.end) for one in aligned] == [(one.start, one.end) for one in truth]
    assert [one.confidence for one in aligned] == pytest.approx([one.confidence for one in truth], rel=1e-5)


def test_refuses_nan_and_texts_of_probability_0():
    logits, labels = torch.zeros(1, 4, 3), torch.tensor([[2]])
    logits[0, :, 2] = -math.inf
    with pytest.raises(ValueError, match="the labels of row 0 have probability 0"):
        ctc_align(logits, [4], labels)
    logits[0, 2, 1] = math.nan
    for decode in (ctc_greedy, ctc_prefix_beam, ctc_emissions, lambda *own: ctc_align(*own, labels - 1)):
        with pytest.raises(ValueError, match="got NaN"):
            decode(logits, [4])
        assert len(decode(logits, [2])) == 1


def check_emissions(emissions, path, logits, blank):
    """Token, start, end and confidence of a path, run by run."""
    runs = [[frame for frame, _ in own] for _, own in itertools.groupby(enumerate(path), lambda one: one[1])]
    runs = [own for own in runs if path[own[0]] != blank]
    assert [(one.token, one.start, one.end) for one in emissions] == [(path[o[0]], o[0], o[-1] + 1) for o in runs]
    sure = [logits.softmax(-1)[own, path[own[0]]].mean().item() for own in runs]
    assert [one.confidence for one in emissions] == pytest.approx(sure, rel=1e-12)


@pytest.mark.parametrize("blank", [0, 2])
def test_emissions_of_the_greedy_path(blank):
    logits, lengths = random_logits(6, 30, 4), torch.tensor([30, 0, 1, 17, 29, 5])
    found = ctc_emissions(logits, lengths, blank)
    assert [[one.token for one in row] for row in found] == ctc_greedy(logits, lengths, blank)
    for row, length, emissions in zip(logits, lengths, found, strict=True):
        check_emissions(emissions, row[:length].argmax(-1).tolist(), row, blank)


@pytest.mark.parametrize("blank", [0, 2])
@pytest.mark.parametrize("length", [1, 2, 5, 7])
def test_alignments_are_the_best_of_all_paths(length, blank):
    """All texts of one row as one batch; what comes after the frames and the labels of a row is ignored."""
    row = random_logits(length, 3, seed=length)
    truth = {text: max(paths, key=paths.get) for text, paths in enumerated(row, blank).items()}
    assert len(truth) > 2 * length
    labels = torch.full((len(truth), max(map(len, truth))), -100)
    logits = torch.full((len(truth), length + 2, 3), math.nan, dtype=torch.float64)
    logits[:, :length] = row
    for place, text in enumerate(truth):
        labels[place, : len(text)] = torch.tensor(text)
    found = ctc_align(logits, [length] * len(truth), labels, blank=blank)
    for emissions, path in zip(found, truth.values(), strict=True):
        check_emissions(emissions, path, row, blank)


@pytest.mark.parametrize(
    ("frames", "labels", "message"),
    [
        (3, [[1, 1, 2]], "row 0 has 3 labels, which need 4 frames, got 3"),
        (5, [[1, 0]], "labels must be 0 to 2 and not the blank 0, got 0 in row 0"),
        (5, [[-100, 1]], "got -100 in row 0"),
        (5, [[1], [2]], r"labels must be \[1, U\], a row for each of logits, got \[2, 1\]"),
    ],
)
def test_what_cannot_be_aligned_is_refused(frames, labels, message):
    with pytest.raises(ValueError, match=message):
        ctc_align(torch.zeros(1, 5, 3), [frames], torch.tensor(labels))


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
def plain_transducer_beam(model, hidden, beam_size):
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
    hidden = random_logits(*shape, seed=1, scale=1.0)
    for row, hypotheses in zip(hidden, transducer_beam(model, hidden, [shape[1]] * shape[0], beam_size), strict=True):
        found = as_dict(hypotheses)
        assert found == pytest.approx(plain_transducer_beam(model, row, beam_size), rel=1e-9)
        assert beam_size < 400 or sum(found.values()) == pytest.approx(1)


@pytest.mark.parametrize("max_symbols", [1, 2, 10])
def test_greedy_is_the_plain_loop(max_symbols):
    model, hidden = Recurrent(5), random_logits(4, 15, 6, seed=0, scale=1.0)
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
    model, hidden, lengths = kind(3), random_logits(5, 11, size, seed=1, scale=1.0), torch.tensor([4, 0, 1, 11, 10])
    for row, length in enumerate(lengths):
        hidden[row, length:] = math.nan
    greedy, beams = transducer_greedy(model, hidden, lengths), transducer_beam(model, hidden, lengths)
    for row, length, tokens, hypotheses in zip(hidden, lengths, greedy, beams, strict=True):
        alone = row[None, :length]
        assert [tokens] == transducer_greedy(model, alone, [length])
        assert as_dict(hypotheses) == pytest.approx(as_dict(transducer_beam(model, alone, [length])[0]), rel=1e-9)
    assert [(h.tokens, h.log_prob) for h in beams[1]] == [([], 0.0)]


def test_labels_that_cannot_be_said_are_not():
    model, hidden = Bigram(3), random_logits(1, 4, 3, seed=1, scale=1.0)
    hidden[..., 2] = -math.inf
    found = as_dict(transducer_beam(model, hidden, [4], beam_size=50)[0])
    assert set(found) == {(1,) * count for count in range(5)}
    assert sum(found.values()) == pytest.approx(1)


def test_lower_precision():
    model, hidden, dtype = Bigram(5), random_logits(1, 30, 5, seed=1, scale=1.0), torch.bfloat16
    model.table = model.table.to(dtype)
    found = transducer_beam(model, hidden.to(dtype), [30], beam_size=3)[0]
    # Rounded inputs may order near ties otherwise; the sums themselves are of float32.
    model.table, rounded = model.table.double(), hidden.to(dtype).double()
    expected = plain_transducer_beam(model, rounded[0], 3)
    assert found[0].log_prob == pytest.approx(math.log(max(expected.values())), rel=0.02)


def test_no_change_of_the_model():
    """Whose predictions without a state are views of its parameters."""
    model, hidden = Bigram(4), random_logits(2, 6, 4, seed=1, scale=1.0)
    model.predict = lambda tokens, state=None: (model.table[None, 0].expand(len(tokens), 1, 4), ())
    before = model.table.clone()
    transducer_greedy(model, hidden, [6, 3])
    transducer_beam(model, hidden, [6, 3])
    assert torch.equal(model.table, before)


SEARCHES = [ctc_greedy, ctc_prefix_beam]
SEARCHES += [partial(transducer_greedy, Bigram(3)), partial(transducer_beam, Bigram(3))]


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize(
    ("shape", "lengths", "error", "message"),
    [
        ((4, 3), [4], ValueError, "must have three dimensions"),
        ((2, 4, 3), [4, 5], ValueError, "between 0 and L = 4"),
        ((2, 4, 3), [4], ValueError, r"shape \(2,\)"),
        ((1, 4, 3), [4.0], TypeError, "lengths must be integers"),
        ((1, 4, 3), torch.ones(1, 4, dtype=torch.bool), TypeError, "Sum a mask"),
    ],
)
def test_refusals_of_lengths(search, shape, lengths, error, message):
    with pytest.raises(error, match=message):
        search(torch.zeros(shape), lengths)


def test_refusals_and_empty_batches():
    for search in SEARCHES:
        assert search(torch.zeros(0, 4, 3).double(), []) == []
    assert ctc_align(torch.zeros(0, 7, 3), [], torch.zeros(0, 2, dtype=torch.long)) == []
    for search in SEARCHES[::2]:
        assert search(torch.zeros(2, 0, 3).double(), [0, 0]) == [[], []]
    for search in SEARCHES[1:]:
        with pytest.raises(ValueError, match="must be at least 1, got 0"):
            search(torch.zeros(1, 4, 3), [4], 0)
    for search in SEARCHES[:2]:
        with pytest.raises(ValueError, match="blank must be one of the 3 labels"):
            search(torch.zeros(1, 4, 3), [4], blank=3)
    for search in SEARCHES[2:]:
        with pytest.raises(ValueError, match="got NaN"):
            search(torch.full((2, 4, 3), math.nan).double(), [0, 4])
