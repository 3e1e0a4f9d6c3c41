"""`favor.configure` on whole models and on parts, and `favor.describe`."""

import threading

import pytest
import torch
import transformers as hf
from architectures import ARCHITECTURES, BERT, BY_NAME, tokens, whisper_features
from pairwise import pairs

import favor
from favor.integrations.layer import FirstPass

SMALL = {"num_features": 4, "exact_below": 0}


def whisper():
    torch.manual_seed(0)
    decoder = {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 16}
    config = hf.WhisperConfig(**BY_NAME["whisper-encoder"].config().to_dict() | decoder)
    return hf.WhisperForConditionalGeneration(config).eval()


def runs(model):
    return {layer.layer.removeprefix("model."): layer.runs for layer in favor.describe(model).layers}


ENCODER = {f"encoder.layers.{i}.self_attn" for i in range(2)}


@pytest.mark.parametrize("how", ["only", "only with prefix", "part"])
def test_a_part_that_shares_its_config_is_switched_alone(how, tmp_path):
    model = whisper()
    if how == "part":
        favor.configure(model.model.encoder, "landmark", **SMALL, selected_keys=0)
    else:
        options = {**SMALL, "selected_keys": 0}
        favor.configure(model, "landmark", only="encoder" if how == "only" else "model.encoder", **options)
    assert {name for name, what in runs(model).items() if what == "landmark"} == ENCODER
    # The encoder changes, and the decoder over the same encoder output does not.
    exact, frames = whisper(), whisper_features(False)["input_features"]
    ids = tokens(False)["input_ids"][:, :5]
    states = model.model.encoder(frames).last_hidden_state
    assert (states - exact.model.encoder(frames).last_hidden_state).abs().max() > 1e-5
    outs = [m.model.decoder(ids, encoder_hidden_states=states).last_hidden_state for m in (model, exact)]
    torch.testing.assert_close(*outs)
    model.save_pretrained(tmp_path)
    again = hf.WhisperForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert favor.describe(again) == favor.describe(model)
    logits = [m(frames, decoder_input_ids=ids).logits for m in (model, again)]
    assert torch.equal(*logits)


def test_parts_have_options_of_their_own_and_come_back_one_by_one():
    model = whisper()
    favor.configure(model.model.encoder, "landmark", **SMALL)
    favor.configure(model.model.decoder, "favor+", num_features=8, exact_below=0)
    assert model.config.favor_parts["encoder"]["num_features"] == 4
    assert set(runs(model).values()) == {"landmark", "pos"}
    favor.configure(model, only="encoder", num_features=6)
    assert [model.config.favor_parts[part]["num_features"] for part in ("encoder", "decoder")] == [6, 8]
    favor.configure(model, seed=2)
    assert [model.config.favor_parts[part]["seed"] for part in ("encoder", "decoder")] == [2, 2]
    favor.configure(model, "sdpa", only="encoder")
    assert {name for name, what in runs(model).items() if what == "exact"} == ENCODER
    favor.configure(model.model.decoder, "sdpa")
    assert model.config._attn_implementation == "sdpa"
    favor.configure(model, "landmark")
    assert "landmark" in runs(model).values()
    assert not model.config.favor_parts
    favor.configure(model, "favor+", num_features=8, exact_below=0)
    favor.configure(model, "landmark", only="encoder", **SMALL)
    assert {name for name, what in runs(model).items() if what == "landmark"} == ENCODER
    assert set(runs(model).values()) == {"landmark", "pos"}


def test_names_of_parts_and_of_features():
    with pytest.raises(ValueError, match="such as one in decoder, encoder; got 'encode'"):
        favor.configure(whisper(), "landmark", only="encode")
    with pytest.raises(ValueError, match="a part takes one backend by name"):
        favor.configure(whisper(), {"": "landmark"}, only="encoder")
    model = favor.configure(hf.BertForMaskedLM(BERT.config()), "landmark", only="bert")
    assert set(runs(model).values()) <= {"landmark", "exact"}
    query = torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    for backend, family in (("favor#", "wderf"), ("favor+", "pos"), ("landmark", "landmark")):
        named = favor.favor_attention(query, query, query, features=backend, num_features=4)
        assert torch.equal(named, favor.favor_attention(query, query, query, features=family, num_features=4))
    with pytest.raises(ValueError, match=r"got 'SDERF'. Did you mean 'sderf'\?"):
        favor.favor_attention(query, query, query, features="SDERF")


def test_what_is_no_model_is_refused():
    for wrong in (torch.nn.Linear(2, 2), "bert-base-uncased"):
        for function in (favor.configure, favor.describe):
            with pytest.raises(TypeError, match=f"takes a model of transformers, got {type(wrong).__name__}"):
                function(wrong)


UNREAD = [
    ("favor+", {"features": "sderf"}),
    ("favor#", {"factorization": "newton_schulz"}),
    ("favor#", {"features": "sderf", "factorization": "svd"}),
    ("favor_relu", {"statistics": "calibrated"}),
    ("favor_relu", {"kernel": "triton"}),
    ("favor_elu", {"num_features": 64}),
    ("landmark", {"orthogonal": False}),
    ("landmark", {"redraw_interval": 2}),
    ("favor+", {"selected_keys": 16}),
    ("landmark", {"window": 8}),
]


def test_an_option_that_the_backend_does_not_read_is_refused():
    model = BERT.build("sdpa")
    for backend, option in UNREAD:
        with pytest.raises(ValueError, match="|".join(option)):
            favor.configure(model, backend, **option)
        assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    *pairs(architecture=ARCHITECTURES, backend=["sdpa", "favor#", "landmark"], length=[24, 8192]),
    ids=lambda value: getattr(value, "name", None),
)
def test_description_has_every_layer(architecture, backend, length):
    model = architecture.build(backend, num_features=64)
    description = favor.describe(model, length)
    assert description == favor.describe(model, length)
    assert description.layers
    assert len(str(description).splitlines()) == len(description.layers) + 3
    kinds = {layer.runs for layer in description.layers}
    if backend == "sdpa":
        assert kinds == {"exact"}
        assert {layer.why for layer in description.layers} == {"the backend is sdpa"}
    elif length == 24:
        assert kinds <= {"exact", "local"}
    else:
        assert kinds & {"wderf", "landmark"}


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_the_log_tells_once_what_ran_and_the_description_agrees(architecture, caplog):
    model = architecture.build("landmark", **SMALL)
    with caplog.at_level("INFO", "favor"), torch.no_grad():
        for _ in range(2):
            model(**architecture.inputs(False))
    (line,) = [record.message for record in caplog.records if "first forward pass" in record.message]
    told = {kind for kind in ("linear: landmark", "local: exact") if kind in line}
    described = {layer.runs for layer in favor.describe(model).layers}
    assert {{"landmark": "linear: landmark", "local": "local: exact"}[kind] for kind in described} == told


def test_replicas_that_run_side_by_side_are_one_first_pass(caplog):
    """As `nn.DataParallel` runs them: each in a thread of its own, layers in any order."""
    first, account = FirstPass("BertModel", frozenset({0, 1})), ("linear: landmark", 24)
    with caplog.at_level("INFO", "favor"):
        first.note(0, *account)
        replica = threading.Thread(target=first.note, args=(0, *account))
        replica.start()
        replica.join()
        assert not first.is_told
        first.note(1, *account)
    (line,) = [record.message for record in caplog.records if "first forward pass" in record.message]
    assert "2 layers linear: landmark" in line


SHORT = [
    (0, "auto", "2 layers exact: fewer keys than exact_below = 1024"),
    (0, 20, "2 layers exact in 2 of 3 rows, with fewer keys than exact_below = 20; the others linear: wderf, M = 256"),
    (1, 24, "2 layers exact in 3 of 3 rows, with fewer keys than exact_below = 24."),
]


@pytest.mark.parametrize(("padding", "exact_below", "line"), SHORT)
def test_short_inputs_are_told_of(padding, exact_below, line, caplog):
    inputs = tokens(True)
    inputs["attention_mask"][0, :padding] = 0
    BERT.build("favor#", exact_below=exact_below)(**inputs)
    (record,) = [record for record in caplog.records if "first forward pass" in record.message]
    assert record.levelname == "WARNING"
    assert f"up to 24 keys: {line}" in record.message


@pytest.mark.filterwarnings("default")  # torch.compile imports code of torch that warns
def test_a_compiled_model_says_what_it_compares_with_exact_below():
    model = BERT.build("favor+")
    assert favor.describe(model).notes == ()
    model.compile()
    assert "padding included" in str(favor.describe(model))
    assert favor.describe(favor.configure(model, exact_below=0)).notes == ()


def test_missing_parameters_and_refused_layers_are_described():
    model = BERT.build("favor#", statistics="calibrated", exact_below=0)
    assert 'statistics="calibrated" needs stored parameters of wderf' in str(favor.describe(model))
    favor.calibrate(model, [tokens(True)])
    assert {layer.parameters for layer in favor.describe(model).layers} == {"calibrated"}
    config = hf.Gemma2Config(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4)
    capped = hf.Gemma2Model._from_config(config, attn_implementation="favor#")
    (layer,) = favor.describe(capped).layers
    assert (layer.runs, layer.why) == ("refused", "soft-capped logits")
