"""Frames of tokens against enumeration of every CTC path."""

import itertools
import math

import pytest
import torch

from favor.models.speech import ctc_align, ctc_emissions, ctc_greedy


def random_logits(*shape, seed=0, scale=2.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def collapse(path, blank=0):
    return tuple(label for label, _ in itertools.groupby(path) if label != blank)


def read_off(path, probabilities, blank=0):
    """Token, start, end and confidence of a path, frame by frame."""
    found = []
    for frame, label in enumerate(path):
        if label == blank:
            continue
        if frame and path[frame - 1] == label:
            found[-1][2] = frame + 1
        else:
            found.append([label, frame, frame + 1])
    return [(*one, sum(probabilities[frame][one[0]] for frame in range(*one[1:])) / (one[2] - one[1])) for one in found]


def best_paths(logits, blank=0):
    """The most probable path of each text, of all paths of one row."""
    probabilities, best = logits.softmax(-1).tolist(), {}
    for path in itertools.product(range(logits.shape[-1]), repeat=len(logits)):
        score = math.prod(row[label] for row, label in zip(probabilities, path, strict=True))
        text = collapse(path, blank)
        if score > best.get(text, (0.0, ()))[0]:
            best[text] = (score, path)
    return {text: path for text, (_, path) in best.items()}


def assert_equal(emissions, expected):
    assert [(one.token, one.start, one.end) for one in emissions] == [one[:3] for one in expected]
    assert [one.confidence for one in emissions] == pytest.approx([one[3] for one in expected], rel=1e-12)


@pytest.mark.parametrize("blank", [0, 2])
def test_emissions_of_the_greedy_path(blank):
    logits, lengths = random_logits(6, 30, 4), torch.tensor([30, 0, 1, 17, 29, 5])
    found = ctc_emissions(logits, lengths, blank)
    assert [[one.token for one in row] for row in found] == ctc_greedy(logits, lengths, blank)
    for row, length, emissions in zip(logits, lengths, found, strict=True):
        assert_equal(emissions, read_off(row[:length].argmax(-1).tolist(), row.softmax(-1).tolist(), blank))


@pytest.mark.parametrize("blank", [0, 2])
@pytest.mark.parametrize("length", [1, 2, 5, 7])
def test_alignments_are_the_best_of_all_paths(length, blank):
    """All texts of one row as one batch; what comes after the frames and the labels of a row is ignored."""
    row = random_logits(length, 3, seed=length)
    truth = best_paths(row, blank)
    assert len(truth) > 2 * length
    labels = torch.full((len(truth), max(map(len, truth))), -100)
    logits = torch.full((len(truth), length + 2, 3), math.nan, dtype=torch.float64)
    logits[:, :length] = row
    for place, text in enumerate(truth):
        labels[place, : len(text)] = torch.tensor(text)
    found = ctc_align(logits, [length] * len(truth), labels, blank=blank)
    for emissions, path in zip(found, truth.values(), strict=True):
        assert_equal(emissions, read_off(path, row.softmax(-1).tolist(), blank))


def test_a_ragged_batch_is_its_rows():
    logits, lengths, counts = random_logits(4, 20, 6), [20, 0, 9, 14], [5, 0, 9, 1]
    labels = torch.tensor([[1, 1, 2, 5, 5, *4 * [-100]], 9 * [-100], [1, 2, 3, 4, 5, 4, 3, 2, 1], [4, *8 * [-100]]])
    found = ctc_align(logits, lengths, labels)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        alone = ctc_align(logits[row : row + 1, :length], [length], labels[row : row + 1, :count])
        assert alone == [found[row]]
        assert [one.token for one in found[row]] == labels[row, :count].tolist()
    assert ctc_align(torch.zeros(0, 7, 3), [], torch.zeros(0, 2, dtype=torch.long)) == []


def test_the_text_of_the_greedy_path_is_aligned_to_it():
    logits = random_logits(1, 400, 30, scale=4.0)
    emissions = ctc_emissions(logits, [400])[0]
    assert len(emissions) > 300
    assert ctc_align(logits, [400], torch.tensor([[one.token for one in emissions]]))[0] == emissions


def test_half_precision_goes_in_float32():
    logits, labels = random_logits(1, 30, 5).bfloat16(), torch.tensor([[1, 2, 2, 4]])
    found, expected = (ctc_align(one, [30], labels)[0] for one in (logits, logits.double()))
    assert [(one.start, one.end) for one in found] == [(one.start, one.end) for one in expected]
    assert [one.confidence for one in found] == pytest.approx([one.confidence for one in expected], rel=1e-5)


@pytest.mark.parametrize(
    ("frames", "labels", "options", "message"),
    [
        (3, [[1, 2, 1, 2]], {}, "row 0 has 4 labels, which need 4 frames, got 3"),
        (3, [[1, 1, 2]], {}, "row 0 has 3 labels, which need 4 frames, got 3"),
        (0, [[1]], {}, "need 1 frames, got 0"),
        (5, [[1, 0]], {}, "labels must be 0 to 2 and not the blank 0, got 0 in row 0"),
        (5, [[1, 3]], {}, "not the blank 0, got 3 in row 0"),
        (5, [[-100, 1]], {}, "got -100 in row 0"),
        (5, [[1], [2]], {}, r"labels must be \[1, U\], a row for each of logits, got \[2, 1\]"),
        (5, [[1, 2]], {"blank": 3}, "blank must be one of the 3 labels"),
        (6, [[1, 2]], {}, "between 0 and L = 5 of logits"),
    ],
)
def test_what_cannot_be_aligned_is_refused(frames, labels, options, message):
    with pytest.raises(ValueError, match=message):
        ctc_align(torch.zeros(1, 5, 3), [frames], torch.tensor(labels), **options)


def test_labels_are_integers():
    with pytest.raises(TypeError, match=r"labels must be integers, token ids; got torch.float32"):
        ctc_align(torch.zeros(1, 5, 3), [5], torch.ones(1, 2))


def test_no_probability_and_no_numbers_are_refused():
    logits = torch.zeros(2, 4, 3)
    logits[1, :, 2] = -math.inf
    with pytest.raises(ValueError, match="the labels of row 1 have probability 0"):
        ctc_align(logits, [4, 4], torch.tensor([[2], [2]]))
    logits[0, 1, 1] = math.nan
    for call in (lambda: ctc_emissions(logits, [4, 4]), lambda: ctc_align(logits, [4, 4], torch.tensor([[1], [1]]))):
        with pytest.raises(ValueError, match="got NaN"):
            call()
