"""The cases of `pairs` hold every pair of values, are few, and do not change."""

from itertools import combinations
from math import prod

import pytest
from pairwise import pairs


@pytest.mark.parametrize("sizes", [(3, 2, 2), (2, 2, 2, 2), (4, 3, 3, 2), (7, 2, 5, 3, 2), (1, 4, 1)], ids=str)
def test_every_pair_of_values_meets_in_few_cases(sizes: tuple[int, ...]) -> None:
    axes = {f"axis_{i}": [f"{i}.{j}" for j in range(size)] for i, size in enumerate(sizes)}
    names, cases = pairs(**axes)
    assert names == tuple(axes)
    met = {pair for case in cases for pair in combinations(case, 2)}
    wanted = {(a, b) for one, two in combinations(axes.values(), 2) for a in one for b in two}
    assert met == wanted
    assert len(set(cases)) == len(cases)
    largest = sorted(sizes)[-1] * sorted(sizes)[-2]
    assert largest <= len(cases) <= min(prod(sizes), largest + sum(sizes))
    assert pairs(**axes) == (names, cases)


def test_two_axes_give_the_full_product_and_values_need_no_hash() -> None:
    assert pairs(one=[{}, []], two="ab") == (("one", "two"), [({}, "a"), ({}, "b"), ([], "a"), ([], "b")])
    assert pairs(one={1: None, 2: None}) == (("one",), [(1,), (2,)])
    assert len(pairs(one=[{}, []], two="ab", three=(None, 0))[1]) == 4
