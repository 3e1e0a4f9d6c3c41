"""Attention in CUDA graphs: nothing may wait for the device, or look at what tensors hold, while one is recorded."""

import pytest
import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import favor
from favor.attention.packing import Compaction
from favor.eval.speed.measure import record
from favor.integrations.masks import favor_mask

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
OPTIONS = [
    *({"features": "pos", "window": window, "is_causal": causal} for window in (0, 64) for causal in (False, True)),
    {"features": "sderf"},
    {"features": "wderf", "window": 64},
    *({"features": "landmark", "is_causal": is_causal} for is_causal in (False, True)),
]


def test_values_are_not_looked_at_while_recording(monkeypatch):
    mask = torch.ones(2, 6, dtype=torch.long)
    assert favor_mask(2, 6, 6, attention_mask=mask).favor_visibility.padding is None
    assert Compaction.of(mask.bool()) is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    recorded = favor_mask(2, 6, 6, attention_mask=mask)
    assert torch.equal(recorded, torch.ones(2, 1, 6, 6, dtype=torch.bool))
    assert torch.equal(recorded.favor_visibility.padding, mask.bool())
    compaction = Compaction.of(mask.bool())
    assert torch.equal(compaction.order, torch.arange(6).expand(2, 6))


@on_gpu
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_a_graph_gives_the_attention_of_new_inputs(options):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 300, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    slope = torch.randn(2, 4, 300, 64, dtype=torch.bfloat16)

    def step():
        out = favor.favor_attention(*inputs, num_features=64, **options)
        return out, *torch.autograd.grad(out, inputs, slope)

    step()
    graph, results = record(step)
    with torch.no_grad():
        for tensor in inputs:
            tensor.copy_(torch.randn_like(tensor))
    expected = step()
    graph.replay()
    for found, one in zip(results, expected, strict=True):
        assert (found - one).norm() <= 0.01 * one.norm()


@on_gpu
def test_a_graph_of_a_padded_model():
    torch.manual_seed(0)
    config = BertConfig(vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    model = BertModel(config).eval()
    favor.configure(model, "favor#", window=32, num_features=32, exact_below=0)
    ids, mask = torch.randint(0, 50, (2, 100)), torch.ones(2, 100, dtype=torch.long)

    @torch.no_grad()
    def step():
        return (model(input_ids=ids, attention_mask=mask).last_hidden_state,)

    step()
    graph, (found,) = record(step)
    mask[1, :40] = 0
    (expected,) = step()
    graph.replay()
    assert (found - expected)[mask.bool()].norm() <= 1e-3 * expected[mask.bool()].norm()


@on_gpu
@pytest.mark.parametrize("backend", ["favor+", "landmark"])
def test_a_graph_of_a_decoding_step_serves_all_tokens(backend):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = favor.configure(LlamaForCausalLM(config).eval(), backend, exact_below=0)
    ids, cache = torch.randint(0, 50, (2, 700)), favor.FavorCache(model.config, max_cache_len=704)
    token = ids[:, :1].clone()

    @torch.no_grad()
    def step():
        return (model(token, past_key_values=cache).logits[:, 0],)

    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        model(ids[:, :600], past_key_values=cache)
        step()
        graph, (found,) = record(step)
        cache.reset()
        model(ids[:, :600], past_key_values=cache)
    for place in range(600, 700):
        token.copy_(ids[:, place : place + 1])
        graph.replay()
        assert (found - expected[:, place]).norm() <= 0.01 * expected[:, place].norm()
