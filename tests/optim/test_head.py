"""Heads: precision, groups, vocabularies, and what the optimizers refuse."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from problem import DECAY, after_step, backward, data, gradient, joined, make_head, start, whole
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from favor.optim import BBM, LSPFB, SBM, SPFB, ProxBoundSGD, SoftmaxBound


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, pickle.dumps])
def test_optimizers_are_not_copied(copier):
    with pytest.raises(TypeError, match=r"cannot be copied or pickled: use state_dict"):
        copier(SoftmaxBound(make_head()))


def test_a_step_under_autocast_is_computed_in_full():
    head, plain = make_head(dtype=torch.float32), make_head(dtype=torch.float32)
    x, y = (part[:20] for part in data())
    one, two = SoftmaxBound(head), SoftmaxBound(plain)
    for optimizer, layer in ((one, head), (two, plain)):
        backward(layer, x.float(), y)
        with torch.autocast("cpu", torch.bfloat16, enabled=optimizer is one):
            optimizer.step()
    assert torch.equal(head.weight, plain.weight)


def test_curvature_can_change_on_the_way():
    x, y = data()
    head = make_head()
    optimizer = SoftmaxBound(head, weight_decay=DECAY, curvature="diag")
    for curvature in ("diag", "geometric", "bohning", "block"):
        optimizer.param_groups[0]["curvature"] = curvature
        with torch.no_grad():
            head.weight.copy_(start())
        backward(head, x[:20], y[:20])
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(joined(head), after_step(whole, curvature=curvature))


def test_without_a_gradient_nothing_happens():
    head = make_head()
    SoftmaxBound(head).step()
    assert torch.equal(joined(head), start())


def test_groups_have_their_own_options_and_schedulers_reach_them():
    x, y = data()
    heads = make_head(), make_head()
    optimizer = SoftmaxBound([{"head": heads[0]}, {"head": heads[1], "lr": 0.5}], weight_decay=DECAY)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1**step)
    moves = []
    for _ in range(2):
        for head in heads:
            with torch.no_grad():
                head.weight.copy_(start())
            backward(head, x[:20], y[:20])
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        moves.append([joined(head) - start() for head in heads])
    torch.testing.assert_close(moves[0][1], moves[0][0] / 2)
    torch.testing.assert_close(moves[1][0], moves[0][0] / 10)


def test_half_precision_weights_have_curvature_in_float32():
    x, y = data()
    head = make_head(dtype=torch.bfloat16)
    optimizer = SoftmaxBound(head, weight_decay=DECAY)
    cross_entropy(head(x[:20].bfloat16()).float(), y[:20]).backward()
    optimizer.step()
    torch.testing.assert_close(joined(head), after_step(whole), rtol=0.05, atol=0.01)
    state = optimizer.state[head.weight]
    assert state["inputs"].dtype == torch.float32
    again = SoftmaxBound(make_head(dtype=torch.bfloat16), weight_decay=DECAY)
    again.load_state_dict(optimizer.state_dict())
    loaded = next(iter(again.state.values()))["inputs"]
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded, state["inputs"])


@pytest.mark.parametrize("curvature", ["bohning", "diag", "geometric"])
def test_a_vocabulary_of_thirty_thousand(curvature):
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 30_000)
    optimizer = SoftmaxBound(head, curvature=curvature)
    x, y = torch.randn(16, 16), torch.randint(30_000, (16,))
    losses = []
    for _ in range(5):
        losses.append(backward(head, x, y).item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.5
    state = [value for value in optimizer.state[head.weight].values() if isinstance(value, torch.Tensor)]
    assert sum(value.numel() for value in state) <= 30_000 + 17 * 17


def geometric_step(weight, variance, moment, gradient, damping, rows):
    """A step of "geometric" with lr 1 and no weight decay from averages of p (1 - p) `[n]` and x x' `[d, d]`."""
    k = np.kron(np.diag(np.sqrt(variance)), moment)
    delta = damping * np.trace(k) / len(k)
    system = k + delta * np.eye(len(k))
    degrees = np.trace(np.linalg.solve(system, k)) / len(variance)
    return weight - np.linalg.solve(system, gradient.ravel()).reshape(weight.shape) * rows / (rows + 3 * (degrees + 1))


def statistics(weight, x):
    """Mean of p (1 - p) `[n]` and of x x' `[d, d]`."""
    p = np.exp(x @ weight.T)
    p /= p.sum(1, keepdims=True)
    return (p * (1 - p)).mean(0), x.T @ x / len(x)


@pytest.mark.parametrize("max_rows", [64, 4])
def test_geometric_averages_over_steps_and_takes_the_root_then(max_rows):
    """Three steps against the formula written out; rows are left out for the logits, not for the inputs' moment."""
    x, y = data()
    head, weight = make_head(), start().numpy()
    optimizer = SoftmaxBound(head, curvature="geometric", damping=0.2, curvature_ema=0.6, max_rows=max_rows)
    parts, shares = [], []
    for step in range(3):
        rows = slice(20 * step, 20 * step + 20)
        kept = np.linspace(0, 19, max_rows).astype(int) if max_rows < 20 else np.arange(20)
        variance, _ = statistics(weight, x[rows].numpy()[kept])
        _, moment = statistics(weight, x[rows].numpy())
        parts, shares = [*parts, (variance, moment)], [0.6 * share for share in shares] + [0.4]
        variance, moment = (np.average([part[i] for part in parts], axis=0, weights=shares) for i in (0, 1))
        expected = gradient(torch.from_numpy(weight), x[rows], y[rows]).numpy()
        weight = geometric_step(weight, variance, moment, expected, 0.2, 20)
        optimizer.zero_grad()
        backward(head, x[rows], y[rows])
        optimizer.step()
        np.testing.assert_allclose(joined(head), weight, rtol=1e-9, atol=1e-9)


def test_tied_embeddings_are_refused():
    sizes = {"vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForMaskedLM(BertConfig(**sizes, intermediate_size=8))
    with pytest.raises(ValueError, match=r"also held by Embedding.*tie_word_embeddings=False"):
        SoftmaxBound(model.cls.predictions.decoder)
    decoder = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=8))
    with pytest.raises(ValueError, match="also held by Embedding"):
        SoftmaxBound(decoder.lm_head)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda h: SoftmaxBound(h.parameters()), TypeError, "takes an nn.Linear as head"),
        (lambda h: SoftmaxBound([h]), TypeError, "or dicts"),
        (lambda h: SoftmaxBound(h, lr=float("nan")), ValueError, "lr must be"),
        (lambda h: SoftmaxBound(h, weight_decay=-1.0), ValueError, "weight_decay must be"),
        (lambda h: SoftmaxBound(h, damping=0.0), ValueError, "damping and weight_decay are both 0"),
        (lambda h: SoftmaxBound(h, curvature="hessian"), ValueError, "curvature must be one of bohning"),
        (lambda h: SoftmaxBound(h, curvature_ema=1.0), ValueError, "curvature_ema must be"),
        (lambda h: SoftmaxBound(h, max_rows=0), ValueError, "max_rows must be"),
        (lambda h: SoftmaxBound([{"head": h}, {"head": h}]), ValueError, "more than one parameter group"),
        (lambda h: SoftmaxBound([{"head": h, "dampng": 1}]), ValueError, "has no option dampng"),
        (lambda h: SoftmaxBound(torch.nn.Linear(3, 1)), ValueError, "at least 2 outputs"),
        (lambda h: SoftmaxBound(h.requires_grad_(False)), ValueError, "weight frozen"),
        (lambda h: SPFB(h, order="asc"), ValueError, "order must be one of"),
        (lambda h: SoftmaxBound(h, order="descending"), ValueError, "'bohning' has no order"),
        (lambda h: BBM(h, lr=2.0), ValueError, "lr must be between 0 and 2"),
        (lambda h: BBM(h, weight_decay=0.0), ValueError, "weight_decay must be positive"),
        (lambda h: BBM(h, curvature="geometric"), ValueError, "curvature must be one of exact"),
        (lambda h: BBM(h).step(), TypeError, "needs a closure"),
        (lambda h: SPFB(h, weight_decay=0.0, literal=True), ValueError, "must be positive"),
        (lambda h: SBM(h, 0), ValueError, "num_examples at least 1"),
        (lambda h: SBM(h, 9, variant="both"), ValueError, "variant must be"),
        (lambda h: SBM(torch.nn.Linear(100, 51), 9), ValueError, "5151 parameters"),
        (lambda h: LSPFB(h, rank=0), ValueError, "rank must be"),
        (lambda h: LSPFB(h, rule="paper"), ValueError, "rule must be"),
    ],
)
def test_refusals_name_what_is_wrong(make, error, message):
    with pytest.raises(error, match=message):
        make(make_head())


def test_prox_takes_one_example():
    head = make_head()
    optimizer = ProxBoundSGD(head)
    x, y = data()
    backward(head, x[:2], y[:2])
    with pytest.raises(ValueError, match="takes one example per step on one process, got 2"):
        optimizer.step()


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.zeros(3, 5), None, r"x must be \[..., 4\]"),
        (torch.zeros(3, 4), torch.zeros(2), r"weight \[...\], got \(3, 4\) and \(2,\)"),
        (torch.zeros(()), None, r"x must be \[..., 4\]"),
        (torch.zeros(3, 4), -torch.ones(3), "weight must not be negative"),
    ],
)
def test_set_batch_checks_shapes(x, weight, message):
    with pytest.raises(ValueError, match=message):
        SoftmaxBound(make_head()).set_batch(x, weight)


def test_set_batch_needs_a_head_among_several():
    heads = make_head(), make_head()
    optimizer = SoftmaxBound([{"head": head} for head in heads])
    with pytest.raises(ValueError, match="head must be one of the 2"):
        optimizer.set_batch(torch.zeros(1, 4))


def test_inputs_that_are_not_finite_skip_the_step():
    head = make_head()
    optimizer = SoftmaxBound(head)
    x, y = data()
    backward(head, x[:20], y[:20])
    bad = x[:20].clone()
    bad[3, 1] = torch.nan
    optimizer.set_batch(bad)
    with pytest.warns(RuntimeWarning, match="skipped a step"):
        optimizer.step()
    assert torch.equal(joined(head), start())
    # The next step is as if the bad one had not been.
    optimizer.zero_grad()
    backward(head, x[:20], y[:20])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    reference = make_head()
    other = SoftmaxBound(reference)
    backward(reference, x[:20], y[:20])
    other.step()
    assert torch.equal(joined(head), joined(reference))
