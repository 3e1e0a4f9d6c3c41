"""Names of backends: kept by saved models, checked, and refused where no layer asks for one."""

import json
import logging

import pytest
import torch
import transformers as hf
from architectures import BART, BERT, COMMON, tokens
from safetensors.torch import load_file, save_file

import favor
from favor.models.bert import PerformerBertConfig, PerformerBertModel

PART = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {**PART, "image_size": 8, "patch_size": 4}
COLUMNS = {"embed_dim": 16, "layers": 1, "attention_heads": 2, "ffn_dim": 16, "vocab_size": 40}
PATCHES = {**PART, "head_dim": 8, "patch_embed_hidden_size": 16}
# More of these: test_compatibility.py.
NEVER = {
    "own attention": (hf.DebertaV2Model, lambda: hf.DebertaV2Config(**COMMON)),
    "a name looked up as an attribute": (
        hf.Kosmos2_5ForConditionalGeneration,
        lambda: hf.Kosmos2_5Config(text_config=COLUMNS, vision_config=PATCHES),
    ),
}


def clip():
    return hf.CLIPModel(hf.CLIPConfig(text_config={**PART, **IDS, "vocab_size": 40}, vision_config=IMAGE))


@pytest.mark.parametrize("name", NEVER)
def test_models_that_never_ask_for_a_backend_are_refused(name):
    model_class, config = NEVER[name]
    for attempt in (
        lambda: model_class._from_config(config(), attn_implementation="favor#"),
        lambda: favor.configure(model_class(config()), "favor#"),
    ):
        with pytest.raises(ValueError, match=r'favor#": .* never asks transformers for a backend'):
            attempt()


def test_a_layer_that_never_asks_is_named_by_the_log(caplog):
    favor.configure(hf.SiglipVisionModel(hf.SiglipVisionConfig(**IMAGE)), "landmark")
    assert "PoolingHead never ask for a backend and stay exact; other layers run landmark" in caplog.text


def test_the_part_that_asks_is_switched_alone(tmp_path):
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = hf.BigBirdPegasusConfig(vocab_size=40, d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, **sizes)
    model = hf.BigBirdPegasusModel(config)
    with pytest.raises(ValueError, match="BigBirdPegasusEncoder computes its attention itself"):
        favor.configure(model, "landmark")
    favor.configure(model, "landmark", only="decoder", exact_below=0).save_pretrained(tmp_path)
    again = hf.BigBirdPegasusModel.from_pretrained(tmp_path)
    assert favor.describe(again) == favor.describe(model)
    assert {layer.runs for layer in favor.describe(again).layers} == {"exact", "landmark"}


@pytest.mark.parametrize(
    ("given", "meant"),
    [("favour#", "favor#"), ("FAVOR#", "favor#"), ("landmarks", "landmark"), ("favor_pluss", "favor_plus")],
)
def test_a_misspelled_name_is_told_the_nearest(given, meant):
    for attempt in (
        lambda: BERT.build(given),
        lambda: favor.configure(BERT.build("sdpa"), given),
        lambda: BERT.build("sdpa").set_attn_implementation(given),
    ):
        with pytest.raises(ValueError, match=rf'"{given}" is no backend; did you mean \'{meant}\'\?.*\'favor#\''):
            attempt()


def test_a_saved_model_takes_up_its_backend_again(tmp_path, caplog):
    model = BERT.build("landmark", num_features=4, exact_below=0)
    before = dict(model.config.favor)
    model.save_pretrained(tmp_path)
    assert model.config.favor == before
    with caplog.at_level(logging.INFO, "favor"):
        again = hf.AutoModel.from_pretrained(tmp_path).eval()
    assert "BertModel was saved with landmark and takes it up again" in caplog.text
    assert torch.equal(again(**tokens(True)).last_hidden_state, model(**tokens(True)).last_hidden_state)
    assert favor.describe(again) == favor.describe(model)
    head = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert [layer.runs for layer in favor.describe(head).layers] == ["landmark"] * 2


def test_options_that_landmarks_do_not_have_any_more_are_told_once_and_not_read(tmp_path, caplog):
    favor.config.warn_once.cache_clear()
    model = BERT.build("landmark", num_features=4, selected_keys=6, exact_below=0)
    model.save_pretrained(tmp_path)
    path, found = tmp_path / "config.json", []
    config = json.loads(path.read_text())
    config["favor"] |= {"page_size": 4, "query_block": 8, "window": 8}
    path.write_text(json.dumps(config))
    for _ in range(2):
        found.append(hf.AutoModel.from_pretrained(tmp_path).eval()(**tokens(True)).last_hidden_state)
    gone, window = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert "options of an older version are left out: page_size, query_block." in gone
    assert "landmark has no window any more, and window=8 is not read. Raise selected_keys instead." in window
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], model(**tokens(True)).last_hidden_state)


def test_a_name_that_is_passed_wins_and_is_what_is_saved_next(tmp_path):
    BERT.build("landmark").save_pretrained(tmp_path)
    model = hf.AutoModel.from_pretrained(tmp_path, attn_implementation="sdpa")
    for name in ("sdpa", "favor+"):
        model.set_attn_implementation(name)
        model.save_pretrained(tmp_path)
        assert hf.AutoModel.from_pretrained(tmp_path).config._attn_implementation == name


def test_parts_take_up_their_own_backends_or_stay_exact(tmp_path):
    alone, rest = clip(), favor.configure(clip(), "favor+", num_features=8, exact_below=0)
    favor.configure(alone.vision_model, "favor+", num_features=8, exact_below=0)
    favor.configure(rest, "sdpa", only="vision_model")
    for model, runs in ((alone, ["exact", "pos"]), (rest, ["pos", "exact"])):
        model.save_pretrained(tmp_path)
        again = hf.CLIPModel.from_pretrained(tmp_path)
        assert [layer.runs for layer in favor.describe(model).layers] == runs
        assert favor.describe(again) == favor.describe(model)


def test_parts_that_transformers_builds_anew_take_the_backend_too():
    """Its parts are built by `AutoModel.from_config`, which drops the name."""
    parts = {"text_config": {**PART, "vocab_size": 40, "model_type": "bert"}}
    parts["vision_config"] = {**IMAGE, "model_type": "vit"}
    config = hf.VisionTextDualEncoderConfig(**parts, projection_dim=8)
    model = hf.VisionTextDualEncoderModel._from_config(config, attn_implementation="landmark")
    assert [layer.runs for layer in favor.describe(model).layers] == ["landmark", "landmark"]


def clipseg():
    """Layers of its decoder have a copy of the config of the image encoder."""
    layers = {"num_hidden_layers": 2, "vocab_size": 40, "image_size": 16}
    text, vision = {**PART, **IDS, **layers}, {**IMAGE, **layers}
    sizes = {"reduce_dim": 8, "decoder_num_attention_heads": 2, "decoder_intermediate_size": 8}
    config = hf.CLIPSegConfig(text_config=text, vision_config=vision, **sizes, extract_layers=[0, 1])
    return hf.CLIPSegForImageSegmentation(config)


def test_a_part_whose_config_is_not_saved_is_named_when_it_is_lost(tmp_path, caplog):
    model = favor.configure(clipseg(), "landmark", only="decoder")
    model.save_pretrained(tmp_path)
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert 'favor.configure(model, "landmark", only="decoder.layers")' in record.message
    again = hf.CLIPSegForImageSegmentation.from_pretrained(tmp_path)
    assert {layer.runs for layer in favor.describe(again).layers} == {"exact"}
    favor.configure(again, "landmark", only="decoder.layers")
    assert favor.describe(again) == favor.describe(model)


def test_a_backend_for_the_whole_model_reaches_copies_of_its_configs(tmp_path, caplog):
    model = favor.configure(clipseg(), "landmark")
    assert {layer.runs for layer in favor.describe(model).layers} == {"landmark"}
    model.save_pretrained(tmp_path)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    again = hf.CLIPSegForImageSegmentation.from_pretrained(tmp_path)
    assert favor.describe(again) == favor.describe(model)
    again.set_attn_implementation("sdpa")
    assert {layer.runs for layer in favor.describe(again).layers} == {"exact"}
    inputs = {"input_ids": torch.randint(3, 40, (2, 6)), "pixel_values": torch.randn(2, 3, 16, 16)}
    favor.calibrate(again.eval(), [inputs], num_features=8, exact_below=0)
    assert {layer.parameters for layer in favor.describe(again).layers} == {"calibrated"}
    assert again(**inputs).logits.isfinite().all()


def test_stored_parameters_that_the_weights_do_not_have_are_named(tmp_path):
    model = BERT.build("favor#", num_features=8, exact_below=0)
    favor.calibrate(model, [tokens(True)])
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("encoder.layer.0.attention.self.favor_transform")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"do not have: encoder\.layer\.0\.attention\.self\.favor_transform"):
        hf.AutoModel.from_pretrained(tmp_path)


ENTRY = {"family": "wderf", "kind": "calibrated", "key_heads": 4, "head_dim": 8}
WEIGHTS = {"num_features": 8, "seed": 0, "orthogonal": True, "window": 0, "exact_heads": [], "layer": 0}
LAYER = "encoder.layer.0.attention.self"
MALFORMED = [
    ("favor", [1], "config.favor must be a dictionary of options"),
    ("favor", {"features": ["wderf"]}, "features must be one of"),
    ("favor", {"num_features": 10**9}, "num_features must be at most"),
    ("favor_parts", "x", "config.favor_parts must be"),
    ("favor_parts", {"encoder": {"num_features": 8}}, "favor_parts.*must be a dictionary with"),
    ("favor_layers", "x", "config.favor_layers must be a dictionary"),
    (LAYER, "x", "must be a dictionary, got 'x'"),
    (LAYER, {**ENTRY, "key_heads": None}, "key_heads must be an integer from 1"),
    (LAYER, {"family": "wderf", "kind": "calibrated"}, "key_heads, head_dim is missing"),
    (LAYER, {**ENTRY, "exact_heads": [99]}, "different key heads from 0 to 3"),
    (LAYER, {"exact_heads": [1, 1]}, "a list of different key heads"),
    (LAYER, {**ENTRY, "family": "x"}, "family must be 'pos' or"),
    (LAYER, {"exact_head": [1]}, "unknown field, exact_head; .* 'exact_heads'"),
    (LAYER, {"window": 10**15}, "window must be an integer from 0 to 2147483647"),
    (LAYER, {**ENTRY, "weights_of": {"num_features": 8}}, "weights_of needs num_features, layer"),
    (LAYER, {**ENTRY, "weights_of": {**WEIGHTS, "num_features": 10**12}}, "num_features must be an integer from 1"),
]


@pytest.mark.parametrize(("field", "value", "message"), MALFORMED)
def test_a_malformed_config_names_its_field(field, value, message, tmp_path):
    BERT.build("favor#").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    own = {"favor_layers": {LAYER: value}} if field == LAYER else {field: value}
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    with pytest.raises((ValueError, TypeError), match=message):
        hf.AutoModel.from_pretrained(tmp_path)


def test_a_head_that_the_layer_does_not_have_is_refused_when_it_runs():
    config = BERT.config()
    config.favor_layers = {LAYER: {"exact_heads": [99]}}
    config.favor = {"exact_below": 0, "num_features": 8}
    model = hf.BertModel._from_config(config, attn_implementation="favor+")
    with pytest.raises(ValueError, match="exact_heads must be key heads from 0 to 3"):
        model(**tokens(False))


def test_saving_twice_changes_no_config(tmp_path):
    """The configs of the zoo have a field `favor`, which others have only with options."""
    for backend in ("sdpa", "favor#"):
        for model_class, config in ((PerformerBertModel, PerformerBertConfig(**COMMON)), (BERT.model, BERT.config())):
            config._attn_implementation = backend
            model = model_class(config)
            before = ("favor" in vars(config), getattr(config, "favor", None))
            for _ in range(2):
                model.save_pretrained(tmp_path)
            assert ("favor" in vars(config), getattr(config, "favor", None)) == before


def test_a_backend_for_the_whole_model_ends_those_of_parts(tmp_path):
    model = favor.configure(BART.build(), "favor+", only="encoder")
    model.save_pretrained(tmp_path)
    for switched in (model, hf.BartModel.from_pretrained(tmp_path, attn_implementation="landmark")):
        switched.set_attn_implementation("landmark")
        assert not switched.config.favor_parts
        assert "pos" not in {layer.runs for layer in favor.describe(switched, 10**6).layers}
    favor.configure(model, "favor+", only="encoder")
    model.set_attn_implementation("sdpa")
    assert {layer.runs for layer in favor.describe(model, 10**6).layers} == {"exact"}
