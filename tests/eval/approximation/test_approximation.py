"""The report on approximation errors: numbers computed again from their definition, for texts and for audio."""

import math

import numpy as np
import pytest
import soundfile
import torch
import transformers as hf
from tiny_speech import RATE, save_model, sound
from torch.nn.functional import scaled_dot_product_attention

import favor
from favor.eval.approximation import __main__ as approximation
from favor.eval.approximation import audio
from favor.eval.approximation import model as approximation_model
from favor.eval.approximation.variants import (
    LOCAL,
    MEAN,
    HeadErrors,
    Variant,
    mean_of_values,
    variants_of,
    window_alone,
)
from favor.integrations.adapt.observe import Observation
from favor.integrations.stored import update_choices
from favor.models.conformer import ConformerForCTC


def seen(length=12, is_causal=False, padding=None, groups=2):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 2 * groups, length, 4, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(2, 2, length, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.ones(length, length, dtype=torch.bool)
    mask = mask.tril() if is_causal else mask
    mask = mask[None, None] if padding is None else mask & padding[:, None, None]
    out = scaled_dot_product_attention(query, key, value, mask, scale=0.6, enable_gqa=True)
    module = torch.nn.Module()  # not a decoder's
    module.config = None
    return Observation(0, module, query, key, value, padding, is_causal, 0.6, out)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_baselines_are_their_definition(is_causal, padded):
    padding = torch.ones(2, 12, dtype=torch.bool)
    padding[1, 9:] = False
    o = seen(is_causal=is_causal, padding=padding if padded else None)
    mean, local = mean_of_values(o), window_alone(o, 5)
    for b in range(2):
        for h in range(4):
            for i in range(12 - 3 * padded * b):
                keys = [j for j in range(12) if not (padded and not padding[b, j]) and not (is_causal and j > i)]
                values = o.value[b, h // 2]
                torch.testing.assert_close(mean[b, h, i], values[keys].mean(0))
                near = [j for j in keys if j // 5 == i // 5]
                weights = (0.6 * o.key[b, h // 2, near] @ o.query[b, h, i]).softmax(0)
                torch.testing.assert_close(local[b, h, i], weights @ values[near])


def test_perplexity_of_a_decoder(decoder_folder):
    model = hf.LlamaForCausalLM.from_pretrained(decoder_folder).eval()
    ids = torch.randint(0, 24, (3, 16))
    assert approximation_model.measure_of(model) == "perplexity"
    losses = approximation_model.outputs(model, ids, None, 0)
    with torch.no_grad():
        log_p = model(ids).logits[:, :-1].log_softmax(-1)
    expected = -log_p.gather(2, ids[:, 1:, None]).mean()
    assert approximation_model.score("perplexity", losses, losses) == pytest.approx(math.exp(expected), rel=1e-5)
    switched = approximation_model.switch(model, Variant("favor+", None, 4, 16), 0)
    torch.testing.assert_close(approximation_model.outputs(switched, ids, None, 0), losses, rtol=1e-5, atol=1e-5)


def test_errors_on_a_sample_of_the_queries():
    """As on all queries, of the rows that were drawn, one of each equal stretch; zero where a window covers all."""
    o = seen(length=60)
    variants = [Variant(MEAN, None, 0, 0), Variant(LOCAL, None, 0, 7), Variant("favor+", None, 8, 0)]
    errors = HeadErrors([*variants, Variant("favor#", "wderf", 8, 60)], seed=3, query_samples=12)
    errors(o)
    assert max(row.max() for row in errors.errors[errors.variants[3]][0]) < 1e-6
    places = errors._places(60, o.query.device)
    assert (places // 5).tolist() == list(range(12))
    assert len(set((places % 5).tolist())) > 1
    whole = favor.favor_attention(o.query, o.key, o.value, features="pos", num_features=8, scale=0.6, seed=3)
    for variant, out in zip(variants, (mean_of_values(o), window_alone(o, 7), whole), strict=True):
        difference = (out - o.output)[:, :, places].flatten(2).norm(dim=-1)
        expected = difference / o.output[:, :, places].flatten(2).norm(dim=-1)
        torch.testing.assert_close(torch.stack(errors.errors[variant][0]), expected)


@pytest.mark.parametrize(("model_class", "first"), [(hf.BertModel, 0), (hf.RobertaModel, 3)])
def test_repeated_positions_are_those_of_a_model_with_a_longer_table(model_class, first):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"vocab_size": 20, "pad_token_id": max(first - 1, 0)}
    configs = (model_class.config_class(**sizes, max_position_embeddings=first + number) for number in (8, 24))
    small, large = (model_class(config).eval() for config in configs)
    weights = small.state_dict()
    name = "embeddings.position_embeddings.weight"
    weights[name] = torch.cat([weights[name][:first], weights[name][first:].repeat(3, 1)])
    large.load_state_dict(weights)
    ids = torch.randint(5, 20, (2, 21))
    expected = approximation_model.outputs(large, ids, None, 0)
    assert approximation_model.placement(large, 21, None) == {}
    torch.testing.assert_close(approximation_model.outputs(small, ids, None, 0), expected)
    with pytest.raises(ValueError, match="at most the model's 8 positions, got 9"):
        approximation_model.placement(small, 21, 9)


@pytest.mark.parametrize("backend", [None, "landmark"])
def test_repeated_positions_of_a_decoder_are_no_packed_sequences(decoder_folder, backend):
    """The last token still sees the first one, many periods ago."""
    model = hf.LlamaForCausalLM.from_pretrained(decoder_folder, max_position_embeddings=8).eval()
    if backend is not None:
        favor.configure(model, backend, exact_below=0)
    ids = torch.randint(0, 24, (1, 30))
    places = approximation_model.placement(model, 30, None)
    assert places["position_ids"][0].tolist() == [i % 8 for i in range(30)]
    other = torch.cat([(ids[:, :1] + 1) % 24, ids[:, 1:]], 1)
    with torch.no_grad():
        last = [model(input_ids=x, use_cache=False, **places).logits[0, -1] for x in (ids, other)]
    assert (last[0] - last[1]).abs().max() > 1e-4


def test_backends_with_options_of_their_own():
    texts = ["favor+:num_features=32,window=4", "favor#:sderf:factorization=newton_schulz", "favor+:orthogonal=False"]
    found = [v for v in variants_of(texts, [8, 16], [0]) if v.is_backend]
    sharp = [Variant("favor#", "sderf", M, 0, more=(("factorization", "newton_schulz"),)) for M in (8, 16)]
    plain = [Variant("favor+", None, M, 0, more=(("orthogonal", False),)) for M in (8, 16)]
    assert found == [Variant("favor+", None, 32, 4), *sharp, *plain]
    assert found[-1].label == "favor+:orthogonal=False"
    assert found[-1].options(0)["orthogonal"] is False
    o = seen()
    out = HeadErrors(found, seed=3).output(found[-1], o, torch.arange(12))
    options = {"features": "pos", "num_features": 16, "scale": 0.6, "seed": 3}
    torch.testing.assert_close(out, favor.favor_attention(o.query, o.key, o.value, orthogonal=False, **options))
    different = favor.favor_attention(o.query, o.key, o.value, **options)
    assert (out - different).abs().max() > 1e-3
    HeadErrors(found, seed=3)(o)  # every option reaches the estimator


def test_landmarks_have_selected_keys_and_no_window():
    """They are softmax attention with as many selected keys as keys, and not with fewer."""
    found = [v for v in variants_of(["landmark"], [3], [0, 4], [6, 12]) if v.is_backend]
    assert found == [Variant("landmark", None, 3, 0, more=(("selected_keys", number),)) for number in (6, 12)]
    o, errors = seen(), HeadErrors(found)
    errors(o)
    means = [torch.stack(errors.errors[variant][0]).mean() for variant in found]
    assert means[1] < 1e-6 < 1e-2 < means[0]


def test_no_option_is_left_of_the_variant_before(bert_folder):
    model = hf.BertModel.from_pretrained(bert_folder)
    for variant in variants_of(["favor+:orthogonal=False", "favor+"], [8], [4])[-2:]:
        approximation_model.switch(model, variant, 0)
        assert model.config.favor["orthogonal"] is (not variant.more)
    assert (model.config.favor["num_features"], model.config.favor["window"]) == (8, 4)


def test_settings_that_each_layer_chose(bert_folder, text, tmp_path, monkeypatch, ran):
    """With all operations every layer is exact."""
    monkeypatch.setattr("favor.integrations.adapt.convert.VALUES", {"num_features": (2,), "selected_keys": (0,)})
    converted = favor.convert(hf.BertModel.from_pretrained(bert_folder), "landmark", num_features=5, selected_keys=0)
    number = converted.encoder.layer[0].attention.self.favor_layer.number
    update_choices(converted, {number: {"num_features": 24}})
    converted.save_pretrained(tmp_path / "converted")
    words = f"--text {text} --lengths 24 --samples 2 --num_features 8 --windows 0 --backends landmark"
    words += f" --adapted {tmp_path / 'converted'} --flop_budgets 0.2 1 --choose_on {text}"
    _, default, stored, cheap, exact = ran(approximation, bert_folder, *words.split(), code=0)[0]["variants"]
    assert (stored["label"], stored["num_features"]) == ("landmark (converted)", 0)
    assert max(stored["by_head"][0]) < 1e-5 < 1e-3 < min(stored["by_head"][1])
    assert cheap["chosen"] == [{"num_features": 2, "selected_keys": 0}] * 2
    assert cheap["error"] > exact["error"] == 0
    assert exact["score"] == pytest.approx(1, abs=1e-6)
    # The default of `landmark` selects keys, more than these samples have, for single heads as for the whole model.
    assert default["error"] < 1e-5
    assert default["score"] == pytest.approx(1, abs=1e-6)


def test_report_of_an_encoder_by_length(bert_folder, glue_folder, text, ran):
    """Also beyond the 128 positions of the model."""
    words = f"--text {text} --lengths 200 24 --samples 2 --num_features 8 --windows 0 24 --query_samples 50"
    words += f" --glue_dir {glue_folder} --backends favor+ favor#:wderf landmark:selected_keys=30"
    found, lines = ran(approximation, bert_folder, *words.split(), code=0)
    assert found["facts"]["positions"] == "repeat every 128 tokens in longer samples"
    by_window = {(v["backend"], v["window"], v["length"]): v for v in found["variants"]}
    assert len(by_window) == len(found["variants"]) == 7 * 2
    whole, bare = by_window["favor#", 24, 24], by_window["favor+", 0, 24]
    assert whole["error"] < 1e-5 < 0.05 < bare["error"]
    assert whole["score"] == pytest.approx(1.0, abs=1e-6)
    assert bare["score"] < 1
    assert by_window[LOCAL, 24, 24]["error"] < 1e-5
    assert by_window[MEAN, 0, 24]["score"] is whole["sts"] is None
    assert -1 <= bare["sts"] <= 1
    by_name = {(v["backend"], v["length"]): v for v in found["variants"] if not v["window"]}
    for entry in found["variants"]:
        heads = np.array(entry["by_head"])
        expected = [heads.mean(), np.quantile(heads, 0.5), np.quantile(heads, 0.9), heads.max()]
        assert [entry[name] for name in ("error", "p50", "p90", "max")] == pytest.approx(expected, abs=1e-4)
    assert by_name["landmark", 24]["error"] < 1e-5 < by_name["landmark", 200]["error"]
    assert by_name["landmark", 200]["error"] < by_name["favor+", 200]["error"]
    assert by_name["landmark", 24]["score"] == pytest.approx(1.0, abs=1e-6)
    lines = lines.splitlines()
    assert "| mean error (p90) | M | window | L = 24 | L = 200 |" in lines
    name = "| `landmark:selected_keys=30` | 8 | -"
    assert any(line.startswith(f"{name} | 0.000 (0.000) | 0.") for line in lines)
    assert any(line.startswith(f"{name} | 24 | 0.000 | 0.000 | 0.000 | 0.000 | 100% |") for line in lines)
    assert any(line.startswith("| `favor#:wderf` | 8 | 24 | 24 | 0.000 |") for line in lines)


LENGTHS = {"7": (0.4, 0.5, 0.3, 0.6), "8": (0.2, 0.9)}
OPTIONS = "--split dev --num_features 4 --windows 0 --query_samples 1000 --backends"


@pytest.fixture(scope="module")
def speakers(tmp_path_factory):
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
    sizes = {"encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 30, "init_std": 0.4}
    sizes |= {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 1}
    config = hf.WhisperConfig(**sizes, num_mel_bins=8, max_source_positions=50)
    hf.WhisperForConditionalGeneration(config).save_pretrained(folder)
    hf.WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder)
    return folder


def read(speakers, split, speaker, numbers, seconds):
    files = [speakers / "LibriSpeech" / split / speaker / "1" / f"{speaker}-1-{i}.wav" for i in numbers]
    return np.concatenate([soundfile.read(file, dtype="float32")[0] for file in files])[: round(seconds * RATE)]


@pytest.fixture
def heard(speakers, ran):
    """Gives a function that measures a model on the recordings; it returns the JSON and the Markdown."""

    def call(folder, words):
        return ran(approximation, folder, "--audio_dir", speakers, *OPTIONS.split(), *words.split(), code=0)

    return call


def test_recordings_are_joined_cut_and_taken_in_turn(speakers):
    found = audio.recordings(str(speakers), "dev", 0.8, 3, RATE)
    expected = [("7", (0, 1)), ("8", (0, 1)), ("7", (2, 3))]
    for one, (speaker, numbers) in zip(found, expected, strict=True):
        assert len(one) == 0.8 * RATE
        np.testing.assert_array_equal(one, read(speakers, "dev", speaker, numbers, 0.8))
    with pytest.raises(ValueError, match=r"--samples must be at most 3: there are no more recordings of 0\.8 seconds"):
        audio.recordings(str(speakers), "dev", 0.8, 4, RATE)
    plain = audio.recordings(str(speakers / "LibriSpeech" / "dev" / "8" / "1"), None, 0.8, 1, RATE)
    np.testing.assert_array_equal(plain[0], read(speakers, "dev", "8", (0, 1), 0.8))


@torch.no_grad()
def test_errors_of_a_whisper(speakers, whisper_folder, heard):
    """By the projections of each layer, SDPA and `favor_attention`; always the frames of a second."""
    words = "landmark:selected_keys=0 favor+ --seconds 0.8 --samples 2"
    found, text = heard(whisper_folder, words)
    model = hf.WhisperForConditionalGeneration.from_pretrained(whisper_folder).eval()
    extractor, encoder = hf.WhisperFeatureExtractor.from_pretrained(whisper_folder), model.model.encoder
    projected, errors = {}, {"landmark": [], "favor+": []}
    for number, layer in enumerate(encoder.layers):
        for name in ("q_proj", "k_proj", "v_proj"):
            keep = lambda _, __, out, key=(number, name): projected.__setitem__(key, out)  # noqa: E731
            getattr(layer.self_attn, name).register_forward_hook(keep)
    for speaker in ("7", "8"):
        samples = read(speakers, "dev", speaker, (0, 1), 0.8)
        encoder(extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features)
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
    assert str(speakers) not in text
    favor.configure(model, "landmark", only="model.encoder", num_features=4, selected_keys=0, exact_below=0)
    samples = [read(speakers, "dev", speaker, (0, 1), 0.8) for speaker in ("7", "8")]
    exact = hf.WhisperForConditionalGeneration.from_pretrained(whisper_folder).eval()
    features = extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
    means = [each.model.encoder(features).last_hidden_state.mean(1) for each in (exact, model)]
    assert entries["landmark"]["score"] == pytest.approx(float(torch.cosine_similarity(*means).mean()), rel=1e-5)


def test_settings_of_each_layer(whisper_folder, heard, monkeypatch):
    values = {"num_features": (4, 8), "selected_keys": (0, 16)}
    monkeypatch.setattr("favor.integrations.adapt.convert.VALUES", values)
    words = "landmark:selected_keys=0 --seconds 0.8 --samples 2 --flop_budgets 0.3 0.5 1 --choose_on train"
    found, text = heard(whisper_folder, words)
    uniform, *chosen = [entry for entry in found["variants"] if entry["backend"] == "landmark"]
    assert [len(entry["chosen"]) for entry in chosen] == [2, 2, 2]
    assert uniform["error"] > chosen[0]["error"] > chosen[2]["error"] == 0
    assert chosen[2]["score"] == pytest.approx(1)
    assert uniform["chosen"] is None
    assert "| 0 | M = " in text
    assert "Settings chosen on: 2 recordings of train, 0.8 seconds" in text


def test_other_audio_models(speakers, heard, tmp_path):
    """Favor's Conformer reads features and Wav2Vec2 samples; both in two lengths."""
    torch.manual_seed(0)
    save_model(tmp_path / "conformer")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    sizes |= {"conv_dim": (8, 8), "conv_stride": (40, 8), "conv_kernel": (40, 8), "num_feat_extract_layers": 2}
    sizes |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": 8}
    config = hf.Wav2Vec2Config(**sizes, initializer_range=0.5)
    hf.Wav2Vec2ForCTC(config).save_pretrained(tmp_path / "wav2vec2")
    hf.Wav2Vec2FeatureExtractor().save_pretrained(tmp_path / "wav2vec2")
    words = "landmark:selected_keys=1000 landmark:selected_keys=0 --seconds 0.8 0.4 --samples 2"
    lengths = {}
    for name in ("conformer", "wav2vec2"):
        found, _ = heard(tmp_path / name, words)
        wide, bare = ([e for e in found["variants"] if e["more"] == [["selected_keys", each]]] for each in (1000, 0))
        assert [entry["error"] for entry in wide] == pytest.approx([0, 0], abs=1e-5)
        assert min(entry["error"] for entry in bare) > 1e-3
        assert bare[0]["length"] < bare[1]["length"]
        lengths[name] = bare[1]["length"]
    model = ConformerForCTC.from_pretrained(tmp_path / "conformer")
    extractor = hf.AutoFeatureExtractor.from_pretrained(tmp_path / "conformer")
    frames = extractor(read(speakers, "dev", "7", (0, 1), 0.8), sampling_rate=RATE, return_tensors="pt").input_features
    assert model.base_model(frames).last_hidden_state.shape[1] == lengths["conformer"]


def test_models_and_lengths_that_are_refused(whisper_folder, bert_folder, heard):
    for seconds, message in (("1.1", "--seconds must be at most 1,"), ("0.4 0.8", "makes 50 frames of recordings")):
        with pytest.raises(ValueError, match=message):
            heard(whisper_folder, f"favor+ --seconds {seconds} --samples 1")
    with pytest.raises(ValueError, match=r"gives input_features or input_values; the input of Bert.* is input_ids"):
        audio.encoder_of(approximation.load_exact(str(bert_folder)))
