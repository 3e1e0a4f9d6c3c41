"""Samples and batches of speech: speed, noise, reverberation, masks, and the order, on one process and on several."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import scipy.signal
import soundfile
import torch
from accelerate.data_loader import prepare_data_loader
from speech_corpus import RATE, SPOKEN, librispeech, sound, write_sound

from favor.models.conformer.feature_extraction_conformer import ConformerFeatureExtractor
from favor.models.speech import ConformerProcessor, read_file, resample, train_tokenizer
from favor.models.speech.audio import read_piece
from favor.train.speech.arguments import SpeechDataArguments
from favor.train.speech.augment import Acoustics, SpecAugment, add_noise, change_speed, reverberate, synthetic_response
from favor.train.speech.batches import DurationBatchSampler, SpeechDataset, collate
from favor.train.speech.data import read_audio
from favor.train.speech.loaders import make_acoustics
from favor.train.speech.sources import load_speech


def sine(frequency, samples, rate=RATE):
    return np.sin(2 * np.pi * frequency * np.arange(samples) / rate).astype(np.float32)


def covered(size, width):
    """Probability of each of `size` places to be masked by one stretch of width 0..`width`, by counting all of them."""
    chance = np.zeros(size)
    for wide in range(width + 1):
        for start in range(size - wide + 1):
            chance[start : start + wide] += 1 / (width + 1) / (size - wide + 1)
    return chance


@pytest.mark.parametrize("axis", ["frequency", "time"])
def test_one_mask_has_the_probabilities_of_all_masks(axis):
    draws, size, width = 20000, 12, 5
    augment, shape = SpecAugment(1, width, 0), (draws, 1, size)
    if axis == "time":
        augment, shape = SpecAugment(0, 0, 1, (width + 0.5) / size), (draws, size, 1)
    lengths = torch.full((draws,), shape[1])
    masked = augment(torch.ones(shape), lengths, torch.Generator().manual_seed(0)).view(draws, size) == 0
    widths = masked.sum(1)
    assert ((masked[:, 1:] & ~masked[:, :-1]).sum(1) + masked[:, 0] <= 1).all()
    shares = torch.bincount(widths, minlength=width + 1) / draws
    expected = 1 / (width + 1)
    assert len(shares) == width + 1
    np.testing.assert_allclose(shares, expected, atol=4 * np.sqrt(expected / draws))
    chance = covered(size, width)
    np.testing.assert_allclose(masked.double().mean(0), chance, atol=4 * np.sqrt(chance.max() / draws))


def test_masks_are_bands_within_each_utterance():
    lengths = torch.tensor([400, 200, 100, 19])
    features = torch.randn(4, 400, 80, generator=torch.Generator().manual_seed(1)) + 10
    features[torch.arange(400) >= lengths[:, None]] = 0
    most = torch.zeros(4)
    for seed in range(50):
        got = SpecAugment(value=-1.0)(features, lengths, torch.Generator().manual_seed(seed))
        masked = got == -1
        assert torch.equal(got[~masked], features[~masked])
        for row, length in enumerate(lengths.tolist()):
            times, bands = masked[row, :, :].all(1), masked[row, :, :].all(0)
            assert torch.equal(masked[row], times[:, None] | bands)
            assert not times[length:].any()
            assert bands.sum() <= 54
            assert times.sum() <= 10 * int(0.05 * length)
            most[row] = max(most[row], times.sum())
    assert most[3] == 0
    assert (most[:3] > 0.2 * lengths[:3]).all()


def test_masks_differ_between_utterances_and_follow_the_generator():
    features, lengths = torch.ones(8, 300, 80), torch.full((8,), 300)
    one, two = (SpecAugment()(features, lengths, seeded(3)) for _ in range(2))
    assert torch.equal(one, two)
    assert len({row.numpy().tobytes() for row in one}) == 8
    torch.manual_seed(3)
    default, other = (SpecAugment()(features, lengths) for _ in range(2))
    assert not torch.equal(other, default)
    torch.manual_seed(3)
    assert torch.equal(SpecAugment()(features, lengths), default)
    assert (features == 1).all()


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.1, 1.25])
def test_speed_scales_frequency_and_length(factor):
    waveform = sine(1000, 16001)
    faster = change_speed(waveform, factor)
    assert faster.dtype == np.float32
    assert len(faster) == -(-16001 * 100 // round(factor * 100))
    middle = slice(500, len(faster) - 500)
    np.testing.assert_allclose(faster[middle], sine(1000 * factor, len(faster))[middle], atol=5e-3)


@pytest.mark.parametrize(("before", "after"), [(44100, 16000), (8000, 16000), (16000, 16000), (48000, 16000)])
def test_resampled_sine(before, after):
    waveform = resample(sine(440, before, before), before, after)
    assert len(waveform) == after
    np.testing.assert_allclose(waveform[500:-500], sine(440, after, after)[500:-500], atol=5e-3)
    for rates in ((0, after), (before, -1), (before + 0.5, after), (before, float("nan"))):
        with pytest.raises(ValueError, match="sampling rates must be whole numbers of 1000 to 768000 Hz"):
            resample(waveform, *rates)


def decibels(one, other):
    """Mean power of one over that of the other."""
    return 20 * math.log10(np.linalg.norm(one.astype(np.float64)) / np.linalg.norm(other.astype(np.float64)))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def float_file(path, samples, rate=RATE):
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, samples, rate, subtype="FLOAT")
    return path


@pytest.mark.parametrize("snr", [-5.0, 0.0, 7.3, 20.0])
def test_the_noise_has_the_ratio(snr):
    speech, noise = sound(1.0, 1), sound(1.0, 2) * 0.01
    mixed = add_noise(speech, noise, snr)
    assert mixed.dtype == np.float32
    added = mixed.astype(np.float64) - speech
    assert decibels(speech, added) == pytest.approx(snr, abs=1e-5)
    np.testing.assert_allclose(added / np.abs(added).max(), noise / np.abs(noise).max(), atol=1e-5)


def test_reverberation_is_a_convolution_from_the_direct_path_on():
    speech, source = sound(0.4, 1), np.random.default_rng(0)
    response = np.concatenate([[0.05, -0.1], [-0.8], 0.2 * source.normal(size=3000)]).astype(np.float32)
    wet = reverberate(speech, response)
    assert wet.dtype == np.float32
    assert wet.shape == speech.shape
    assert decibels(wet, speech) == pytest.approx(0, abs=1e-5)
    # With the sign of the direct path turned, so that the speech keeps its own.
    expected = np.convolve(speech.astype(np.float64), -response.astype(np.float64))[2 : 2 + len(speech)]
    expected *= np.linalg.norm(speech.astype(np.float64)) / np.linalg.norm(expected)
    np.testing.assert_allclose(wet, expected, atol=2e-6)
    np.testing.assert_array_equal(reverberate(0 * speech, response), 0 * speech)


@pytest.mark.parametrize("rt60", [0.1, 0.4])
def test_a_synthetic_response_decays_by_60_decibels(rt60):
    responses = np.stack([synthetic_response(rt60, RATE, seeded(seed)) for seed in range(300)]).astype(np.float64)
    assert (responses.argmax(1) == 0).all()
    assert (responses[:, 0] == 1).all()
    tails = responses[:, 1:] ** 2
    # The energy of the noise: that of the direct path on average, with the deviation of a sum of squares.
    energies, shape = tails.sum(1), 10 ** (-6 * np.arange(1, tails.shape[1] + 1) / (rt60 * RATE))
    deviation = np.sqrt(2 * np.square(shape).sum()) / shape.sum()
    assert energies.mean() == pytest.approx(1, abs=4 * deviation / np.sqrt(300))
    # Energy per tenth of the time falls by 6 dB each.
    levels = 10 * np.log10(tails.mean(0).reshape(10, -1).mean(1))
    np.testing.assert_allclose(np.diff(levels), -6, atol=0.5)


def test_a_piece_is_cut_at_its_place_or_repeated(tmp_path):
    samples = sound(1.0)
    path = float_file(tmp_path / "two.wav", np.stack([samples, -samples], 1))
    for place, start in ((0.0, 0), (0.5, 6000), (1.0, 12000)):
        np.testing.assert_array_equal(read_piece(path, RATE, 4000, place), samples[start : start + 4000])
    np.testing.assert_array_equal(read_piece(path, RATE), samples)
    repeated = read_piece(path, RATE, 40000, 0.7)
    np.testing.assert_array_equal(repeated, np.concatenate([samples, samples, samples[:8000]]))


def test_what_is_drawn_is_in_the_ranges_and_as_probable_as_it_should_be(tmp_path):
    noises = tuple(float_file(tmp_path / f"{name}.wav", sound(0.3, name)) for name in range(2))
    speech = sound(0.4, 9)
    acoustics = Acoustics(noises=noises, snr=(3.0, 9.0), noise_probability=0.25)
    ratios = []
    for seed in range(400):
        added = acoustics(speech, RATE, seeded(seed)).astype(np.float64) - speech
        if added.any():
            ratios.append(decibels(speech, added))
    assert len(ratios) / 400 == pytest.approx(0.25, abs=4 * np.sqrt(0.25 * 0.75 / 400))
    assert min(ratios) >= 3 - 1e-5
    assert max(ratios) <= 9 + 1e-5
    assert np.mean(ratios) == pytest.approx(6, abs=4 * 6 / np.sqrt(12 * len(ratios)))


def test_noise_follows_reverberation(tmp_path):
    noise, room = float_file(tmp_path / "n.wav", sound(3.0, 1)), float_file(tmp_path / "r.wav", sound(0.05, 2))
    always = {"noise_probability": 1.0, "reverb_probability": 1.0}
    acoustics = Acoustics(noises=(noise,), responses=(room,), snr=(10.0, 10.0), **always)
    speech = sound(0.5, 3)
    changed = acoustics(speech, RATE, seeded())
    wet = reverberate(speech, read_file(room))
    added = changed.astype(np.float64) - wet
    assert decibels(wet, added) == pytest.approx(10, abs=1e-4)
    # The noise is a piece of its file, whose place a correlation finds.
    whole = read_file(noise).astype(np.float64)
    place = int(np.argmax(scipy.signal.correlate(whole, added, "valid")))
    piece = whole[place : place + len(added)]
    np.testing.assert_allclose(added / added.std(), piece / piece.std(), atol=1e-4)


def test_folders_become_acoustics(tmp_path):
    for name in ("b.wav", "inner/a.flac", "c.mp3"):
        write_sound(tmp_path / "noise" / name, 0.2)
    (tmp_path / "noise" / "LICENSE.txt").write_text("free")
    made = make_acoustics(SpeechDataArguments(noise_dir=str(tmp_path / "noise"), reverb_dir="synthetic"))
    assert [path.name for path in made.noises] == ["b.wav", "c.mp3", "a.flac"]
    assert dataclasses.asdict(made) == dataclasses.asdict(Acoustics(made.noises, rt60=(0.2, 0.6)))
    assert make_acoustics(SpeechDataArguments()) is None


@pytest.mark.parametrize("option", ["noise_dir", "reverb_dir"])
def test_folders_that_cannot_be_used(tmp_path, option):
    def refuses(message):
        with pytest.raises(ValueError, match=message) as caught:
            make_acoustics(SpeechDataArguments(**{option: str(tmp_path / "x")}))
        assert "\n" not in str(caught.value)

    refuses(rf"{option} must be a folder with \.flac, \.mp3, \.wav files, but .*x is no folder")
    (tmp_path / "x").mkdir()
    refuses(rf"{option} must be a folder with .*, but .*x has none that can be read")
    (tmp_path / "x" / "bad.wav").write_bytes(b"no sound" * 50)
    refuses(r"bad\.wav: cannot be decoded")
    (tmp_path / "x" / "bad.wav").write_bytes(b"")
    refuses(r"bad\.wav: the file is empty")
    float_file(tmp_path / "x" / "bad.wav", np.zeros(0, np.float32))
    refuses(r"bad\.wav: holds no samples")
    room = float_file(tmp_path / "r.wav", np.zeros(100, np.float32))
    with pytest.raises(ValueError, match=r"r\.wav: an impulse response must not be silent"):
        Acoustics(responses=(room,), reverb_probability=1.0)(sound(0.1), RATE, seeded())


LENGTHS = (1.0, 0.8, 1.2, 0.7, 0.5, 0.9, 0.6, 1.1, 0.4, 1.3)
SPEEDS = (0.9, 1.0, 1.1)


def durations(number=300, seed=0):
    return np.random.default_rng(seed).uniform(1.2, 17.0, number).tolist()


def numbers(batches):
    return [index for batch in batches for _, index in batch]


@pytest.fixture(scope="module")
def processor():
    return ConformerProcessor(ConformerFeatureExtractor(), train_tokenizer([" ".join(SPOKEN)], "char"))


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


def test_a_long_utterance_is_refused_or_has_a_batch_of_its_own():
    for times, given, message in (
        ([], {}, "durations must hold positive seconds"),
        ([1.0, 0.0], {}, "durations must hold positive seconds"),
        ([1.0, 61.0], {}, "utterance 1 lasts 61.00 s, more than .* 60.00 s"),
        ([59.0, 1.0], {"speeds": SPEEDS, "names": ["a", "b"]}, "utterance a lasts 59.00 s, more than .* 54.00 s"),
    ):
        with pytest.raises(ValueError, match=message):
            DurationBatchSampler(times, 60.0, **given)
    sampler = DurationBatchSampler([5.0, 100.0, 5.0, 90.0], 60.0, allow_long=True)
    assert sorted(len(batch) for batch in sampler) == [1, 1, 1, 1]
    sampler = DurationBatchSampler([5.0, 100.0, 5.0], 60.0, allow_long=True, batches_per_bucket=1)
    assert sorted(sorted(index for _, index in batch) for batch in sampler) == [[0, 2], [1]]


class Keys(dict):
    """Gives back the key that it is asked for."""

    __missing__ = staticmethod(lambda key: key)


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_processes_share_the_batches(processes):
    """As `accelerator.prepare` makes loaders of one loader in each process."""
    samplers = [DurationBatchSampler(durations(), 60.0) for _ in range(processes + 1)]
    loaders = [torch.utils.data.DataLoader(Keys(), batch_sampler=own, collate_fn=list) for own in samplers[1:]]
    shares = [prepare_data_loader(own, num_processes=processes, process_index=n) for n, own in enumerate(loaders)]
    for epoch in (0, 3):
        for loader in (samplers[0], *shares):
            loader.set_epoch(epoch)
        expected, *each = map(list, (samplers[0], *shares))
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
    count = processor.feature_extractor.num_frames
    possible = [{count(len(change_speed(read_audio(one), speed))): speed for speed in SPEEDS} for one in utterances]
    drawn = [possible[index][count] for epoch in range(12) for index, count in enumerate(frames(0, epoch))]
    shares = np.array([drawn.count(speed) for speed in SPEEDS]) / len(drawn)
    np.testing.assert_allclose(shares, 1 / 3, atol=4 * np.sqrt(2 / 9 / len(drawn)))


@pytest.mark.parametrize("name", ["dither", "masks", "acoustics"])
def test_draws_depend_on_seed_epoch_and_utterance_alone(name, utterances, processor, tmp_path):
    noise = write_sound(tmp_path / "n.wav", 3.0, 1)
    acoustics = Acoustics((noise,), noise_probability=1.0, rt60=(0.1, 0.3))
    drawn = {"dither": {"dither": 1e-2}, "masks": {"augment": SpecAugment(time_part=0.2)}}
    drawn = (drawn | {"acoustics": {"acoustics": acoustics}})[name]
    plain = SpeechDataset(utterances, processor)[2]["input_features"]

    def sample(seed, epoch):
        return SpeechDataset(utterances, processor, seed=seed, **drawn)[epoch, 2]["input_features"]

    first, again, *others = (sample(*place) for place in ((3, 1), (3, 1), (3, 2), (4, 1)))
    assert torch.equal(first, again)
    assert all((first - other).abs().max() > 0.1 for other in (*others, plain))
    if name == "masks":
        masked = first == 0
        assert torch.equal(masked, masked.all(1)[:, None] | masked.all(0))
        assert 0.05 < masked.double().mean() < 0.95
        assert torch.equal(first[~masked], plain[~masked])


def test_acoustics_that_do_nothing_change_no_other_draw(utterances, processor):
    plain = {"speeds": (0.9, 1.1), "dither": 1e-3, "seed": 3}
    off = SpeechDataset(utterances, processor, acoustics=Acoustics(), **plain)[1, 2]["input_features"]
    assert torch.equal(off, SpeechDataset(utterances, processor, **plain)[1, 2]["input_features"])


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
