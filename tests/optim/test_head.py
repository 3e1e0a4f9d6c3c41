"""Heads: precision, groups, vocabularies; the inputs that the loss depends on, and no others; what is refused."""

import copy
import gc
import io
import pickle

import pytest
import torch
from problem import DECAY, after_step, backward, data, joined, make_head, start, whole
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from favor.optim import BBM, LSPFB, SBM, SPFB, ProxBoundSGD, SoftmaxBound, exact_step_

X, Y = data()
ROWS, LABELS = X[:20], Y[:20]


def test_a_step_under_autocast_is_computed_in_full():
    head, plain = make_head(dtype=torch.float32), make_head(dtype=torch.float32)
    one, two = SoftmaxBound(head), SoftmaxBound(plain)
    for optimizer, layer in ((one, head), (two, plain)):
        backward(layer, ROWS, LABELS)
        with torch.autocast("cpu", torch.bfloat16, enabled=optimizer is one):
            optimizer.step()
    assert torch.equal(head.weight, plain.weight)


def test_curvature_can_change_on_the_way():
    head = make_head()
    optimizer = SoftmaxBound(head, weight_decay=DECAY, curvature="diag")
    for curvature in ("diag", "geometric", "bohning", "block"):
        optimizer.param_groups[0]["curvature"] = curvature
        with torch.no_grad():
            head.weight.copy_(start())
        backward(head, ROWS, LABELS)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(joined(head), after_step(whole, curvature=curvature))


def test_groups_have_their_own_options_and_schedulers_reach_them():
    heads = make_head(), make_head()
    optimizer = SoftmaxBound([{"head": heads[0]}, {"head": heads[1], "lr": 0.5}], weight_decay=DECAY)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1**step)
    moves = []
    for _ in range(2):
        for head in heads:
            with torch.no_grad():
                head.weight.copy_(start())
            backward(head, ROWS, LABELS)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        moves.append([joined(head) - start() for head in heads])
    torch.testing.assert_close(moves[0][1], moves[0][0] / 2)
    torch.testing.assert_close(moves[1][0], moves[0][0] / 10)


def test_half_precision_weights_have_curvature_in_float32():
    head = make_head(dtype=torch.bfloat16)
    optimizer = SoftmaxBound(head, weight_decay=DECAY)
    cross_entropy(head(ROWS.bfloat16()).float(), LABELS).backward()
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


def test_tied_embeddings_are_refused():
    model = BertForMaskedLM(BertConfig(vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(ValueError, match=r"also held by Embedding.*tie_word_embeddings=False"):
        SoftmaxBound(model.cls.predictions.decoder)
    decoder = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=8))
    with pytest.raises(ValueError, match="also held by Embedding"):
        SoftmaxBound(decoder.lm_head)


def steps_of_two_rows(head):
    optimizer = ProxBoundSGD(head)
    backward(head, X[:2], Y[:2])
    optimizer.step()


def step_of_unseen_inputs(head):
    optimizer = SoftmaxBound(head)
    cross_entropy(X @ head.weight.T, Y).backward()
    optimizer.step()


Z, COPIED = torch.zeros, r"cannot be copied or pickled: use state_dict"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        *((lambda h, c=c: c(SoftmaxBound(h)), TypeError, COPIED) for c in (copy.copy, copy.deepcopy, pickle.dumps)),
        (steps_of_two_rows, ValueError, "takes one example per step on one process, got 2"),
        (step_of_unseen_inputs, RuntimeError, r"none of its inputs were seen.*set_batch"),
        (lambda h: SoftmaxBound(h).set_batch(Z(3, 5)), ValueError, r"x must be \[..., 4\]"),
        (lambda h: SoftmaxBound(h).set_batch(Z(())), ValueError, r"x must be \[..., 4\]"),
        (lambda h: SoftmaxBound(h).set_batch(Z(3, 4), Z(2)), ValueError, r"weight \[...\], got \(3, 4\) and \(2,\)"),
        (lambda h: SoftmaxBound(h).set_batch(Z(3, 4), Z(3) - 1), ValueError, "weight must not be negative"),
        (lambda h: SoftmaxBound([{"head": h}, {"head": make_head()}]).set_batch(Z(1, 4)), ValueError, "one of the 2"),
        *(
            (lambda h, o=o: exact_step_(start(), Z(4).double(), 0, **o), ValueError, "damping must be positive, lr and")
            for o in ({"damping": 0.0}, {"damping": -0.01}, {"damping": float("nan")}, {"damping": 1, "lr": -1})
        ),
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


def halves(_, head):
    for rows in (slice(10), slice(10, 20)):
        (cross_entropy(head(X[rows]), Y[rows]) / 2).backward()


def ignored(_, head):
    """As in a masked-LM batch: the body below the head is trained, and most targets are ignored."""
    rows = torch.cat((X[20:60], ROWS)).reshape(12, 5, -1).requires_grad_()
    cross_entropy(head(rows).flatten(0, 1), torch.cat((torch.full((40,), -100), LABELS))).backward()


def late(optimizer, head):
    """Forward passes that are never differentiated: before `zero_grad`, without gradients, and after the last."""
    head(1e6 * X)
    optimizer.zero_grad()
    with torch.no_grad():
        head(1e6 * X)
    loss = cross_entropy(head(ROWS), LABELS)
    optimizer.zero_grad()
    loss.backward()
    head(1e3 * X)


def checkpointed(_, head):
    """A pass that is repeated."""
    rows, targets = X.clone().requires_grad_(), torch.cat((LABELS, torch.full((40,), -100)))
    checkpoint(lambda r: cross_entropy(head(r), targets), rows, use_reentrant=False).backward()


def copied(_, head):
    """Copies of the model, which are trained with other inputs."""
    stream = io.BytesIO()
    torch.save(head, stream)
    stream.seek(0)
    for other in (copy.deepcopy(head), torch.load(stream, weights_only=False)):
        backward(other, 1e3 * X, Y)
    whole(_, head)


def by_keyword(_, head):
    cross_entropy(head(input=ROWS.clone().requires_grad_()), LABELS).backward()


def single(_, head):
    """One input without a batch."""
    cross_entropy(head(X[0]), Y[0]).backward()


def fused(optimizer, head):
    """As a loss that never calls the head."""
    cross_entropy(ROWS @ head.weight.T, LABELS).backward()
    weight = torch.cat((torch.full((20,), 1 / 20, dtype=torch.float64), torch.zeros(40)))
    optimizer.set_batch(X.reshape(6, 10, -1), weight.reshape(6, 10))


def by_hand(optimizer, head):
    """In parts, without capture."""
    whole(optimizer, head)
    for rows in (X[:5], X[5:20]):
        optimizer.set_batch(rows, torch.full((len(rows),), 1 / 20, dtype=torch.float64))


@pytest.mark.parametrize(
    ("prepare", "curvature"),
    [
        *((prepare, own) for prepare in (halves, ignored) for own in ("bohning", "diag", "block", "kfac", "exact")),
        *((prepare, "bohning") for prepare in (late, checkpointed, copied, by_keyword, by_hand, single, fused)),
        (fused, "exact"),
    ],
)
def test_the_inputs_are_those_of_one_batch(prepare, curvature):
    options = {"curvature": curvature, "capture": prepare is not by_hand}
    rows = 1 if prepare is single else 20
    expected = after_step(lambda _, head: backward(head, X[:rows], Y[:rows]), curvature=curvature)
    torch.testing.assert_close(after_step(prepare, **options), expected, rtol=1e-10, atol=1e-12)


def test_nothing_stays_on_the_head_of_an_optimizer_that_is_gone():
    head = make_head()
    optimizer = SoftmaxBound(head, capture=False)
    assert not head._forward_hooks
    optimizer = SoftmaxBound(head)
    assert len(head._forward_hooks) == 1
    del optimizer
    gc.collect()
    assert not head._forward_hooks


def no_targets(head):
    cross_entropy(head(ROWS.clone().requires_grad_()), torch.full((20,), -100), reduction="sum").backward()


@pytest.mark.parametrize(
    ("prepare", "curvature", "decay"),
    [
        (lambda head: None, "bohning", DECAY),
        (no_targets, "bohning", DECAY),
        *((lambda h: backward(h, 0 * ROWS, LABELS), own, 0.0) for own in ("bohning", "diag", "block", "kfac", "exact")),
    ],
)
def test_nothing_happens_without_gradients_targets_or_inputs_that_are_not_zero(prepare, curvature, decay):
    head = make_head()
    optimizer = SoftmaxBound(head, weight_decay=decay, curvature=curvature)
    prepare(head)
    optimizer.step()
    assert torch.equal(joined(head), start())
