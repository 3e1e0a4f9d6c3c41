"""What runs on a GPU, on a stand-in for one: the same numbers, and few readings, each of which would stall it."""

from functools import partial

import pytest
import torch
from elsewhere import Elsewhere, another_device, move
from pairwise import pairs
from small_sections import set_small_sections
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import favor
from favor.models.bert import PerformerBertConfig, PerformerBertForMaskedLM
from favor.models.conformer import ConformerConfig, ConformerForCTC
from favor.models.speech import transducer_loss
from favor.optim import BBM, LSPFB, SBM, SPFB, ProxBoundSGD, SoftmaxBound

pytestmark = pytest.mark.filterwarnings("ignore:.*parameters from this sequence:UserWarning")


@pytest.fixture(autouse=True)
def _small_sections(monkeypatch):
    set_small_sections(monkeypatch)


def close(there, here, tolerance, scale=None):
    """Checks that a tensor is on the other device, with these values up to a part of the largest, or of `scale`."""
    assert isinstance(there, Elsewhere)
    torch.testing.assert_close(there.held, here, rtol=0, atol=tolerance * (scale or float(here.abs().max())))


LENGTHS = torch.tensor([0, 20, 21, 70], dtype=torch.int32)
RIGHT = torch.arange(70) < torch.tensor([[70], [41]])
# What is given beside the tokens, and how often it may be read, without and with blocks whose place depends on it.
LAYOUTS = {
    "dense": ({}, 0, 0),
    "right padding": ({"key_padding_mask": RIGHT}, 0, 1),
    "left padding": ({"key_padding_mask": RIGHT.flip(1)}, 0, 1),
    "packed": ({"cu_seqlens_q": LENGTHS, "cu_seqlens_k": LENGTHS, "max_seqlen_q": 49, "max_seqlen_k": 49}, 1, 1),
}
NAMES = ("pos", "pos@16", "sderf", "cderf@16", "wderf", "wderf@16", "landmark", "landmark@6", "trig", "relu")


@pytest.mark.parametrize(*pairs(name=NAMES, is_causal=(False, True), layout=LAYOUTS))
def test_attention(name, is_causal, layout):
    places, plain_reads, block_reads = LAYOUTS[layout]
    features, _, number = name.partition("@")
    if features in ("sderf", "cderf", "wderf"):  # else another form on another device
        features = favor.features.get(features, factorization="eigh")
    size = {"selected_keys" if features == "landmark" else "window": int(number or 0)}
    options = {"features": features, "num_features": 12, "is_causal": is_causal, **size, **places}
    generator = torch.Generator().manual_seed(0)
    shape = (1 if layout == "packed" else 2, 4, 70, 8)
    *tokens, slope = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4))

    def run(device):
        moved = {}
        given = {
            name: moved.setdefault(id(value), value.to(device)) if isinstance(value, torch.Tensor) else value
            for name, value in options.items()
        }
        leaves = [token.detach().to(device).requires_grad_() for token in tokens]
        out = favor.favor_attention(*leaves, **given)
        out.backward(slope.to(device))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    expected, found, reads = both(run)
    for there, here in zip(found, expected, strict=True):
        close(there, here, 1e-12)
    has_blocks = bool(number) or features == "landmark"
    assert reads <= (block_reads if has_blocks else plain_reads)


def test_a_mask_is_looked_at_once_until_it_changes():
    tokens, mask = torch.randn(3, 2, 2, 20, 8), torch.ones(2, 20, dtype=torch.bool)

    def reads():
        before = device.reads
        favor.favor_attention(*tokens.to("meta"), features="landmark", key_padding_mask=there)
        return device.reads - before

    with another_device() as device:
        there = mask.to("meta")
        assert [reads(), reads()] == [1, 0]
        there[1, :4] = False
        assert [reads(), reads()] == [1, 0]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_landmarks_of_half_precision_are_those_of_float32(dtype, is_causal):
    """GPUs do not raise them, as CPUs do; near a tie a block chooses another key."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randn(1, 2, 1200, 16, generator=generator).to(dtype) for _ in range(3)]
    options = {"features": "landmark", "num_features": 64, "selected_keys": 128, "is_causal": is_causal}
    expected = favor.favor_attention(*(token.float() for token in tokens), **options)
    with another_device():
        found = favor.favor_attention(*(token.to("meta") for token in tokens), **options)
    assert found.dtype == dtype
    errors = (found.held - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.quantile(0.9) < 0.02


TEXT = torch.randint(5, 40, (2, 60), generator=torch.Generator().manual_seed(1))
SOUND = torch.randn(2, 160, 80, generator=torch.Generator().manual_seed(2))
HEAR = torch.arange(160) < torch.tensor([[160], [120]])
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


def both(run):
    """What a function of the device gives on the CPU, and on the other device with the number of its readings."""
    expected = run("cpu")
    with another_device() as device:
        found = run("meta")
    return expected, found, device.reads


def bert(backend, **options):
    return make(PerformerBertForMaskedLM, PerformerBertConfig(**SIZES, vocab_size=40), backend, **options)


def conformer(backend, **options):
    return make(ConformerForCTC, ConformerConfig(**SIZES, vocab_size=12), backend, **options)


def llama(backend, **options):
    sizes = SIZES | {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    return make(LlamaForCausalLM, LlamaConfig(**sizes, vocab_size=40), backend, **options)


def make(kind, config, backend, **options):
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation=backend).eval()
    if backend != "sdpa":
        favor.configure(model, exact_below=0, num_features=8, factorization="eigh", **options)
    return model


READ = {"input_ids": TEXT, "attention_mask": (torch.arange(60) < torch.tensor([[60], [33]])).long(), "labels": TEXT}
HEARD = {"input_features": SOUND, "attention_mask": HEAR, "labels": TEXT[:, :5] % 11 + 1}
MODELS = {
    "BERT favor+": (lambda: bert("favor+"), READ),
    "BERT favor++": (lambda: bert("favor++"), READ),
    "BERT favor#": (lambda: bert("favor#"), READ),
    "BERT favor# window": (lambda: bert("favor#", window=16), READ),
    "BERT landmarks": (lambda: bert("landmark", selected_keys=6), READ),
    "Conformer CTC favor#": (lambda: conformer("favor#"), HEARD),
    "Conformer CTC sdpa": (lambda: conformer("sdpa"), HEARD),
    "LLaMA favor+": (lambda: llama("favor+", window=16), READ),
    "LLaMA landmarks": (lambda: llama("landmark", selected_keys=6), READ),
}


@pytest.mark.parametrize("name", MODELS)
def test_training_step(name):
    build, batch = MODELS[name]
    model = build()
    expected = model(**batch).loss
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    with another_device():
        loss = move(model)(**{name: value.to("meta") for name, value in batch.items()}).loss
        loss.backward()
    close(loss, expected.detach(), 1e-5)
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert found.keys() == gradients.keys()
    # The gradient of a bias of keys is zero but for rounding.
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        close(found[name], gradient, 1e-3, largest)


@pytest.mark.parametrize(
    ("backend", "options"),
    [("favor+", {}), ("favor+", {"window": 16}), ("landmark", {"selected_keys": 6})],
    ids=["features", "window", "landmarks"],
)
@pytest.mark.parametrize("room", [None, 80])
def test_generation_with_a_state(backend, options, room):
    """With room for all tokens a step reads nothing, as in a CUDA graph."""
    if room and "window" in options:
        pytest.skip("a window has an open block")
    model, reads = llama(backend, **options), []

    @torch.no_grad()
    def logits(device, there=None):
        cache, ids, found = favor.FavorCache(model.config, max_cache_len=room), TEXT.to(device), []
        mask = READ["attention_mask"].flip(1).to(device)
        for _ in range(8):  # past the end of a block
            found.append(model(ids, attention_mask=mask, past_key_values=cache).logits[:, -1])
            reads.append(getattr(there, "reads", 0))
            ids = found[-1].argmax(-1, keepdim=True)
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        return torch.stack(found)

    expected = logits("cpu")
    with another_device() as there:
        move(model)
        close(logits("meta", there), expected, 1e-5)
    assert not room or reads[-1] == reads[-7]


@pytest.mark.parametrize("options", [{}, {"window": 16}, {"feature_weights": True, "refine_steps": 2}], ids=str)
def test_calibration(options):
    inputs = {name: READ[name] for name in ("input_ids", "attention_mask")}
    model, other = bert("favor#"), bert("favor#")
    options = options | {"factorization": "eigh"}
    favor.calibrate(model, [inputs], **options)
    with another_device():
        moved = {name: value.to("meta") for name, value in inputs.items()}
        favor.calibrate(move(other), [moved], **options)
        found = dict(other.named_buffers())
    expected = dict(model.named_buffers())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value.is_floating_point():
            close(found[name], value, 1e-2)


@pytest.mark.parametrize(
    ("name", "form"),
    [("sderf", "newton_schulz"), ("aderf", "newton_schulz"), ("cderf", "cholesky"), ("wderf", "cholesky")],
)
def test_other_devices_decompose_no_matrix(name, form, monkeypatch):
    x, y = torch.randn(2, 1, 40, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = favor.features.get(name, factorization=form).fit(x, y)
    monkeypatch.delattr(torch.linalg, "eigh")
    with pytest.raises(AttributeError, match="eigh"):
        favor.features.get(name).fit(x, y)
    with another_device():
        found = favor.features.get(name).fit(x.to("meta"), y.to("meta"))
    close(found.transform, expected.transform, 1e-12)
    close(found.factor, expected.factor, 1e-12)


def test_transducer_loss():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 9, 5, 7, generator=generator, dtype=torch.float64)
    given = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]]), torch.tensor([9, 6]), torch.tensor([4, 2])

    def run(device):
        leaf = logits.detach().to(device).requires_grad_()
        loss = transducer_loss(leaf, *(tensor.to(device) for tensor in given))
        loss.backward()
        return loss.detach(), leaf.grad

    expected, found, _ = both(run)
    for there, here in zip(found, expected, strict=True):
        close(there, here, 1e-12)


SHARED = ("bohning", "exact", "diag", "block", "kfac")
OPTIMIZERS = {
    **{f"SoftmaxBound {name}": partial(SoftmaxBound, curvature=name) for name in (*SHARED, "geometric")},
    **{f"BBM {name}": partial(BBM, curvature=name, weight_decay=0.1) for name in (*SHARED, "spectral")},
    "SBM": lambda head: SBM(head, 30, weight_decay=0.1),
    "SPFB": partial(SPFB, lr=0.3, weight_decay=0.1),
    "ProxBoundSGD": partial(ProxBoundSGD, lr=0.3, weight_decay=0.1),
    "LSPFB": partial(LSPFB, weight_decay=0.1, rank=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(30, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (30,), generator=generator)
    rows = 1 if name == "ProxBoundSGD" else 30 if name.startswith("BBM") else 10

    def train(device):
        torch.manual_seed(0)
        head = torch.nn.Linear(6, 5, dtype=torch.float64)
        head = head if device == "cpu" else move(head)
        optimizer = OPTIMIZERS[name](head)
        for x, y in zip(inputs.to(device).split(rows)[:2], labels.to(device).split(rows)[:2], strict=True):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = cross_entropy(head(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        return head.weight.detach()

    expected, found, _ = both(train)
    close(found, expected, 1e-9)
