"""Models with every kind of head, where any model is taken: programs run, or refuse in one line."""

import json

import pytest
import torch
import transformers as hf
from architectures import BY_NAME, tokens
from transformers import AutoTokenizer

import favor
from favor.eval import report
from favor.eval.approximation import __main__ as approximation
from favor.eval.approximation import model as whole
from favor.eval.language import perplexity
from favor.models import bert, conformer
from favor_command import check, convert
from favor_command.saved import load_model, model_class, read_config

WORDS = 19  # of the tokenizer
TEXT = {
    "bert": (
        *("PreTraining", "MaskedLM", "NextSentencePrediction", "SequenceClassification", "MultipleChoice"),
        *("TokenClassification", "QuestionAnswering"),
    ),
    "bart": ("ConditionalGeneration", "SequenceClassification", "QuestionAnswering", "CausalLM"),
    "gpt2": ("SequenceClassification", "TokenClassification"),
    "llama": ("CausalLM", "SequenceClassification"),
}


def named(name, kind):
    """The class of a head: `kind` follows the name of the model without a head."""
    return getattr(hf, BY_NAME[name].model.__name__.removesuffix("Model") + f"For{kind}")


SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}


def performer_bert():
    return bert.PerformerBertConfig(**SIZES)


def small_conformer():
    return conformer.ConformerConfig(**SIZES, num_mel_bins=16, subsampling_conv_channels=8)


def t5():
    return hf.T5Config(d_model=16, num_layers=1, num_heads=2, d_kv=8, d_ff=16, decoder_start_token_id=0)


def deberta():
    return hf.DebertaV2Config(**SIZES)


READ = [
    *((BY_NAME[name].config, named(name, kind)) for name, kinds in TEXT.items() for kind in kinds),
    (BY_NAME["gpt2"].config, hf.GPT2DoubleHeadsModel),
    (performer_bert, bert.PerformerBertForSequenceClassification),
    (performer_bert, bert.PerformerBertForMaskedLM),
]
OTHERS = [
    (t5, hf.T5ForConditionalGeneration, "cannot be measured"),
    (deberta, hf.DebertaV2Model, "never asks transformers for a backend|does not support"),
    (BY_NAME["vit"].config, hf.ViTForImageClassification, "reads text, .* whose input is pixel_values"),
    (BY_NAME["whisper-encoder"].config, hf.WhisperForAudioClassification, "reads text, .* is input_features"),
    (BY_NAME["wav2vec2-conformer"].config, hf.Wav2Vec2ConformerForCTC, "reads text, .* whose input is input_values"),
    (small_conformer, conformer.ConformerForTransducer, "reads text, .* whose input is input_features"),
]


@pytest.fixture
def saved(bert_folder, tmp_path):
    """Saves a tiny model of a class, with a tokenizer, whether it reads words or not."""

    def save(config, kind):
        config = config()
        config.vocab_size = WORDS
        torch.manual_seed(0)
        kind(config).save_pretrained(tmp_path / "model")
        AutoTokenizer.from_pretrained(bert_folder).save_pretrained(tmp_path / "model")
        return str(tmp_path / "model")

    return save


def ids_of(classes):
    return [own[1].__name__ for own in classes]


def report_of(folder, text, tmp_path):
    words = "--lengths 24 --seconds_per_cell 0.001 --num_features 8 --windows 0 --selected_keys 0 --backends landmark"
    words = [*words.split(), "--text", str(text), "--html", str(tmp_path / "x.html")]
    assert report.main([folder, *words]) == 0
    return json.loads((tmp_path / "x.html").read_text().partition('type="application/json">')[2].partition("<")[0])


@pytest.mark.parametrize(("config", "kind"), READ, ids=ids_of(READ))
def test_models_that_read_are_reported_calibrated_checked_and_converted(config, kind, saved, text, tmp_path):
    folder = saved(config, kind)
    found = report_of(folder, text, tmp_path)
    (own,) = found["settings"]
    model = load_model(kind, folder)
    assert 0 < len(own["errors"]) <= len(favor.describe(model, 64).layers)
    scores = {"BertForMaskedLM": "masked-LM loss", "PerformerBertForMaskedLM": "masked-LM loss"}
    scores |= {"LlamaForCausalLM": "perplexity", "BartForCausalLM": "perplexity"}
    assert found["measure"].startswith(scores.get(kind.__name__, "cosine"))
    body = tokens(False)["input_ids"] % WORDS
    # Tensors of tokens are for the part below the head, which may want choices or an end of the text.
    favor.calibrate(model, [body], num_features=8, exact_below=0)
    assert {layer.parameters for layer in favor.describe(model, 64).layers} & {"calibrated"}
    assert check.main([folder]) == 0
    assert convert.main([folder, str(tmp_path / "out"), "--attn_implementation", "landmark"]) == 0
    assert model_class(read_config(str(tmp_path / "out"))) is kind


@pytest.mark.parametrize(("config", "kind", "message"), OTHERS, ids=ids_of(OTHERS))
def test_models_that_do_not_read_are_refused_before_anything_is_measured(
    config, kind, message, saved, text, tmp_path, monkeypatch
):
    monkeypatch.setattr("favor.eval.approximation.variants.HeadErrors.__call__", None)
    folder = saved(config, kind)
    for measure in (report_of, lambda *given: approximation.main([folder, "--text", str(text), "--lengths", "24"])):
        with pytest.raises(ValueError, match=message) as error:
            measure(folder, text, tmp_path)
        assert "\n" not in str(error.value)
    linear = config is not deberta
    assert check.main([folder]) == (not linear)
    if linear:
        assert convert.main([folder, str(tmp_path / "out")]) == 0
        assert model_class(read_config(str(tmp_path / "out"))) is kind
    else:
        with pytest.raises(ValueError, match=r"never asks transformers for a backend"):
            convert.main([folder, str(tmp_path / "out")])


def test_a_masked_language_model_needs_a_mask_token(bert_folder):
    model = hf.BertForMaskedLM.from_pretrained(bert_folder)
    with pytest.raises(ValueError, match="BertForMaskedLM predicts masked words, and its tokenizer has no mask token"):
        whole.outputs(model, torch.ones(1, 8, dtype=torch.long), None, 0)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("bert", "SequenceClassification", "holds no causal language model: it has no cls"),
        ("bert", "MaskedLM", "has layers that see later tokens"),
        ("llama", "SequenceClassification", r"holds no causal language model: it has no lm_head\.weight"),
        ("distilbert", "MaskedLM", "holds a distilbert, which AutoModelForCausalLM does not load"),
        ("bart", "CausalLM", None),
        ("gpt2", "SequenceClassification", None),  # its output layer is its embeddings
    ],
)
def test_perplexity_is_of_causal_language_models(name, kind, message, saved, text, tmp_path):
    """A new output layer with random weights would be measured, or a model that copies the tokens."""
    folder = saved(BY_NAME[name].config, named(name, kind))
    words = [folder, "--texts", str(text), "--lengths", "24", "--samples", "1", "--output_dir", str(tmp_path)]
    if message is None:
        assert perplexity.main(words) == 0
        return
    with pytest.raises(ValueError, match=message) as error:
        perplexity.main(words)
    assert "\n" not in str(error.value)
