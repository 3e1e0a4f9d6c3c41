"""Conversion: which heads stay exact, and what a budget pays for; landmarks by measured errors."""

import math
from itertools import product

import pytest
import torch
import transformers as hf
from test_calibrate import batches, bert, llama, tokens
from torch.nn.functional import scaled_dot_product_attention

import favor
from favor.attention import Clipped
from favor.features import Parameters
from favor.integrations.adapt.convert import Costs, LayerErrors, Setting, allocate, cheapest_error
from favor.integrations.adapt.observe import observe
from favor.integrations.exact import Call, by_head
from favor.integrations.layer import attention_modules, stored_choice
from favor.integrations.masks import Visibility
from favor.integrations.stored import update_choices


def test_heads_keep_their_places():
    """With grouped queries, and parameters of the heads that are estimated; places are no permutation of two."""
    query, key = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 7, 4)
    marks = torch.arange(3.0)
    parameters = Parameters(*(m[:, None, None] * torch.eye(4) for m in (marks, marks, marks)), shift=marks[:, None])

    def linear(call, q, k, v, stored):
        assert torch.equal(stored.shift[:, 0], torch.tensor([0.0, 1.0]))
        assert torch.equal(call.relative.key.flatten(), torch.arange(4.0))
        return q.transpose(1, 2)

    relative = Clipped(torch.ones(1, 1, 1, 1), torch.arange(6.0).view(6, 1, 1), 0, 0)
    call = Call(torch.nn.Module(), Visibility(False), 0.5, 0.0, None, relative)
    out = by_head(call, query, key, key, parameters, [2], linear)
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, key, scale=0.5, enable_gqa=True)
    assert torch.equal(out[:, :, :4], query[:, :4].transpose(1, 2))
    assert torch.allclose(out[:, :, 4:], exact[:, 4:].transpose(1, 2), atol=1e-6)


def test_the_budget_goes_to_the_worst_heads():
    rho = {0: torch.tensor([1.0, 9.0]), 1: torch.tensor([7.0, 20.0]), 2: torch.tensor([3.0, 2.0])}
    costs = Costs(length=1000, num_features=100, window=0, head_dim=dict.fromkeys(rho, 32))
    exact, linear = 4 * 1000**2 * 32, 8 * 1000 * 100 * 32
    assert costs.exact(0) == exact
    assert costs.linear(0, 0) == linear

    def spent(choices):
        total = 0
        for layer, own in choices.items():
            number, window = len(own["exact_heads"]), own.get("window", 0)
            total += number * exact + (len(rho[layer]) - number) * costs.linear(layer, window)
        return total / (6 * exact)

    for budget, heads in ((0.2, []), (0.35, [(1, 1)]), (0.5, [(1, 1), (0, 1)]), (1.0, [(1, 1), (0, 1), (1, 0)])):
        choices = allocate(rho, costs, budget)
        assert {(layer, head) for layer, own in choices.items() for head in own["exact_heads"]} == set(heads)
        assert spent(choices) <= budget
    # Hopeless heads that cannot be exact get wider windows; layers without any do not.
    choices = allocate(rho, costs, 0.3)
    assert choices[1]["window"] > 0
    assert "window" not in choices[2]
    assert all(value < math.log(100) for value in rho[2])
    with pytest.raises(ValueError, match=r"flop_budget=0.1 is less than the estimate alone costs at 1000 tokens, 0.20"):
        allocate(rho, costs, 0.1)


@pytest.mark.parametrize("make", [bert, llama])
def test_auto_keeps_hopeless_heads_exact(make, tmp_path):
    statistics = "calibrated" if make is llama else "batch"
    options = {"num_features": 2, "exact_below": 0, "statistics": statistics}
    exact = make()
    with torch.no_grad():
        expected = exact(tokens())[0]
        outs = {}
        for layers in ("all", "auto"):
            model = favor.convert(make(), dataloader=batches(), layers=layers, flop_budget=1.0, length=1000, **options)
            outs[layers] = model(tokens())[0]
    chosen = [own["exact_heads"] for own in model.config.favor_layers.values()]
    assert any(chosen)
    assert (outs["auto"] - expected).norm() < (outs["all"] - expected).norm()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="favor#").eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens())[0], outs["auto"])


def test_options_still_apply_after_auto_and_all_heads_means_all():
    options = {"num_features": 2, "exact_below": 0}
    model = favor.convert(bert(), dataloader=batches(), layers="auto", flop_budget=0.3, length=1000, **options)
    assert any(own.get("exact_heads") for own in model.config.favor_layers.values())
    with torch.no_grad():
        before = model(tokens())[0]
        assert not torch.equal(favor.configure(model, window=8)(tokens())[0], before)
        favor.convert(model, **options, window=0)
        plain = favor.configure(bert(), "favor#", **options)
        assert torch.equal(model(tokens())[0], plain(tokens())[0])


def test_layers_are_found_by_name_in_submodels(tmp_path):
    """An encoder-decoder's choices for its encoder do not land on the decoder loaded alone."""
    config = hf.BartConfig(vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1)
    model = hf.BartForConditionalGeneration(config)
    number = model.model.encoder.layers[0].self_attn.favor_layer.number
    update_choices(model, {number: {"exact_heads": [0]}})
    decoder = model.model.decoder.layers[0].self_attn.favor_layer
    update_choices(model.model.decoder, {decoder.number: {"window": 8}})  # which does not know the encoder's
    assert set(model.config.favor_layers) == {"encoder.layers.0.self_attn", decoder.name}
    update_choices(model.model.decoder, {decoder.number: {"window": None}})
    model.save_pretrained(tmp_path)
    whole = hf.BartForConditionalGeneration.from_pretrained(tmp_path)
    assert stored_choice(whole.model.encoder.layers[0].self_attn) == {"exact_heads": [0]}
    alone = hf.BartForCausalLM.from_pretrained(tmp_path)
    assert stored_choice(alone.model.decoder.layers[0].self_attn) == {}


def test_without_data_convert_configures():
    model = favor.convert(bert(), "favor+", num_features=7)
    assert (model.config._attn_implementation, model.config.favor["num_features"]) == ("favor+", 7)
    for change in ({"layers": "auto"}, {"statistics": "calibrated"}):
        with pytest.raises(ValueError, match="need data"):
            favor.convert(bert(), **change)
    with pytest.raises(ValueError, match='layers must be "all" or "auto"'):
        favor.convert(bert(), layers="some")
    with pytest.raises(ValueError, match='layers="auto" of a decoder needs statistics="calibrated"'):
        favor.convert(llama(), dataloader=batches(), layers="auto", flop_budget=1.0, length=1000)


FEW = {"num_features": (2, 4), "selected_keys": (0, 8)}
AUTO = {"layers": "auto", "exact_below": 0}


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr("favor.integrations.adapt.convert.VALUES", FEW)


def share(model, length):
    """Operations of the layers as a fraction of exact attention's, counted from what the docstrings say."""
    choices = [own for own in map(stored_choice, attention_modules(model).values()) if own]
    spent = [length if "exact_heads" in own else own["num_features"] + own["selected_keys"] for own in choices]
    return sum(spent) / (2 * length)


def error_of(model, data):
    """Mean error of all heads, computed by `favor_attention` and SDPA on what the exact model computes."""
    found, modules = [], attention_modules(model)

    def measure(seen):
        own = stored_choice(modules[seen.layer])
        for row in range(len(seen.query)):
            if "exact_heads" in own:
                found.extend([0.0] * seen.query.shape[1])
                continue
            keep = slice(None) if seen.padding is None else seen.padding[row]
            query, key, value = (part[row : row + 1] for part in (seen.query, seen.key, seen.value))
            real = (part[:, :, keep] for part in (query, key, value))
            exact = scaled_dot_product_attention(*real, scale=seen.scale)
            mask = None if seen.padding is None else seen.padding[row : row + 1]
            options = {"features": "landmark", "scale": seen.scale, "key_padding_mask": mask, **own}
            out = favor.favor_attention(query, key, value, **options)[:, :, keep]
            found.extend(((out - exact)[0, head].norm() / exact[0, head].norm()).item() for head in range(4))

    with torch.no_grad(), observe(model, measure):
        for batch in data:
            model(**{name: tensor for name, tensor in batch.items() if name != "labels"})
    return sum(found) / len(found)


def test_the_choice_is_the_best_of_all(few, monkeypatch):
    """Against every combination of settings of both layers, and the errors against their definition."""
    seen, measured = [], LayerErrors.means
    monkeypatch.setattr(LayerErrors, "means", lambda self: seen.append(measured(self)) or seen[-1])
    model = favor.convert(bert(), "landmark", dataloader=batches(), flop_budget=0.5, **AUTO)
    assert share(model, 20) <= 0.5
    costs = {None: 1.0} | {each: sum(each) / 20 for each in (set(seen[0][1]) - {None})}
    layers = list(seen[0])
    assert len(costs) == 5
    allowed = [pair for pair in product(costs, costs) if sum(costs[each] for each in pair) / 2 <= 0.5]
    best = min(sum(seen[0][layer][each] for layer, each in zip(layers, pair, strict=True)) for pair in allowed)
    assert error_of(model, batches()) == pytest.approx(best / 8, rel=1e-4)


@pytest.mark.usefixtures("small_sections")
@pytest.mark.parametrize("make", [bert, llama])
def test_saved_choices_are_used_again(make, few, tmp_path):
    data = batches() if make is bert else [{"input_ids": tokens(2, 300)}]
    budget = 0.5 if make is bert else 0.08
    model = favor.convert(make(), "landmark", dataloader=data, flop_budget=budget, **AUTO)
    ids = tokens(2, 20) if make is bert else tokens(2, 300)
    plain = favor.configure(make(), "landmark", exact_below=0, num_features=2, selected_keys=0)
    with torch.no_grad():
        expected = model(ids)[0]
        assert not torch.equal(plain(ids)[0], expected)
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path).eval()
        assert loaded.config.favor_layers == model.config.favor_layers
        assert torch.equal(loaded(ids)[0], expected)
    described = favor.describe(loaded, ids.shape[1]).layers
    for layer, own in zip(described, loaded.config.favor_layers.values(), strict=True):
        if "exact_heads" in own:
            assert (layer.runs, layer.why) == ("exact", "all its heads are kept exact")
        else:
            means = own["num_features"] if make is bert else None  # causal layers do not read it
            assert (layer.num_features, layer.selected_keys) == (means, own["selected_keys"])
    assert {layer.runs for layer in described} <= ({"exact", "landmark"} if make is bert else {"landmark"})


def test_layers_run_what_they_chose(few):
    """Layers with settings of their own equal a model with these settings in every layer."""
    own = {"num_features": 3, "selected_keys": 6}
    expected = favor.configure(bert(), "landmark", exact_below=0, **own)
    model = favor.configure(bert(), "landmark", exact_below=0, num_features=7, selected_keys=0)
    update_choices(model, dict.fromkeys(attention_modules(model), own))
    with torch.no_grad():
        assert torch.equal(model(tokens())[0], expected(tokens())[0])
        # Options that are named later reach all layers.
        favor.configure(model, num_features=5)
        expected = favor.configure(bert(), "landmark", exact_below=0, num_features=5, selected_keys=6)
        assert torch.equal(model(tokens())[0], expected(tokens())[0])


def test_named_options_are_shared(few):
    model = favor.convert(bert(), "landmark", dataloader=batches(), flop_budget=0.45, num_features=3, **AUTO)
    assert model.config.favor["num_features"] == 3
    assert all(set(own) <= {"selected_keys", "exact_heads", "key_heads"} for own in model.config.favor_layers.values())
    # Converting again forgets the choice.
    favor.convert(model, "favor+", num_features=2)
    assert not any(model.config.favor_layers.values())


def test_a_budget_that_is_too_small(few):
    message = r"flop_budget=0.09 is less than the estimate alone costs at 20 tokens, 0.10 times the cost of exact"
    with pytest.raises(ValueError, match=message):
        favor.convert(bert(), "landmark", dataloader=batches(), flop_budget=0.09, **AUTO)
    model = favor.convert(bert(), "landmark", dataloader=batches(), flop_budget=0.09, length=100, **AUTO)
    assert share(model, 100) <= 0.09
    with pytest.raises(ValueError, match="needs positive features or landmarks, and relu has neither"):
        favor.convert(bert(), "favor_relu", dataloader=batches(), **AUTO)


@pytest.mark.usefixtures("small_sections")
def test_all_but_causal_layers_may_stay_exact(few):
    config = hf.BartConfig(
        vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=16, decoder_ffn_dim=16, init_std=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = favor.convert(hf.BartModel(config), "landmark", dataloader=[tokens(2, 30)], flop_budget=0.96, **AUTO)
    exact = {name for name, own in model.config.favor_layers.items() if "exact_heads" in own}
    assert exact == {"encoder.layers.0.self_attn", "decoder.layers.0.encoder_attn"}


def whisper():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 1, "num_mel_bins": 8, "max_source_positions": 40}
    sizes |= {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
    ids = {"vocab_size": 30, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 1}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**sizes, **ids, init_std=0.3)).eval()


def test_the_encoder_of_a_whisper_alone(few, tmp_path):
    model, sound = whisper(), torch.randn(2, 8, 80)
    favor.convert(model.get_encoder(), "landmark", dataloader=[{"input_features": sound}], flop_budget=0.45, **AUTO)
    assert list(model.config.favor_layers) == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]
    assert share(model, 40) <= 0.45
    described = favor.describe(model, 40)
    assert [layer.why for layer in described.layers[2:]] == ["another part was switched"] * 2
    model.save_pretrained(tmp_path)
    loaded = hf.WhisperForConditionalGeneration.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        outs = [each(sound, decoder_input_ids=torch.ones(2, 3, dtype=torch.long)).logits for each in (model, loaded)]
    assert torch.equal(*outs)


def test_a_note_on_audio_encoders_with_groups_alone():
    model = favor.configure(whisper(), "landmark", only="model.encoder", exact_below=0, selected_keys=0)
    (note,) = favor.describe(model).notes
    assert "It concerns model.encoder.layers.0.self_attn and 1 more layers." in note
    assert f"note: {note}" in str(favor.describe(model))
    for change in ({"selected_keys": 16}, {"selected_keys": None}):
        assert not favor.describe(favor.configure(model, only="model.encoder", **change)).notes
    text = favor.configure(hf.BertModel(bert().config), "landmark", selected_keys=0, exact_below=0)
    assert not favor.describe(text).notes
    decoder = favor.configure(whisper(), "landmark", only="model.decoder", exact_below=0, selected_keys=0)
    assert not favor.describe(decoder).notes


@pytest.mark.parametrize("limit", [3, 8, 100])
def test_exact_choice_of_many_layers(limit):
    """Against every combination of settings of three layers."""
    generator = torch.Generator().manual_seed(limit)
    settings = [Setting(*each) for each in product((1, 2), (0, 1, 3, 6))]
    errors = {n: dict(zip(settings, torch.rand(8, generator=generator).tolist(), strict=True)) for n in range(3)}
    found = cheapest_error(errors, {n: {each: sum(each) for each in settings} for n in errors}, limit)
    assert sum(map(sum, found.values())) <= limit
    allowed = [chosen for chosen in product(settings, repeat=3) if sum(map(sum, chosen)) <= limit]
    best = min(sum(errors[n][each] for n, each in enumerate(chosen)) for chosen in allowed)
    assert sum(errors[n][each] for n, each in found.items()) == pytest.approx(best)
