"""A small number of test cases that still has every pair of values of two parameters."""

from itertools import combinations, product


def pairs(**axes):
    """Makes names and cases for `pytest.mark.parametrize(*pairs(...))`: every pair of values of two axes is in a case.

    The cases are equal in every run. With at most two axes they are the full product.
    """
    columns = [list(values) for values in axes.values()]
    sizes = [len(values) for values in columns]
    if len(sizes) < 3:
        return tuple(axes), list(product(*columns))
    # A pair is two positions (axis, value). A dict keeps the order of the pairs, a set does not.
    open_pairs = {
        ((i, a), (j, b)): None
        for i, j in combinations(range(len(sizes)), 2)
        for a, b in product(range(sizes[i]), range(sizes[j]))
    }
    cases = []
    while open_pairs:
        case = dict(next(iter(open_pairs)))
        for axis in sorted(set(range(len(sizes))) - set(case), key=lambda axis: -sizes[axis]):
            # Take the value that covers most open pairs with those chosen so far; if several do, rotate among them.
            gains = [
                sum(tuple(sorted(((axis, value), other))) in open_pairs for other in case.items())
                for value in range(sizes[axis])
            ]
            order = [(len(cases) + shift) % sizes[axis] for shift in range(sizes[axis])]
            case[axis] = max(order, key=gains.__getitem__)
        for pair in combinations(sorted(case.items()), 2):
            open_pairs.pop(pair, None)
        cases.append(tuple(values[case[axis]] for axis, values in enumerate(columns)))
    return tuple(axes), cases
