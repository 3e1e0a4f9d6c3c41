"""Masks: what they record, what is read from others or refused; packed batches, `exact_below`, local layers."""

import pytest
import torch
import transformers as hf
from architectures import BERT, COMMON, LLAMA, padding_mask, tokens
from pairwise import pairs
from transformers import masking_utils

import favor
from favor.integrations.backend import favor_attention_forward
from favor.integrations.layer import change_state
from favor.integrations.masks import favor_mask, visibility

PADDING = padding_mask().bool()


def module(is_causal):
    attention = torch.nn.Module()
    attention.config, attention.is_causal = hf.BertConfig(), is_causal
    return attention


@pytest.mark.parametrize("claims", [False, True])
@pytest.mark.parametrize(
    ("function", "local", "causal", "reach"),
    [
        (masking_utils.causal_mask_function, None, True, None),
        (masking_utils.bidirectional_mask_function, None, False, None),
        (masking_utils.sliding_window_causal_mask_function(5), 5, True, 4),
        (masking_utils.sliding_window_bidirectional_mask_function(5), 5, False, 5),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_says_what_is_seen_whatever_the_module_claims(function, local, causal, reach, claims, padded):
    mask = favor_mask(3, 24, 24, mask_function=function, local_size=local, attention_mask=PADDING if padded else None)
    assert mask.untyped_storage().nbytes() <= 3 * 24  # no square
    sees = visibility(module(claims), mask, claims, (3, 24, 24), sliding_window=99)
    assert (sees.causal, sees.reach, sees.dense) == (causal, reach, False)
    assert torch.equal(sees.padding, PADDING) if padded else sees.padding is None
    # The record is what transformers' own mask shows, pair by pair.
    every = masking_utils.sdpa_mask(
        3, 24, 24, mask_function=function, attention_mask=PADDING, allow_is_causal_skip=False
    )
    distance = torch.arange(24)[:, None] - torch.arange(24)
    shown = (distance >= 0) if causal else torch.ones_like(distance, dtype=torch.bool)
    shown = shown if reach is None else shown & (distance.abs() <= reach)
    assert torch.equal(every, shown & PADDING[:, None, None, :])


def test_other_patterns_show_every_pair_in_local_masks_and_are_refused_in_global_ones():
    function = masking_utils.chunked_causal_mask_function(6, torch.zeros(3, dtype=torch.int64))
    mask = favor_mask(3, 24, 24, mask_function=function, local_size=6, attention_mask=PADDING)
    chunk = torch.arange(24) // 6
    shown = (chunk[:, None] == chunk) & torch.ones(24, 24, dtype=torch.bool).tril()
    assert torch.equal(mask, shown & PADDING[:, None, None, :])
    assert visibility(module(True), mask, None, (3, 24, 24)).dense
    prefix = masking_utils.and_masks(masking_utils.causal_mask_function, lambda batch, head, q, k: k > 3)
    with pytest.raises(ValueError, match="prefix or blocks"):
        favor_mask(3, 24, 24, mask_function=prefix)


EVERY = PADDING[:, None, None, :].expand(3, 1, 24, 24)
FORMS = {
    "materialised": EVERY.contiguous(),
    "additive": torch.zeros(3, 1, 24, 24).masked_fill(~EVERY, torch.finfo(torch.float32).min),
    "additive -inf": torch.zeros(3, 1, 24, 24).masked_fill(~EVERY, -torch.inf),
    "queries masked too": EVERY & PADDING[:, None, :, None],
    "one row": EVERY[:, :, :1],
    "triangle": EVERY[:, :, :5] & torch.ones(5, 24, dtype=torch.bool).tril(19),
}


@pytest.mark.parametrize("claims", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_padding_and_causality_are_read_from_masks_of_any_make(form, claims):
    queries = 5 if form == "triangle" else 24
    sees = visibility(module(claims), FORMS[form], None, (3, queries, 24))
    assert torch.equal(sees.padding, PADDING)
    assert sees.causal == (form == "triangle")


@pytest.mark.parametrize("claims", [False, True])
def test_masks_without_a_record_leave_causality_to_the_module(claims):
    for mask in (PADDING, PADDING[:, None, None, :].expand(3, 1, 24, 24), None):
        sees = visibility(module(claims), mask, None, (3, 24, 24))
        assert sees.causal == claims
        assert sees.padding is None if mask is None else torch.equal(sees.padding, PADDING)
        assert visibility(module(claims), mask, not claims, (3, 24, 24)).causal != claims
    encoder = module(claims)
    encoder.is_decoder = False  # which is right where a layer claims to be causal
    assert not visibility(encoder, None, None, (3, 24, 24)).causal


WRONG = [torch.ones(shape) for shape in ((3, 4, 24, 24), (3, 24, 24), (3, 7))]


@pytest.mark.parametrize("mask", [*WRONG, torch.full((3, 1, 24, 24), -0.5), torch.ones(3, 1, 24, 24).triu()])
def test_other_masks_are_refused(mask):
    with pytest.raises(ValueError, match=r"each pair|attention_mask must be"):
        visibility(module(False), mask, None, (3, 24, 24))


GROUPED = {**COMMON, "num_key_value_heads": 2, "head_dim": 8}
REFUSED = {
    "gemma2": (hf.Gemma2Model, hf.Gemma2Config(**GROUPED), "soft-capped logits"),
    "gpt-oss": (hf.GptOssModel, hf.GptOssConfig(**GROUPED, num_local_experts=2), "attention sinks"),
}
IDS = [torch.arange(1, 1 + n).tolist() for n in (5, 17, 1, 9)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_result_is_refused(name, padded):
    model_class, config, message = REFUSED[name]
    model = model_class._from_config(config, attn_implementation="favor#").eval()
    with pytest.raises(ValueError, match=message):
        model(**tokens(padded))


def flattened(**options):
    collator = hf.DataCollatorWithFlattening(return_tensors="pt", **options)
    batch = collator([{"input_ids": ids} for ids in IDS])
    batch.pop("labels")
    return batch


def static_cache():
    model = LLAMA.build("favor+", exact_below=0)
    return model(**tokens(False), past_key_values=hf.StaticCache(config=model.config, max_cache_len=40))


def one_layer(*without, **options):
    module = BERT.build("favor+", exact_below=0).encoder.layer[0].attention.self
    for name in without:
        delattr(module, name)
    return favor_attention_forward("favor+", module, *torch.randn(3, 1, 4, 5, 8), None, **options)


def packed(build, flash=True, without=(), **more):
    batch = flattened(return_flash_attn_kwargs=flash) | more
    return build("favor+", exact_below=0)(**{name: tensor for name, tensor in batch.items() if name not in without})


PAIRWISE = torch.rand(3, 1, 24, 24, generator=torch.Generator().manual_seed(0)) > 0.3
PADDED = (torch.arange(32) < 29).long()[None]
CALLS = [
    (static_cache, "static cache"),
    (lambda: one_layer(output_attentions=True), "never forms the attention matrix"),
    (lambda: one_layer("is_causal"), "set its attribute is_causal"),
    (lambda: BERT.build("favor+", exact_below=0)(**tokens(False), attention_mask=PAIRWISE), "bias for each pair"),
    # With a cache transformers itself sees one sequence.
    (lambda: packed(LLAMA.build, flash=False, use_cache=False), r"packed .*return_flash_attn_kwargs=True"),
    (lambda: packed(LLAMA.build, without=["cu_seq_lens_k"]), "cu_seqlens_q and cu_seqlens_k go together"),
    (lambda: packed(BERT.build, attention_mask=PADDED), "do not pass attention_mask"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_calls_that_cannot_be_right_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("architecture", [BERT, LLAMA], ids=lambda a: a.name)
@pytest.mark.parametrize("backend", ["favor+", "favor#", "favor_elu"])
@pytest.mark.parametrize("exact_below", [0, 9], ids=["estimated", "by length"])
@pytest.mark.filterwarnings("ignore:.*parameters from this sequence:UserWarning")
def test_packed_models_give_what_each_sequence_gives_alone(architecture, backend, exact_below):
    model = architecture.build(backend, num_features=16, exact_below=exact_below)
    found = model(**flattened(return_flash_attn_kwargs=True)).last_hidden_state[0]
    alone = [model(input_ids=torch.tensor([ids])).last_hidden_state[0] for ids in IDS]
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-4, atol=1e-5)


BOUND, LENGTH, WIDTH = 12, 24, 8
# Places of the real keys: all, padded right, left and inside, few and scattered, none, just below the bound and at it.
ROWS = [
    [*range(LENGTH)],
    [*range(7)],
    [*range(15, LENGTH)],
    [*range(3), *range(10, 22)],
    [2, 3, 9, 20],
    [],
    [*range(2, 1 + BOUND)],
    [*range(LENGTH - BOUND, LENGTH)],
]
MASK = torch.tensor([[place in row for place in range(LENGTH)] for row in ROWS])
KINDS = {"self": (LENGTH, 4), "grouped": (LENGTH, 2), "cached": (9, 4), "one": (1, 4), "other": (LENGTH + 5, 4)}
OPTIONS = [{}, {"window": 4}, {"exact_heads": [1]}]
pytestmark = pytest.mark.usefixtures("small_sections")
FAMILIES = ("favor+", "favor++", "favor#", "landmark", "favor_trig", "favor_elu")


def attention(backend, causal, options):
    heads, options = options.get("exact_heads", []), {"window": options.get("window", 0)}
    if backend in ("favor_trig", "favor_elu"):
        options = {}
    if backend == "landmark":
        options = {"selected_keys": options.get("window", 0)}
    module = BERT.build(backend, num_features=4, exact_below=BOUND, **options).encoder.layer[0].attention.self
    module.is_causal = module.is_decoder = causal
    change_state(module, choice={"exact_heads": heads, "key_heads": 4})
    return module


def run(backend, module, tensors, mask, causal):
    function = hf.masking_utils.causal_mask_function if causal else hf.masking_utils.bidirectional_mask_function
    batch, length, keys = tensors[0].shape[0], tensors[0].shape[2], tensors[1].shape[2]
    made = favor_mask(batch, length, keys, q_offset=keys - length, mask_function=function, attention_mask=mask)
    return favor_attention_forward(backend, module, *tensors, made)[0]


@pytest.mark.parametrize(*pairs(backend=FAMILIES, causal=[False, True], kind=KINDS, options=OPTIONS))
@pytest.mark.filterwarnings("ignore:.*parameters from this sequence:UserWarning")
def test_a_row_is_what_it_is_alone(backend, causal, kind, options):
    length, key_heads = KINDS[kind]
    causal = causal and kind != "other"
    module = attention(backend, causal, options)
    module.num_key_value_groups = 4 // key_heads
    generator = torch.Generator().manual_seed(0)
    shapes = [(len(ROWS), 4, length, WIDTH), *[(len(ROWS), key_heads, LENGTH, WIDTH)] * 2]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]
    out = run(backend, module, tensors, MASK, causal)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    assert out.isfinite().all()
    assert not out[ROWS.index([])].any()
    for number, row in enumerate(ROWS):
        queries = row if length == LENGTH else [*range(length)]
        if not row or (causal and length < LENGTH and not MASK[number, LENGTH - length :].all()):
            continue  # some of these queries are padding
        places = (queries, row, row)
        own = [t[number : number + 1, :, p] for t, p in zip(tensors, places, strict=True)]
        alone = run(backend, module, own, None, causal)
        torch.testing.assert_close(out[number : number + 1, queries], alone, rtol=1e-9, atol=1e-10)
        both = (out[number, queries], alone[0])
        grads = [torch.autograd.grad((o * weights[number, queries]).sum(), tensors, retain_graph=True) for o in both]
        for found, expected in zip(*grads, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("cached", [False, True])
def test_a_row_of_a_decoder_generates_what_it_generates_alone(cached):
    """A prompt becomes linear when it has enough tokens of its own, with and without a cache."""
    model = LLAMA.build("landmark", selected_keys=4, exact_below=BOUND)
    model = model.double()
    ids = torch.randint(4, 40, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    lengths = (16, 9, 4)
    mask = torch.arange(16) >= 16 - torch.tensor(lengths)[:, None]
    mask = torch.cat([mask, torch.ones(3, 8)], 1).long()

    def steps(ids, mask):
        cache = hf.DynamicCache(config=model.config) if cached else None
        places, outs = (mask.cumsum(1) - 1).clamp(min=0), []
        for start, end in [(0, ids.shape[1] - 8), *[(n, n + 1) for n in range(ids.shape[1] - 8, ids.shape[1])]]:
            start = start if cached else 0
            inputs = {"input_ids": ids[:, start:end], "position_ids": places[:, start:end]}
            with torch.no_grad():
                out = model(**inputs, attention_mask=mask[:, :end], past_key_values=cache, use_cache=cached)
            outs.append(out.last_hidden_state[:, -1])
        return torch.stack(outs, 1)

    together = steps(ids, mask)
    for row, length in enumerate(lengths):
        alone = steps(ids[row : row + 1, 16 - length :], torch.ones(1, length + 8, dtype=torch.long))
        torch.testing.assert_close(together[row], alone[0], rtol=0, atol=1e-10)


GEMMA = {**GROUPED, "num_hidden_layers": 3, "sliding_window": 8}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS = {
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=8)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**GEMMA, layer_types=LAYERS)),
    "gemma3 encoder": lambda: hf.Gemma3TextModel(
        hf.Gemma3TextConfig(**GEMMA, layer_types=LAYERS, use_bidirectional_attention=True)
    ),
    "llama4": lambda: hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(
            **GROUPED, intermediate_size_mlp=32, attention_chunk_size=8, num_local_experts=2,
            layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0],
        )
    ),
}  # fmt: skip


def pair_of(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    exact = MODELS[name]().eval()
    exact.load_state_dict(model.state_dict())
    exact.set_attn_implementation("eager")
    return favor.configure(model, "landmark", num_features=4, exact_below=0), exact


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_output_and_gradients_are_those_of_exact_attention(name, padded):
    results = []
    for model in pair_of(name):
        out = model(**tokens(padded))[0]
        real = padding_mask().bool() if padded else torch.ones(out.shape[:2], dtype=torch.bool)
        out[real].square().sum().backward()
        results.append((out[real], *(p.grad for p in model.parameters() if p.grad is not None)))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("cache", [None, "favor"])
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_generation_is_that_of_exact_attention(name, cache):
    model, exact = pair_of(name)
    inputs = tokens(False)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][1, :9] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = exact.generate(**inputs, **options)
    if cache == "favor":
        options["past_key_values"] = favor.FavorCache(model.config)
    assert torch.equal(model.generate(**inputs, **options), expected)


def test_packed_sequences_stay_apart():
    """Each sequence of a packed batch is what it is alone, in local and global layers."""
    model, _ = pair_of("gemma3")
    lengths, ids = [13, 20, 7], tokens(False)["input_ids"].flatten()[:40][None]
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 20, "max_length_k": 20}
    with torch.no_grad():
        out = model(ids, position_ids=positions, use_cache=False, **packed).logits
        alone = [model(part, use_cache=False).logits for part in ids.split(lengths, dim=1)]
    torch.testing.assert_close(out, torch.cat(alone, dim=1), rtol=0, atol=1e-5)
