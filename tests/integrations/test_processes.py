"""Two processes that share out heads of sequences, or parameters and rows: all is as in one process."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers as hf
from processes import run_several
from small_sections import set_small_sections
from tiny_speech import build
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import favor
from favor.attention import parallel
from favor.integrations.backend import favor_attention_forward
from favor.integrations.layer import attention_modules, change_state, stored_choice
from favor.models.bert import PerformerBertConfig, PerformerBertForSequenceClassification
from favor.models.conformer import ConformerForCTC
from favor.optim import CombinedOptimizer, SoftmaxBound

LENGTH = 64
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
SIZES |= {"vocab_size": 50, "initializer_range": 0.5}
IDS = torch.arange(4 * LENGTH).view(4, LENGTH) * 7 % 46 + 4
MASK = torch.ones_like(IDS)
MASK[0, 50:] = MASK[1, 20:] = 0  # one of them without a token in the second piece


def text_model(kind, config, backend, calibrated=False, exact_head=None, **options):
    torch.manual_seed(0)
    model = kind(config).eval()
    favor.configure(model, backend, **{"exact_below": 0, "num_features": 8, **options})
    if calibrated:
        favor.calibrate(model, [{"input_ids": IDS}])
        favor.configure(model, statistics="calibrated")
    for module in attention_modules(model).values() if exact_head is not None else ():
        change_state(module, choice=stored_choice(module) | {"exact_heads": [exact_head]})
    return model


def bert(backend, **options):
    return text_model(hf.BertForMaskedLM, hf.BertConfig(**SIZES), backend, **options)


def llama(backend, **options):
    config = hf.LlamaConfig(**SIZES, num_key_value_heads=2)
    return text_model(hf.LlamaForCausalLM, config, backend, **options)


def mistral(backend, **options):
    config = hf.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=20)
    return text_model(hf.MistralForCausalLM, config, backend, **options)


def t5(backend, kind=hf.T5EncoderModel, **options):
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 4, "initializer_factor": 3.0}
    return text_model(kind, hf.T5Config(**sizes, vocab_size=50), backend, **options)


class OneLayer(torch.nn.Module):
    """Has the attention of one layer of a model of speech, whose convolutions would need the frames of neighbours."""

    def __init__(self, backend, kind, config, **options):
        super().__init__()
        torch.manual_seed(0)
        speech = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 16}
        model = favor.configure(kind(config(**speech)), backend, **{"exact_below": 0, **options})
        *_, self.layer = attention_modules(model).values()
        self.table = torch.nn.Embedding(50, 16)
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        self.eval()

    def forward(self, input_ids, attention_mask, position_ids=None):
        return self.layer(self.table(input_ids), attention_mask=attention_mask, position_embeddings=None)


def wav2vec2(backend, positions, **options):
    def config(**sizes):
        return hf.Wav2Vec2BertConfig(**sizes, feature_projection_input_dim=8, position_embeddings_type=positions)

    return OneLayer(backend, hf.Wav2Vec2BertModel, config, **options)


def parakeet(backend, **options):
    return OneLayer(backend, hf.ParakeetEncoder, hf.ParakeetEncoderConfig, **options)


HEADS = {
    "landmarks of an encoder": (bert, "landmark", {"selected_keys": 8}),
    "windows": (bert, "favor+", {"window": 8}),
    "statistics of a batch": (bert, "favor#", {}),
    "some rows are exact": (bert, "favor+", {"exact_below": 40}),
    "calibrated": (llama, "favor#", {"calibrated": True}),
    "an exact head": (bert, "favor#", {"calibrated": True, "exact_head": 2}),
    "all heads of a process are exact": (llama, "favor+", {"exact_head": 0}),
    "landmarks of a decoder": (llama, "landmark", {"selected_keys": 16}),
    "local layers": (mistral, "landmark", {}),
    "a table of positions": (t5, "landmark", {"selected_keys": 8}),
    "cross attention": (t5, "landmark", {"selected_keys": 8, "kind": hf.T5ForConditionalGeneration}),
    "cross attention by features": (t5, "favor+", {"kind": hf.T5ForConditionalGeneration}),
    "positions that queries ask for": (wav2vec2, "favor+", {"positions": "relative_key"}),
    "waves that queries ask for": (wav2vec2, "landmark", {"selected_keys": 8, "positions": "relative"}),
    "exact waves": (parakeet, "landmark", {"exact_below": 100}),
}


def answered(model, batch):
    """Gives outputs of real tokens, and the gradients."""
    out = model(**batch)[0]
    out = out if "decoder_input_ids" in batch else out * batch["attention_mask"].unsqueeze(-1)
    out.square().sum().div(1000).backward()
    return out.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def compare_heads(rank, group):
    wrong = {}
    for name, (make, backend, options) in HEADS.items():
        batch = {"input_ids": IDS, "attention_mask": MASK}
        if "kind" in options:
            batch["decoder_input_ids"] = IDS[:, : LENGTH // 2]
        wanted, wanted_gradients = answered(make(backend, **options), batch)
        piece = favor.shard(batch, group)
        if make is t5:
            del piece["position_ids"]
        model = make(backend, **options)
        with favor.sequence_parallel(group, heads=True):
            found, gradients = answered(model, piece)
        dist.all_reduce(gradients)
        errors = [(found - wanted.chunk(2, 1)[rank]).abs().max() / wanted.abs().max()]
        errors.append((gradients - wanted_gradients).abs().max() / wanted_gradients.abs().max())
        if not (errors[0] < 1e-5 and errors[1] < 5e-5):  # large weights amplify rounding of gradients, up to 2e-5
            wrong[name] = errors
    assert not wrong, wrong


def compare_padding(rank, group):
    """Only the second piece has padding, which all layers of a model exchange once."""
    batch = {"input_ids": IDS[:1], "attention_mask": MASK[:1]}
    for backend, options in (("favor+", {"window": 8}), ("landmark", {"selected_keys": 8})):
        model = bert(backend, **options)
        with torch.no_grad(), patch.object(parallel, "gathered", wraps=parallel.gathered) as exchange:
            wanted = model(**batch).logits
            with favor.sequence_parallel(group):
                found = model(**favor.shard(batch, group)).logits
        error = (found - wanted.chunk(2, 1)[rank])[batch["attention_mask"].chunk(2, 1)[rank] > 0].abs().max()
        assert error < 1e-5 * wanted.abs().max()
        assert [call.args[0].dtype for call in exchange.call_args_list].count(torch.uint8) == 1


def compare_dropout(group):
    """Rows are equal but for dropout, and their mean is the output without."""
    batch = {"input_ids": IDS[:1, :16].expand(200, -1), "attention_mask": MASK[:1, :16].expand(200, -1)}
    for exact_below in (0, 100):
        config = partial(hf.BertConfig, attention_probs_dropout_prob=0.5)
        model = OneLayer("favor+", hf.BertModel, config, exact_below=exact_below)
        with torch.no_grad(), favor.sequence_parallel(group, heads=True):
            wanted, found = (model.train(drops)(**favor.shard(batch, group))[0] for drops in (False, True))
        deviation = found.std(0)
        assert deviation.min() > 0
        assert ((found.mean(0) - wanted[0]) / deviation).abs().max() < 6 / 200**0.5


def compare_packed(rank, group):
    """Lengths are those of whole sequences."""
    ids, lengths = IDS.view(1, -1), torch.tensor([0, 100, 130, 256], dtype=torch.int32)
    places = torch.cat([torch.arange(100), torch.arange(30), torch.arange(126)]).view(1, -1)
    packed = {f"cu_seq_lens_{which}": lengths for which in "qk"} | {f"max_length_{which}": 126 for which in "qk"}
    batch = {"input_ids": ids, "position_ids": places}
    for backend in ("favor+", "landmark"):
        model = llama(backend)
        with torch.no_grad():
            wanted = model(**batch, **packed, use_cache=False).logits
            with favor.sequence_parallel(group, heads=True):
                found = model(**favor.shard(batch, group), **packed, use_cache=False).logits
        assert (found - wanted.chunk(2, 1)[rank]).abs().max() < 1e-5 * wanted.abs().max()


def refuse_in_heads(group):
    piece = favor.shard({"input_ids": IDS}, group)
    few = text_model(hf.LlamaModel, hf.LlamaConfig(**SIZES, num_key_value_heads=1), "favor+")
    query = torch.randn(1, 2, 8, 4)
    with torch.no_grad(), favor.sequence_parallel(group, heads=True):
        with pytest.raises(ValueError, match="LlamaAttention has 1 for 2 processes"):
            few(**piece)
        with pytest.raises(ValueError, match="exchange tokens for heads, and favor_attention does not"):
            favor.favor_attention(query, query, query, features="pos")
        with pytest.raises(ValueError, match="inside sequence_parallel LlamaAttention would be exact"):
            favor.calibrate(llama("favor+"), [piece])
        with pytest.warns(UserWarning, match=r"ParakeetEncoderAttention has convolutions \(conv_kernel_size, "):
            parakeet("landmark", exact_below=100)(**piece, attention_mask=MASK[:, : LENGTH // 2])
        cache = llama("favor+")(**piece, use_cache=True).past_key_values
        with pytest.raises(ValueError, match="LlamaAttention got a cache or state"):
            llama("favor+")(input_ids=IDS[:, :1], past_key_values=cache)
        with pytest.raises(ValueError, match="LlamaAttention got a cache or state"):
            llama("favor+")(**piece, favor_state=cache)
        with pytest.raises(ValueError, match="MistralAttention got a mask of all pairs of tokens"):
            mistral("favor+")(**piece, attention_mask=torch.ones(4, 1, LENGTH // 2, LENGTH // 2, dtype=torch.bool))
        *_, layer = attention_modules(bert("favor+")).values()
        with pytest.raises(ValueError, match="a position bias for each pair of tokens belongs to one piece"):
            favor_attention_forward("favor+", layer, query, query, query, None, position_bias=torch.randn(1, 2, 8, 8))


def performer():
    config = PerformerBertConfig(**SIZES, num_labels=3)
    model = text_model(PerformerBertForSequenceClassification, config, "favor#", calibrated=True)
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": torch.tensor([0, 2, 1, 0])}
    return model, batch, model.bert.encoder.layer


def decoder():
    model = llama("landmark", selected_keys=16)
    return model, {"input_ids": IDS, "labels": IDS}, model.model.layers


def conformer():
    model = build(ConformerForCTC, "favor+")
    batch = {"input_features": torch.randn(4, 80, 10, generator=torch.Generator().manual_seed(0))}
    return model, batch | {"labels": torch.arange(12).view(4, 3) % 9 + 1}, model.base_model.layers


MODELS = {"BERT": performer, "LLaMA": decoder, "Conformer": conformer}


def trained(model, batch, inner):
    """Takes two steps; `inner` is the model without a wrapper."""
    optimizer = torch.optim.SGD(inner.parameters(), 0.1)
    if hasattr(inner, "classifier"):
        head = set(inner.classifier.parameters())
        body = torch.optim.SGD([own for own in inner.parameters() if own not in head], 0.1)
        optimizer = CombinedOptimizer(body, SoftmaxBound(inner.classifier))
    for _ in range(2):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()


def compare_rows(rank, mesh, folder):
    everything, wrong = StateDictOptions(full_state_dict=True), {}
    for name, make in MODELS.items():
        (shared, batch, layers), (copied, *_) = make(), make()
        for layer in (*layers, shared):
            fully_shard(layer, mesh=mesh)
        half = {key: tensor.chunk(2)[rank] for key, tensor in batch.items()}
        trained(shared, half, shared)
        trained(DistributedDataParallel(copied), half, copied)
        dcp.save(get_model_state_dict(shared), checkpoint_id=folder / f"{name} in parts")
        state = get_model_state_dict(shared, options=everything)
        shared.save_pretrained(folder / name, state_dict=dict(state), is_main_process=rank == 0)
        for kind, found in {"FSDP": state, "DDP": copied.state_dict()}.items():
            for key, wanted in torch.load(folder / f"{name}.pt").items():
                error = (found[key] - wanted).abs().max().item()
                if not error < 3e-5:
                    wrong[f"{kind}: {name} {key}"] = error
    assert not wrong, wrong


def in_two(rank, folder):
    torch.set_num_threads(1)
    set_small_sections(pytest.MonkeyPatch())
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=2)
    compare_heads(rank, dist.group.WORLD)
    compare_padding(rank, dist.group.WORLD)
    compare_dropout(dist.group.WORLD)
    compare_packed(rank, dist.group.WORLD)
    refuse_in_heads(dist.group.WORLD)
    compare_rows(rank, init_device_mesh("cpu", (2,)), folder)
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # it is one process that reads
@pytest.mark.usefixtures("small_sections")
def test_two_processes_are_one(tmp_path):
    alone = {name: make() for name, make in MODELS.items()}
    for name, (model, batch, _) in alone.items():
        trained(model, batch, model)
        torch.save(model.state_dict(), tmp_path / f"{name}.pt")
    run_several(in_two, tmp_path)
    for name, (model, batch, _) in alone.items():
        again = type(model).from_pretrained(tmp_path / name).eval()
        fresh, *_ = MODELS[name]()
        state = get_model_state_dict(fresh)
        dcp.load(state, checkpoint_id=tmp_path / f"{name} in parts")
        set_model_state_dict(fresh, state)
        assert torch.equal(again(**batch).logits, fresh(**batch).logits)  # of both files the same weights
        for found in (again, fresh):
            torch.testing.assert_close(found(**batch).logits, model(**batch).logits, rtol=1e-3, atol=3e-4)
