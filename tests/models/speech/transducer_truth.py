"""Transducer loss from its definition: every alignment one by one, or node by node with autograd."""

from itertools import combinations

import torch
from torch import Tensor, nn

LENGTHS = ([6, 1, 3, 4], [4, 2, 0, 3])


def by_enumeration(logits: Tensor, target: list[int], blank: int) -> Tensor:
    """Loss of one sequence, logits `[T, U + 1, V]`: minus the log of the sum over all alignments of their products.

    An alignment is a row of T blanks and U labels that ends with a blank.
    """
    frames, steps = len(logits), len(logits) + len(target)
    log_p = logits.log_softmax(-1)
    alignments = []
    for places in combinations(range(steps - 1), len(target)):
        t = u = 0
        terms = []
        for step in range(steps):
            if step in places:
                terms.append(log_p[t, u, target[u]])
                u += 1
            else:
                terms.append(log_p[t, u, blank])
                t += 1
        assert (t, u) == (frames, len(target))
        alignments.append(torch.stack(terms).sum())
    return -torch.stack(alignments).logsumexp(0)


def by_nodes(logits: Tensor, target: list[int], blank: int) -> Tensor:
    """The same by recursion over nodes, for autograd."""
    log_p = logits.log_softmax(-1)
    alpha: dict[tuple[int, int], Tensor] = {(0, 0): logits.new_zeros(())}
    for t in range(len(logits)):
        for u in range(len(target) + 1):
            ways = []
            if t:
                ways.append(alpha[t - 1, u] + log_p[t - 1, u, blank])
            if u:
                ways.append(alpha[t, u - 1] + log_p[t, u - 1, target[u - 1]])
            if ways:
                alpha[t, u] = torch.stack(ways).logsumexp(0)
    return -(alpha[len(logits) - 1, len(target)] + log_p[-1, len(target), blank])


def losses(logits: Tensor, targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor, blank=0, one=by_nodes):
    """Loss of each sequence `[B]`."""
    rows = zip(logits, targets.tolist(), logit_lengths.tolist(), target_lengths.tolist(), strict=True)
    return torch.stack([one(x[:frames, : count + 1], row[:count], blank) for x, row, frames, count in rows])


def batch(frames=LENGTHS[0], labels=LENGTHS[1], vocabulary=7, blank=0, dtype=torch.float64, scale=1.0, seed=0):
    """Random logits, targets padded with -100, and lengths."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(
        len(frames), max(frames), max(labels) + 1, vocabulary, generator=generator, dtype=torch.float64
    )
    targets = torch.randint(vocabulary - 1, (len(frames), max(labels)), generator=generator)
    targets += targets >= blank
    for row, count in enumerate(labels):
        targets[row, count:] = -100
    return (logits * scale).to(dtype), targets, torch.tensor(frames), torch.tensor(labels)


class TanhJoint(nn.Module):
    """A usual joint network, in float64 unless cast."""

    def __init__(self, hidden=5, prediction=4, width=8, vocabulary=7, dropout=0.0):
        super().__init__()
        self.hidden = nn.Linear(hidden, width)
        self.prediction = nn.Linear(prediction, width, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary)
        self.double()

    def forward(self, hidden, prediction):
        return self.head(self.dropout(torch.tanh(self.hidden(hidden) + self.prediction(prediction))))
