"""Rows of one batch on both sides of `exact_below`: each is what it is alone, whatever stands beside it."""

import pytest
import torch
import transformers as hf
from architectures import BERT, LLAMA
from pairwise import pairs

from favor.integrations.backend import favor_attention_forward
from favor.integrations.layer import change_state
from favor.integrations.masks import favor_mask

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
