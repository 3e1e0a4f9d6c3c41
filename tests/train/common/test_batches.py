"""The order of samples: every one once, repeatable, and alike in length inside a batch where that is asked for."""

from itertools import product

import torch

from favor.train.common.loop import EpochSampler, mix

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
    for epoch in range(60):
        grouped = EpochSampler(len(LENGTHS), 3, LENGTHS, BATCH)
        grouped.set_epoch(epoch)
        lengths = torch.tensor([LENGTHS[i] for i in grouped], dtype=torch.float64)
        longest.append(torch.stack([batch.mean() for batch in lengths.split(BATCH)]))
    means, spread = torch.stack(longest).mean(0), torch.stack(longest).std() / 60**0.5
    assert len(means) == 13  # the last one of 7 samples
    assert (means - sum(LENGTHS) / len(LENGTHS)).abs().max() < 4 * spread


def test_fewer_samples_than_a_batch():
    assert sorted(EpochSampler(5, 3, LENGTHS[:5], BATCH)) == list(range(5))


def test_no_two_lists_of_numbers_give_one_seed():
    lists = [numbers for length in range(5) for numbers in product(range(4), repeat=length)]
    assert len({mix(*numbers) for numbers in lists}) == len(lists)
