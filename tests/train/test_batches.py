"""The order of samples: every one once, repeatable, and alike in length inside a batch where that is asked for."""

import torch

from favor.train.batches import EpochSampler

LENGTHS = torch.randint(5, 100, (103,), generator=torch.Generator().manual_seed(0)).tolist()
BATCH = 8


def padding(order: list[int]) -> int:
    """Tokens of padding, all batches together."""
    batches = [[LENGTHS[i] for i in order[start : start + BATCH]] for start in range(0, len(order), BATCH)]
    return sum(len(batch) * max(batch) - sum(batch) for batch in batches)


def test_batches_grouped_by_length():
    plain, grouped = EpochSampler(len(LENGTHS), 3), EpochSampler(len(LENGTHS), 3, LENGTHS, BATCH)
    orders = [list(plain), list(grouped)]
    assert all(sorted(order) == list(range(len(LENGTHS))) for order in orders)
    assert padding(orders[1]) < 0.5 * padding(orders[0])
    assert list(grouped) == orders[1]
    grouped.set_epoch(1)
    assert list(grouped) != orders[1]
    assert sorted(grouped) == list(range(len(LENGTHS)))


def test_grouped_batches_are_in_no_order():
    # Sorted ones would end every epoch with the shortest samples, and learn from these last.
    longest = []
    for epoch in range(40):
        grouped = EpochSampler(len(LENGTHS), 3, LENGTHS, BATCH)
        grouped.set_epoch(epoch)
        order = list(grouped)
        longest.append([max(LENGTHS[i] for i in order[start : start + BATCH]) for start in range(0, 96, BATCH)])
    means = torch.tensor(longest, dtype=torch.float64).mean(0)
    spread = torch.tensor(longest, dtype=torch.float64).std() / 40**0.5
    assert (means - means.mean()).abs().max() < 4 * spread
