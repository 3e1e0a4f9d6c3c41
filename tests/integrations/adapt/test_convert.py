"""Conversion: which heads stay exact, and what a budget pays for."""

import math

import pytest
import torch
from test_calibrate import batches, bert, llama, tokens
from transformers import BartConfig, BartForCausalLM, BartForConditionalGeneration

import favor
from favor.features import Parameters
from favor.integrations.adapt.convert import Costs, allocate
from favor.integrations.exact import by_head
from favor.integrations.layer import stored_choice
from favor.integrations.stored import update_choices


def test_heads_keep_their_places():
    """With grouped queries, and parameters of the heads that are estimated; places are no permutation of two."""
    query, key = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 7, 4)
    marks = torch.arange(3.0)
    parameters = Parameters(*(m[:, None, None] * torch.eye(4) for m in (marks, marks, marks)), shift=marks[:, None])

    def exact(q, k, v):
        return -q.transpose(1, 2)

    def linear(q, k, v, stored):
        assert torch.equal(stored.shift[:, 0], torch.tensor([0.0, 1.0]))
        return q.transpose(1, 2)

    out = by_head(query, key, key, parameters, [2], exact, linear)
    signs = torch.tensor([1.0, 1, 1, 1, -1, -1])[None, None, :, None]
    assert torch.equal(out, signs * query.transpose(1, 2))


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
    model = BartForConditionalGeneration(BartConfig(vocab_size=50, d_model=16, encoder_layers=1, decoder_layers=1))
    number = model.model.encoder.layers[0].self_attn.favor_layer.number
    update_choices(model, {number: {"exact_heads": [0]}})
    decoder = model.model.decoder.layers[0].self_attn.favor_layer
    update_choices(model.model.decoder, {decoder.number: {"window": 8}})  # which does not know the encoder's
    assert set(model.config.favor_layers) == {"encoder.layers.0.self_attn", decoder.name}
    update_choices(model.model.decoder, {decoder.number: {"window": None}})
    model.save_pretrained(tmp_path)
    whole = BartForConditionalGeneration.from_pretrained(tmp_path)
    assert stored_choice(whole.model.encoder.layers[0].self_attn) == {"exact_heads": [0]}
    alone = BartForCausalLM.from_pretrained(tmp_path)
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
