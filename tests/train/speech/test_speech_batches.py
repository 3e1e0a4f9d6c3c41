"""Samples and batches of speech: what is in them, in which order, on one process and on several."""

import itertools

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from speech_corpus import RATE, WORDS, librispeech

from favor.models.conformer.feature_extraction_conformer import ConformerFeatureExtractor
from favor.models.speech import ConformerProcessor, train_tokenizer
from favor.train.speech.augment import SpecAugment, change_speed
from favor.train.speech.batches import DurationBatchSampler, SpeechDataset, collate
from favor.train.speech.data import read_audio
from favor.train.speech.sources import load_speech

LENGTHS = (1.0, 0.8, 1.2, 0.7, 0.5, 0.9, 0.6, 1.1, 0.4, 1.3)
SPEEDS = (0.9, 1.0, 1.1)


def durations(number=300, seed=0):
    return np.random.default_rng(seed).uniform(1.2, 17.0, number).tolist()


def numbers(batches):
    return [index for batch in batches for _, index in batch]


@pytest.fixture(scope="module")
def processor():
    return ConformerProcessor(ConformerFeatureExtractor(), train_tokenizer([" ".join(WORDS)], "char"))


@pytest.fixture(scope="module")
def utterances(tmp_path_factory):
    return load_speech(librispeech(tmp_path_factory.mktemp("corpus"), lengths=LENGTHS), "dev")[0]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("speeds", [(1.0,), SPEEDS, (1.2,)])
@pytest.mark.parametrize("per_bucket", [1, 8, 1000])
def test_every_utterance_once_and_within_the_seconds(shuffle, speeds, per_bucket):
    times = durations()
    sampler = DurationBatchSampler(times, 60.0, speeds=speeds, shuffle=shuffle, batches_per_bucket=per_bucket)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        assert sorted(numbers(batches)) == list(range(300))
        assert {number for batch in batches for number, _ in batch} == {epoch}
        assert all(len(batch) * max(times[index] for _, index in batch) / min(speeds) <= 60.0 for batch in batches)


def test_batches_are_full_and_of_similar_length():
    times = durations(3000)
    sampler = DurationBatchSampler(times, 60.0)
    padded = sum(len(batch) * max(times[index] for _, index in batch) for batch in sampler)
    assert sum(times) / padded > 0.93
    assert len(sampler) < 1.15 * sum(times) / 60.0
    closest = DurationBatchSampler(times, 60.0, shuffle=False)
    assert len(closest) <= len(sampler)
    longest = [times[batch[0][1]] for batch in closest]
    assert longest == sorted(longest, reverse=True)


def test_the_order_depends_on_seed_and_epoch_alone():
    def order(seed, epoch):
        sampler = DurationBatchSampler(durations(), 60.0, seed)
        list(sampler)
        sampler.set_epoch(epoch)
        return numbers(sampler)

    assert order(1, 2) == order(1, 2)
    orders = [order(seed, epoch) for seed, epoch in itertools.product((0, 1), (0, 1, 2))]
    assert len({tuple(one) for one in orders}) == 6


@pytest.mark.parametrize(
    ("times", "given", "message"),
    [
        ([], {}, "durations must hold positive seconds"),
        ([1.0, 0.0], {}, "durations must hold positive seconds"),
        ([1.0, 61.0], {}, "utterance 1 lasts 61.00 s, more than .* 60.00 s"),
        ([59.0, 1.0], {"speeds": SPEEDS, "names": ["a", "b"]}, "utterance a lasts 59.00 s, more than .* 54.00 s"),
    ],
)
def test_refusals(times, given, message):
    with pytest.raises(ValueError, match=message):
        DurationBatchSampler(times, 60.0, **given)


def test_a_long_utterance_can_have_a_batch_of_its_own():
    sampler = DurationBatchSampler([5.0, 100.0, 5.0, 90.0], 60.0, allow_long=True)
    assert sorted(len(batch) for batch in sampler) == [1, 1, 1, 1]
    sampler = DurationBatchSampler([5.0, 100.0, 5.0], 60.0, allow_long=True, batches_per_bucket=1)
    assert sorted(sorted(index for _, index in batch) for batch in sampler) == [[0, 2], [1]]


class Keys(torch.utils.data.Dataset):
    """Gives back what it is asked for."""

    def __len__(self):
        return 300

    def __getitem__(self, key):
        return key


def loaders(processes, seed=0):
    """What `accelerator.prepare` makes of the same loader in each process."""
    result = []
    for process in range(processes):
        sampler = DurationBatchSampler(durations(), 60.0, seed)
        loader = torch.utils.data.DataLoader(Keys(), batch_sampler=sampler, collate_fn=list)
        result.append(prepare_data_loader(loader, num_processes=processes, process_index=process))
    return result


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_processes_share_the_batches(processes):
    sampler = DurationBatchSampler(durations(), 60.0)
    shares = loaders(processes)
    for epoch in (0, 3):
        sampler.set_epoch(epoch)
        expected = list(sampler)
        each = []
        for loader in shares:
            loader.set_epoch(epoch)
            each.append(list(loader))
        count = -(-len(expected) // processes)
        assert [len(batches) for batches in each] == [count] * processes
        together = [batch for step in zip(*each, strict=True) for batch in step]
        assert together[: len(expected)] == expected
        assert together[len(expected) :] == expected[: len(together) - len(expected)]


def test_a_sample_is_its_features_and_labels(utterances, processor):
    data = SpeechDataset(utterances, processor)
    assert len(data) == len(LENGTHS)
    assert data.durations == [one.seconds for one in utterances]
    for index, utterance in enumerate(utterances):
        expected = processor(read_audio(utterance), utterance.text, sampling_rate=RATE)
        sample = data[index]
        torch.testing.assert_close(sample["input_features"], expected.input_features[0])
        assert sample["labels"].tolist() == expected.labels[0].tolist()
        assert sample["index"] == index


def test_speeds_are_drawn_from_seed_epoch_and_index(utterances, processor):
    def frames(seed, epoch):
        data = SpeechDataset(utterances, processor, speeds=SPEEDS, seed=seed)
        return tuple(len(data[epoch, index]["input_features"]) for index in range(len(data)))

    assert frames(0, 0) == frames(0, 0)
    assert len({frames(seed, epoch) for seed in (0, 1) for epoch in (0, 1)}) == 4
    possible = [
        {processor.feature_extractor.num_frames(len(change_speed(read_audio(one), speed))): speed for speed in SPEEDS}
        for one in utterances
    ]
    drawn = [possible[index][count] for epoch in range(12) for index, count in enumerate(frames(0, epoch))]
    shares = np.array([drawn.count(speed) for speed in SPEEDS]) / len(drawn)
    np.testing.assert_allclose(shares, 1 / 3, atol=4 * np.sqrt(2 / 9 / len(drawn)))


def test_dither_is_the_same_for_a_sample(utterances, processor):
    data = SpeechDataset(utterances, processor, dither=1e-2, seed=3)
    first, again, other = (data[epoch, 2]["input_features"] for epoch in (1, 1, 2))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert (first - other).abs().max() > 0.1
    assert (first - SpeechDataset(utterances, processor)[2]["input_features"]).abs().max() > 0.1


def test_masks_are_the_same_for_a_sample(utterances, processor):
    data = SpeechDataset(utterances, processor, augment=SpecAugment(time_part=0.2), seed=3)
    plain = SpeechDataset(utterances, processor)[2]["input_features"]
    first, again, other = (data[epoch, 2]["input_features"] for epoch in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    masked = first == 0
    assert torch.equal(masked, masked.all(1)[:, None] | masked.all(0))
    assert 0.05 < masked.double().mean() < 0.95
    assert torch.equal(first[~masked], plain[~masked])


def test_collate_pads_as_the_processor_does(utterances, processor):
    data = SpeechDataset(utterances, processor)
    chosen = [4, 0, 7]
    batch = collate([data[index] for index in chosen], with_index=True)
    expected = processor(
        [read_audio(utterances[index]) for index in chosen],
        [utterances[index].text for index in chosen],
        sampling_rate=RATE,
    )
    assert batch.pop("index").tolist() == chosen
    assert set(batch) == set(expected)
    for name, values in expected.items():
        torch.testing.assert_close(batch[name], values)
    assert set(collate([data[0]])) == {"input_features", "attention_mask", "labels"}
