"""Calibrated parameters: what they are, where they are kept, and that nothing leaks through them."""

import pytest
import torch
from transformers import BartConfig, BartModel, BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import favor
from favor import features
from favor.integrations.adapt.calibrate import Statistics
from favor.integrations.adapt.observe import observe, observe_batches

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16, "vocab_size": 50}
OPTIONS = {"num_features": 24, "exact_below": 0}


def bert(model_class=BertModel, config_class=BertConfig):
    torch.manual_seed(0)
    return model_class(config_class(**SIZES, max_position_embeddings=64, initializer_range=0.3)).eval()


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, initializer_range=0.3)).eval()


def tokens(rows=3, length=20, seed=0):
    return torch.randint(1, 50, (rows, length), generator=torch.Generator().manual_seed(seed))


def batches():
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[1, 13:] = 0
    mask[2, :6] = 0
    return [{"input_ids": tokens(), "attention_mask": mask, "labels": torch.zeros(3)}, {"input_ids": tokens(2, 11, 1)}]


@pytest.mark.parametrize("make", [bert, llama])
def test_statistics_are_those_of_all_real_tokens(make):
    statistics, seen = Statistics(features.get("cderf")), []
    observe_batches(make(), batches(), (statistics, seen.append))
    assert len(statistics.layers) == 2
    for layer, (moments, weight) in statistics.layers.items():
        x, y, scale = [], [], seen[0].scale
        for o in (o for o in seen if o.layer == layer):
            real = torch.ones(o.key.shape[0], o.key.shape[2], dtype=torch.bool) if o.padding is None else o.padding
            y.append(o.key.transpose(0, 1)[:, real])
            x.append(o.query.transpose(0, 1)[:, real].unflatten(0, (len(y[0]), -1)).flatten(1, 2))
        assert weight == 20 + 13 + 14 + 22
        for parts, mean, cov in ((x, moments.mean_x, moments.cov_x), (y, moments.mean_y, moments.cov_y)):
            samples = torch.cat(parts, 1).double() * scale**0.5
            torch.testing.assert_close(mean, samples.mean(1), rtol=1e-5, atol=1e-6)
            expected = torch.stack([own.T.cov(correction=0) for own in samples])
            torch.testing.assert_close(cov, expected, rtol=1e-5, atol=1e-6)


def test_causal_statistics_weigh_keys_by_causal_attention():
    statistics, seen = Statistics(features.get("wderf", num_queries=5)), []
    observe_batches(llama(), [tokens(1, 12)], (statistics, seen.append))
    places = [1, 3, 6, 8, 10]  # the middle of each fifth of 12 queries
    for o in seen:
        for head in range(2):
            columns = torch.zeros(12)
            for query in o.query[0, 2 * head : 2 * head + 2]:
                logits = o.scale * query @ o.key[0, head].T
                rows = logits.masked_fill(torch.ones(12, 12).triu(1).bool(), -torch.inf).softmax(-1)
                columns += rows[places].mean(0) / 2
            expected = o.scale**0.5 * columns @ o.key[0, head]
            found = statistics.layers[o.layer][0].mean_y[head]
            torch.testing.assert_close(found.float(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("learned", [{}, {"feature_weights": True, "refine_steps": 10}], ids=["", "weights"])
@pytest.mark.parametrize("window", [0, 8])
def test_the_future_does_not_change_the_past(window, learned):
    model = favor.calibrate(llama(), batches(), window=window, **OPTIONS, **learned)
    first, second = tokens(), tokens()
    second[:, 11:] = 3
    with torch.no_grad():
        one, other = model(first).logits, model(second).logits
    assert torch.equal(one[:, :11], other[:, :11])
    assert not torch.equal(one[:, 11:], other[:, 11:])


@pytest.mark.parametrize("features", ["wderf", "cderf", "sderf", "saderf"])
def test_calibrated_parameters_are_used(features):
    model = favor.calibrate(bert(), batches(), features=features, **OPTIONS)
    with torch.no_grad():
        calibrated = model(tokens())[0]
        assert not torch.allclose(calibrated, favor.configure(model, statistics="batch")(tokens())[0], atol=1e-3)
        torch.nn.init.eye_(model.encoder.layer[0].attention.self.favor_factor[0])
        again = favor.configure(model, statistics="calibrated")(tokens())[0]
    assert not torch.allclose(calibrated, again, atol=1e-3)


def test_errors_say_what_is_missing():
    model = favor.calibrate(bert(), batches(), attn_implementation="favor++", **OPTIONS)
    assert {own["family"] for own in model.config.favor_layers.values()} == {"gerf"}
    with pytest.raises(ValueError, match="pos features have no parameters to fit"):
        favor.calibrate(bert(), batches(), attn_implementation="favor+")
    model = favor.configure(bert(), "favor#", statistics="calibrated", **OPTIONS)
    with pytest.raises(ValueError, match="needs parameters of wderf in every layer, and BertSelfAttention has none"):
        model(tokens())
    favor.calibrate(model, batches(), features="cderf")
    favor.configure(model, features="wderf")
    with pytest.raises(ValueError, match="has calibrated parameters of cderf"):
        model(tokens())
    with pytest.raises(ValueError, match="no attention layer of BertModel ran in 0 batches"):
        favor.calibrate(model, [])
    decoder = favor.configure(llama(), "favor#", statistics="corrected", **OPTIONS)
    with pytest.raises(ValueError, match="is for encoders"):
        decoder(tokens())


def test_batches_of_other_kinds():
    expected = favor.calibrate(bert(), [tokens()], **OPTIONS).state_dict()
    found = favor.calibrate(bert(), [(tokens(),)], **OPTIONS).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    lengths = torch.tensor([0, 8, 20], dtype=torch.int32)
    packed = {"input_ids": tokens(1), "cu_seq_lens_q": lengths, "cu_seq_lens_k": lengths}
    for batch, message in (({"text": "words"}, r"batch must be a tensor|got dict"), (packed, "not packed ones")):
        with pytest.raises(ValueError, match=message):
            favor.calibrate(bert(), [batch])


def test_observing_is_exact_attention_and_leaves_no_trace():
    model, seen = favor.configure(bert(), "favor+", **OPTIONS), []
    with torch.no_grad():
        before = model(tokens())[0]
        with observe(model, seen.append):
            found = model(tokens())[0]
        assert torch.equal(model(tokens())[0], before)
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(found, model(tokens())[0])
    assert [o.query.shape for o in seen] == [(3, 4, 20, 4)] * 2
    with pytest.raises(RuntimeError, match="stop"), observe(model, seen.append):
        raise RuntimeError("stop")
    assert model.config._attn_implementation == "sdpa"


def test_observing_leaves_a_part_the_only_one_that_runs_the_backend():
    config = BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=50, max_position_embeddings=64)
    model = favor.configure(BartModel(config), "favor+", only="encoder", **OPTIONS)
    before = favor.describe(model)
    with observe(model, lambda seen: None):
        pass
    assert favor.describe(model) == before
