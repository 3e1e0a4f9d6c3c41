"""Errors of the heads of audio encoders: computed again from their definition, and what is refused."""

import json

import numpy as np
import pytest
import soundfile
import torch
from tiny_speech import RATE, save_model, sound
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AutoFeatureExtractor,
    Wav2Vec2Config,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

import favor
from favor.eval.approximation import __main__ as approximation
from favor.eval.approximation import audio
from favor.models.conformer import ConformerForCTC

LENGTHS = {"7": (0.4, 0.5, 0.3, 0.6), "8": (0.2, 0.9)}
OPTIONS = "--split dev --name out --num_features 4 --windows 0 --query_samples 1000 --backends"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for split in ("dev", "train"):
        for speaker, lengths in LENGTHS.items():
            chapter = folder / "LibriSpeech" / split / speaker / "1"
            chapter.mkdir(parents=True)
            for i, seconds in enumerate(lengths):
                soundfile.write(chapter / f"{speaker}-1-{i}.wav", sound(seconds, i + len(split)), RATE)
            lines = [f"{speaker}-1-{i} A B\n" for i in range(len(lengths))]
            (chapter / f"{speaker}-1.trans.txt").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def whisper_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=30, d_model=16, num_mel_bins=8, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_source_positions=50, init_std=0.4,
        bos_token_id=1, eos_token_id=1, pad_token_id=0, decoder_start_token_id=1,
    )  # fmt: skip
    WhisperForConditionalGeneration(config).save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder)
    return folder


def read(corpus, split, speaker, numbers, seconds):
    files = [corpus / "LibriSpeech" / split / speaker / "1" / f"{speaker}-1-{i}.wav" for i in numbers]
    return np.concatenate([soundfile.read(file, dtype="float32")[0] for file in files])[: round(seconds * RATE)]


def run(folder, corpus, tmp_path, words):
    given = ["--audio_dir", str(corpus), "--output_dir", str(tmp_path), *OPTIONS.split(), *words.split()]
    assert approximation.main([str(folder), *given]) == 0
    return json.loads((tmp_path / "out.json").read_text()), (tmp_path / "out.md").read_text()


def test_recordings_are_joined_cut_and_taken_in_turn(corpus):
    found = audio.recordings(str(corpus), "dev", 0.8, 3, RATE)
    expected = [("7", (0, 1)), ("8", (0, 1)), ("7", (2, 3))]
    for one, (speaker, numbers) in zip(found, expected, strict=True):
        assert len(one) == 0.8 * RATE
        np.testing.assert_array_equal(one, read(corpus, "dev", speaker, numbers, 0.8))
    with pytest.raises(ValueError, match=r"--samples must be at most 3: there are no more recordings of 0\.8 seconds"):
        audio.recordings(str(corpus), "dev", 0.8, 4, RATE)
    plain = audio.recordings(str(corpus / "LibriSpeech" / "dev" / "8" / "1"), None, 0.8, 1, RATE)
    np.testing.assert_array_equal(plain[0], read(corpus, "dev", "8", (0, 1), 0.8))


@torch.no_grad()
def test_errors_of_a_whisper(corpus, whisper_folder, tmp_path):
    """By the projections of each layer, SDPA and `favor_attention`; always the frames of a second."""
    words = "landmark:selected_keys=0 favor+ --seconds 0.8 --samples 2"
    found, text = run(whisper_folder, corpus, tmp_path, words)
    model = WhisperForConditionalGeneration.from_pretrained(whisper_folder).eval()
    extractor, encoder = WhisperFeatureExtractor.from_pretrained(whisper_folder), model.model.encoder
    projected, errors = {}, {"landmark": [], "favor+": []}
    for number, layer in enumerate(encoder.layers):
        for name in ("q_proj", "k_proj", "v_proj"):
            keep = lambda _, __, out, key=(number, name): projected.__setitem__(key, out)  # noqa: E731
            getattr(layer.self_attn, name).register_forward_hook(keep)
    for speaker in ("7", "8"):
        heard = read(corpus, "dev", speaker, (0, 1), 0.8)
        encoder(extractor(heard, sampling_rate=RATE, return_tensors="pt").input_features)
        for number in range(2):
            parts = [projected[number, f"{name}_proj"].view(1, 50, 2, 8).transpose(1, 2) for name in "qkv"]
            parts[0] *= 8**-0.5  # Whisper scales its queries itself
            exact = scaled_dot_product_attention(*parts, scale=1.0)
            for name, features in (("landmark", "landmark"), ("favor+", "pos")):
                layer = encoder.layers[number].self_attn.favor_layer.number
                options = {"num_features": 4, "selected_keys": 0, "layer": layer, "scale": 1.0}
                out = favor.favor_attention(*parts, features=features, **options)
                errors[name].append([float((out - exact)[0, h].norm() / exact[0, h].norm()) for h in range(2)])
    entries = {entry["backend"]: entry for entry in found["variants"]}
    for name, own in errors.items():
        expected = torch.tensor(own).view(2, 2, 2).mean(0)
        torch.testing.assert_close(torch.tensor(entries[name]["by_head"]), expected, rtol=1e-3, atol=1e-4)
        assert entries[name]["length"] == 50
        assert entries[name]["error"] == pytest.approx(float(expected.mean()), rel=1e-4)
    assert "2 recordings of 0.8 seconds of speech, dev of" in text
    assert "; 50 frames" in text
    assert str(corpus) not in text
    favor.configure(model, "landmark", only="model.encoder", num_features=4, selected_keys=0, exact_below=0)
    heard = [read(corpus, "dev", speaker, (0, 1), 0.8) for speaker in ("7", "8")]
    exact = WhisperForConditionalGeneration.from_pretrained(whisper_folder).eval()
    features = extractor(heard, sampling_rate=RATE, return_tensors="pt").input_features
    means = [each.model.encoder(features).last_hidden_state.mean(1) for each in (exact, model)]
    assert entries["landmark"]["score"] == pytest.approx(float(torch.cosine_similarity(*means).mean()), rel=1e-5)


def test_settings_of_each_layer(corpus, whisper_folder, tmp_path, monkeypatch):
    values = {"num_features": (4, 8), "selected_keys": (0, 16)}
    monkeypatch.setattr("favor.integrations.adapt.convert.VALUES", values)
    words = "landmark:selected_keys=0 --seconds 0.8 --samples 2 --flop_budgets 0.3 0.5 1 --choose_on train"
    found, text = run(whisper_folder, corpus, tmp_path, words)
    uniform, *chosen = [entry for entry in found["variants"] if entry["backend"] == "landmark"]
    assert [len(entry["chosen"]) for entry in chosen] == [2, 2, 2]
    assert uniform["error"] > chosen[0]["error"] > chosen[2]["error"] == 0
    assert chosen[2]["score"] == pytest.approx(1)
    assert uniform["chosen"] is None
    assert "| 0 | M = " in text
    assert "Settings chosen on: 2 recordings of train, 0.8 seconds" in text


def test_other_audio_models(corpus, tmp_path):
    """Favor's Conformer reads features and Wav2Vec2 samples; both in two lengths."""
    torch.manual_seed(0)
    save_model(tmp_path / "conformer")
    config = Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8),
        conv_stride=(40, 8), conv_kernel=(40, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, vocab_size=8, initializer_range=0.5,
    )  # fmt: skip
    Wav2Vec2ForCTC(config).save_pretrained(tmp_path / "wav2vec2")
    Wav2Vec2FeatureExtractor().save_pretrained(tmp_path / "wav2vec2")
    words = "landmark:selected_keys=1000 landmark:selected_keys=0 --seconds 0.8 0.4 --samples 2"
    lengths = {}
    for name in ("conformer", "wav2vec2"):
        found, _ = run(tmp_path / name, corpus, tmp_path, words)
        wide, bare = ([e for e in found["variants"] if e["more"] == [["selected_keys", each]]] for each in (1000, 0))
        assert [entry["error"] for entry in wide] == pytest.approx([0, 0], abs=1e-5)
        assert min(entry["error"] for entry in bare) > 1e-3
        assert bare[0]["length"] < bare[1]["length"]
        lengths[name] = bare[1]["length"]
    model = ConformerForCTC.from_pretrained(tmp_path / "conformer")
    extractor = AutoFeatureExtractor.from_pretrained(tmp_path / "conformer")
    frames = extractor(read(corpus, "dev", "7", (0, 1), 0.8), sampling_rate=RATE, return_tensors="pt").input_features
    assert model.base_model(frames).last_hidden_state.shape[1] == lengths["conformer"]


def test_models_and_lengths_that_are_refused(corpus, whisper_folder, bert_folder, tmp_path):
    for seconds, message in (("1.1", "--seconds must be at most 1,"), ("0.4 0.8", "makes 50 frames of recordings")):
        with pytest.raises(ValueError, match=message):
            run(whisper_folder, corpus, tmp_path, f"favor+ --seconds {seconds} --samples 1")
    with pytest.raises(ValueError, match=r"gives input_features or input_values; the input of Bert.* is input_ids"):
        audio.encoder_of(approximation.load_exact(str(bert_folder)))
