"""Saved models, whole, old, damaged or strange: what their loaders accept, and the line with which they refuse."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import sentencepiece
import torch
import transformers as hf
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from favor.eval import report
from favor.eval.approximation import __main__ as approximation
from favor.eval.language import needle, perplexity
from favor.eval.papers import feature_weights
from favor.models.conformer import ConformerConfig, ConformerFeatureExtractor
from favor.models.speech import ConformerProcessor, train_tokenizer
from favor.train import clm, distill, glue, mlm
from favor.train.common.pretrained import load_exact
from favor_command import check, convert
from favor_command.saved import check_known, load_model, load_processor, model_class

# Those of the tokenizer of `bert_folder`.
WORDS = ["good", "bad", "film", "plot", "the", "a", "was", "is", "not", "very", "dull", "fine", "actor", "scene"]
SENTENCE = "good film"
NO_MODELS_OF_BERT = ("pipeline", "AutoTokenizer", "models", "PreTrainedModel", "LlamaForCausalLM", "MyOwnBert", 3)
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def one_line(error: ValueError) -> str:
    message = str(error)
    assert "\n" not in message
    return message


def with_config(folder, config):
    config.save_pretrained(folder)
    return folder


def words_in_a_list(folder):
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    return with_config(folder, hf.BertConfig(**SIZES, vocab_size=19))


def bytes_and_merges(folder, config_class=hf.GPT2Config, **more):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    tokenizer.train_from_iterator([" ".join(WORDS)] * 9, trainer)
    folder.mkdir()
    tokenizer.model.save(str(folder))
    return with_config(folder, config_class(vocab_size=tokenizer.get_vocab_size(), **more))


def bytes_in_one_file(folder):
    bytes_and_merges(folder, hf.LlamaConfig)
    tokenizer = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


def pieces(folder):
    folder.mkdir()
    sentences = iter([" ".join(WORDS)] * 9)
    with (folder / "spiece.model").open("wb") as stream:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences, model_writer=stream, vocab_size=30, hard_vocab_limit=False, minloglevel=2
        )
    return with_config(folder, hf.T5Config(vocab_size=130))


def phonemes(folder):
    tokenizer = train_tokenizer([SENTENCE] * 9, "char")
    ConformerProcessor(ConformerFeatureExtractor(feature_size=16), tokenizer).save_pretrained(folder)
    return with_config(folder, ConformerConfig(vocab_size=len(tokenizer), num_mel_bins=16))


def heard_words(folder):
    more = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0}
    return bytes_and_merges(folder, hf.WhisperConfig, **more)


MAKERS = (words_in_a_list, bytes_and_merges, bytes_in_one_file, pieces, phonemes, heard_words)


@pytest.mark.parametrize("make", [None, *MAKERS])
def test_a_folder_without_a_file_reads_as_before_or_is_refused(make, bert_folder, tmp_path):
    """transformers makes tokenizers without words for most of these folders, and says nothing."""
    whole = bert_folder if make is None else make(tmp_path / "whole")
    kind = hf.AutoProcessor if make is phonemes else None

    def tokens(folder):
        found = load_processor(str(folder), kind)
        return getattr(found, "tokenizer", found)(SENTENCE)["input_ids"]

    expected = tokens(whole)
    assert len(set(expected)) > 1
    files = [path.name for path in whole.iterdir() if path.name not in ("config.json", "model.safetensors")]
    for number, missing in enumerate([*([name] for name in files), files]):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        for name in missing:
            (folder / name).unlink()
        if missing == ["tokenizer_config.json"]:
            assert tokens(folder) == expected
        else:
            with pytest.raises(ValueError, match=f"{folder} (holds no tokenizer|cannot be loaded)") as error:
                tokens(folder)
            one_line(error.value)


def test_a_tokenizer_of_bytes_needs_no_other_file(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    found = load_processor(str(with_config(tmp_path, hf.T5Config(vocab_size=384))))
    assert found.decode(found("é")["input_ids"], skip_special_tokens=True) == "é"


@pytest.mark.parametrize(
    ("vocab_size", "added", "message"),
    [
        (19, {"extra_special_tokens": {"image_token": "<image>"}}, None),  # no text contains it, as in Gemma 3
        (18, {}, "the token 'scene' has number 18, and vocab_size is 18"),
        (19, {"pad_token": "<pad>"}, "the token '<pad>' has number 19, and vocab_size is 19"),
        (38, {}, None),
        (39, {}, "it has 19 tokens, and vocab_size is 39"),
    ],
)
def test_a_tokenizer_must_fit_its_model(vocab_size, added, message, bert_folder, tmp_path):
    hf.BertTokenizer.from_pretrained(bert_folder, **added).save_pretrained(tmp_path)
    hf.BertConfig(**SIZES, vocab_size=vocab_size).save_pretrained(tmp_path)
    if message is None:
        assert len(load_processor(str(tmp_path))) == 19 + len(added)
        return
    with pytest.raises(ValueError, match=message) as error:
        load_processor(str(tmp_path))
    assert str(tmp_path) in one_line(error.value)


def test_texts_that_a_tokenizer_does_not_know_are_refused(bert_folder, tmp_path):
    tokenizer = load_processor(str(bert_folder))

    def rows(text):
        return tokenizer([text])["input_ids"]

    check_known(rows("good film zz"), tokenizer, "x")
    with pytest.raises(ValueError, match=r"50% of the tokens of x are \[UNK\]"):
        check_known(rows("good zz"), tokenizer, "x")
    check_known([], tokenizer, "x")
    whisper = load_processor(str(heard_words(tmp_path / "whisper")))
    check_known([[whisper.eos_token_id]], whisper, "x")  # its unknown token is the end of the text


@pytest.mark.parametrize(("name", "size"), [("n_fft", 10**6), ("feature_size", 1000), ("chunk_length", 10**5)])
def test_sizes_of_a_feature_extractor_of_transformers_are_bounded(name, size, tmp_path):
    """It would make filters of n_fft times feature_size, and pad each recording to its chunk_length in seconds."""
    hf.WhisperFeatureExtractor().save_pretrained(tmp_path)
    assert load_processor(str(tmp_path), hf.WhisperFeatureExtractor).n_fft == 400
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text()) | {name: size}
    for file, written in (("preprocessor_config", settings), ("processor_config", {"feature_extractor": settings})):
        (tmp_path / f"{file}.json").write_text(json.dumps(written))
        with pytest.raises(ValueError, match=rf"{file}.json: {name} must be at most \d+, got {size}"):
            load_processor(str(tmp_path), hf.WhisperFeatureExtractor)
        (tmp_path / f"{file}.json").unlink()


@pytest.mark.parametrize("name", NO_MODELS_OF_BERT)
def test_architectures_name_a_model_of_the_config(name, bert_folder, tmp_path):
    config = json.loads((bert_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    for load in (load_exact, lambda folder: check.main([folder]), lambda folder: convert.main([folder, f"{folder}/x"])):
        # Some releases of huggingface_hub refuse what is no text before.
        said = rf"{tmp_path} (holds a {name}, and there is no class to load it|cannot be used: .*'architectures')"
        with pytest.raises(ValueError, match=said) as error:
            load(str(tmp_path))
        one_line(error.value)


def test_a_config_without_architectures_names_the_model_without_a_head():
    assert model_class(hf.BertConfig(**SIZES)) is hf.BertModel
    # A class for the config of a part.
    assert model_class(hf.MllamaConfig(architectures=["MllamaForCausalLM"])).__name__ == "MllamaForCausalLM"
    assert model_class(ConformerConfig()).__name__ == "ConformerModel"


WEIGHTS, CONFIG = "model.safetensors", "config.json"
CHANGES = ({"hidden_size": "a"}, {"hidden_act": "x"}, {"vocab_size": 40}, {"id2label": 3}, {"model_type": "x"})


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        *(("tokenizer.json", text, "cannot be loaded, a file is missing or damaged") for text in (b"{", b"[]", b"{}")),
        *((CONFIG, text, r"config\.json is damaged") for text in (b"", b"[]", b"null", b"\xff{}", b"[" * 200_000)),
        *((WEIGHTS, text, "model.safetensors is damaged") for text in (b"", b"x" * 99)),
        (f"{WEIGHTS}.index.json", b'{"weight', "model.safetensors.index.json is damaged"),
        *((CONFIG, change, r"cannot be (used|loaded): \S") for change in CHANGES),
    ],
)
def test_what_is_damaged_is_named(file, content, message, bert_folder, tmp_path):
    shutil.copytree(bert_folder, tmp_path, dirs_exist_ok=True)
    if isinstance(content, dict):  # that fits no model or no weights
        content = json.dumps(json.loads((tmp_path / file).read_text()) | content).encode()
    if file.startswith(WEIGHTS):
        (tmp_path / WEIGHTS).unlink()
    (tmp_path / file).write_bytes(content)
    loaders = {"tokenizer.json": load_processor, CONFIG: load_exact}
    load = loaders.get(file, partial(load_model, hf.BertModel))
    with pytest.raises(ValueError, match=message) as error:
        load(str(tmp_path))
    assert str(tmp_path) in one_line(error.value)


TEXT, GLUE, OUT = "{text}", "{glue}", "{out}"
TRAINED = ["--train_file", TEXT, "--output_dir", OUT, "--max_length", "32"]
PROGRAMS = {
    "glue": (glue, ["--model_name_or_path", "--task_name", "sst2", "--data_dir", GLUE, "--output_dir", OUT]),
    "mlm": (mlm, ["--model_name_or_path", *TRAINED]),
    "clm": (clm, ["--model_name_or_path", *TRAINED]),
    "distill": (distill, ["--model_name_or_path", *TRAINED, "--num_features", "8"]),
    "report": (report, ["", "--text", TEXT, "--html", f"{OUT}/x.html"]),
    "approximation": (approximation, ["", "--text", TEXT, "--output_dir", OUT]),
    "feature_weights": (feature_weights, ["", "--text", TEXT, "--held_out", TEXT, "--output_dir", OUT]),
    "perplexity": (perplexity, ["", "--texts", TEXT, "--output_dir", OUT]),
    "needle": (needle, ["", "--text", TEXT, "--output_dir", OUT]),
    "check": (check, [""]),
    "convert": (convert, ["", OUT]),
}
HARMS = {
    "tokenizer": ("tokenizer*", r"holds no tokenizer|the tokenizer of .* cannot be loaded"),
    "weights": (WEIGHTS, r"model\.safetensors is damaged"),
    "config": ("config.json", r"config\.json is damaged"),
}
NOT_READ = [("check", "tokenizer"), ("check", "weights"), ("convert", "tokenizer")]


def call(name, folder, **places):
    program, words = PROGRAMS[name]
    given = [word.format(**places) for word in words]
    given[1 if words[0].startswith("--") else 0 : 1] = [str(folder)]
    program.main(given)


@pytest.mark.parametrize(
    ("name", "harm"), [(name, harm) for name in PROGRAMS for harm in HARMS if (name, harm) not in NOT_READ]
)
def test_every_program_refuses_a_folder_that_is_not_whole(
    name, harm, bert_folder, decoder_folder, text, glue_folder, tmp_path
):
    folder, (files, message) = tmp_path / "model", HARMS[harm]
    shutil.copytree(decoder_folder if name in ("clm", "perplexity", "needle") else bert_folder, folder)
    for file in folder.glob(files):
        cut = file.read_bytes()[:-100]
        file.unlink()
        if harm != "tokenizer":
            file.write_bytes(cut)
    with pytest.raises(ValueError, match=message) as error:
        call(name, folder, text=text, glue=glue_folder, out=tmp_path / "out")
    assert str(folder) in one_line(error.value)
    assert not list((tmp_path / "out").glob("*token*"))


@pytest.mark.parametrize("name", ["glue", "mlm", "report", "perplexity", "needle"])
def test_programs_refuse_texts_that_the_tokenizer_does_not_know(name, bert_folder, decoder_folder, tmp_path):
    """Such a model learns, and is measured, on [UNK]."""
    text = tmp_path / "text.txt"
    text.write_text("Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich\n" * 99)
    (tmp_path / "SST-2").mkdir()
    for split in ("train", "dev"):
        (tmp_path / "SST-2" / f"{split}.tsv").write_text("sentence\tlabel\nzwölf jagen viktor\t1\n quer über\t0\n")
    folder = decoder_folder if name in ("perplexity", "needle") else bert_folder
    with pytest.raises(ValueError, match=r"\d+% of the tokens of .* are \[UNK\]"):
        call(name, folder, text=text, glue=tmp_path, out=tmp_path / "out")


def test_the_line_of_convert_loads_models_of_the_zoo(bert_folder, tmp_path, capsys):
    own = load_exact(str(bert_folder), performer=True)
    own.save_pretrained(tmp_path / "model")
    convert.main([str(tmp_path / "model"), str(tmp_path / "out")])
    lines = capsys.readouterr().out.partition("load it: ")[2]
    space: dict = {}
    exec(lines.replace("\n         ", "\nmodel = "), space)
    assert type(space["model"]) is type(own)


OLD = Path(__file__).parent / "checkpoints"
# Of version 0.1.0, made by tests/checkpoints/make.py of commit 672be68.
# Folder: how it is loaded, and the backend, where the checkpoint does not know it.
FOLDERS = {
    "bert_batch": (hf.AutoModel, "favor++"),
    **{f"bert_{kind}": (hf.AutoModel, "favor#") for kind in ("batch_window", "converted")},
    **{f"bert_{kind}{end}": (hf.AutoModel, "favor#") for kind in ("calibrated", "landmark") for end in ("", "_window")},
    "bert_weights": (hf.AutoModel, "favor+"),
    "llama_calibrated": (hf.AutoModelForCausalLM, "favor#"),
    "performer_bert": (hf.AutoModelForSequenceClassification, None),
    "conformer_stream": (hf.AutoModelForCTC, None),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_checkpoint_of_the_first_version_gives_what_it_gave_and_is_written_as_it_was(name, tmp_path):
    assert {path.name for path in OLD.iterdir() if (path / "config.json").exists()} == set(FOLDERS)
    auto, backend = FOLDERS[name]
    options = {} if backend is None else {"attn_implementation": backend}
    model, info = auto.from_pretrained(OLD / name, output_loading_info=True, **options)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    model.eval().save_pretrained(tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (OLD / name, tmp_path))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    expected, inputs = (load_file(OLD / name / f"{part}.safetensors") for part in ("outputs", "inputs"))
    with torch.no_grad():
        found = {"0": model(**inputs)[0]}
        if "pieces" in expected:
            stream = model.stream(batch_size=2)
            pieces = inputs["input_features"].split([33, 47], dim=1)
            found["pieces"] = torch.cat([stream.feed_features(piece) for piece in pieces], dim=1)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        # Bit for bit on the processor that wrote them; others round otherwise.
        torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-5)
