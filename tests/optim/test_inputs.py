"""What the optimizers take from training: the inputs that the loss depends on, and no others."""

import copy
import gc
import io

import pytest
import torch
from problem import DECAY, after_step, backward, data, joined, make_head, start, whole
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from favor.optim import SoftmaxBound

X, Y = data()
ROWS, LABELS = X[:20], Y[:20]


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
