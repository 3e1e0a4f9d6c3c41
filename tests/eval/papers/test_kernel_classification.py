"""Kernel classification: reading of data, estimates against formulas written out, small runs of the program."""

import gzip

import numpy as np
import pytest
import torch
from sklearn.kernel_approximation import RBFSampler
from sklearn.metrics.pairwise import rbf_kernel

from favor import features
from favor.eval.papers import datasets as kernel_data
from favor.eval.papers import kernel_classification as program
from favor.eval.papers.kernel_classification import METHODS

SCALE = 0.5


@pytest.fixture(scope="module")
def iris():
    """Queries, training inputs (standardised), their labels, and training labels one-hot."""
    inputs, labels = program.split(kernel_data.load("iris", None).shuffled(0))
    x = torch.from_numpy(np.concatenate((inputs["validation"], inputs["test"])))
    targets = torch.from_numpy(np.concatenate((labels["validation"], labels["test"])))
    onehot = torch.nn.functional.one_hot(torch.from_numpy(labels["train"]), 3).float()
    return x, torch.from_numpy(inputs["train"]), targets, onehot


def naive_scores(method: str, x, y, onehot, count: int, seed: int) -> torch.Tensor:
    """The estimate of FAVOR#, section 5.2, in float64, without stabilisation and with every factor."""
    if method == program.RBF_SAMPLER:
        sampler = RBFSampler(gamma=0.5, n_components=count, random_state=seed).fit(x.numpy())
        kernel = torch.from_numpy(sampler.transform(x.numpy()) @ sampler.transform(y.numpy()).T)
    else:
        rf = features.get(method, alpha=-0.5)
        omega = rf.draw(count, x.shape[-1], generator=torch.Generator().manual_seed(seed))
        if method == "trig":
            kernel = rf.kernel(x, y, omega)
        else:
            params = rf.fit(x, y)
            logs = [rf.log_phi(rows, omega, params, side) for rows, side in ((x, "query"), (y, "key"))]
            kernel = logs[0].exp() @ logs[1].exp().T / count
    return kernel @ onehot.double()


@pytest.mark.parametrize("method", METHODS)
def test_scores_are_those_of_the_estimated_kernel(method, iris):
    """Up to a factor of each query, at the largest M and at a smaller one that shares its draw."""
    x, y, _, onehot = iris
    x, y = SCALE * x, SCALE * y
    large, small = program.scorer(method, x, y, onehot, 32)(
        3, [program.columns_of(method, count, 32) for count in (32, 8)]
    )
    expected = naive_scores(method, x, y, onehot, 32, 3)
    if method in program.POSITIVE:
        large, small = large / large.sum(-1, keepdim=True), small / small.sum(-1, keepdim=True)
        expected = expected / expected.sum(-1, keepdim=True)
    else:
        large = large * expected.abs().max() / large.abs().max()
    torch.testing.assert_close(large.double(), expected, rtol=0, atol=1e-4)
    assert not torch.allclose(small, large, atol=1e-3)
    x, y, _, onehot = iris
    for scale in (1e-2, 100.0, 1e4):  # any scale gives finite scores
        for scores in program.scorer(method, scale * x, scale * y, onehot, 16)(0, [torch.arange(16), torch.arange(4)]):
            assert scores.isfinite().all()
            assert method not in program.POSITIVE or (scores.sum(-1) > 0.1).all()


@pytest.mark.parametrize("method", ["pos", "cderf"])
def test_the_first_features_are_a_draw_of_their_own(method, iris):
    x, y, _, onehot = iris
    x, y = SCALE * x, SCALE * y
    pick = program.columns_of(method, 8, 32)
    (scores,) = program.scorer(method, x, y, onehot, 32)(3, [pick])
    rf = features.get(method, alpha=-0.5)
    omega = rf.draw(32, 4, generator=torch.Generator().manual_seed(3))[pick]
    if rf.antithetic:
        torch.testing.assert_close(omega[4:], -omega[:4])
    expected = rf.kernel(x, y, omega, rf.fit(x, y)) @ onehot.double()
    expected, scores = expected / expected.sum(-1, keepdim=True), scores / scores.sum(-1, keepdim=True)
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_accuracy_of_the_exact_kernel(iris, scale):
    x, y, targets, onehot = iris
    weights = torch.from_numpy(rbf_kernel(scale * x.numpy(), scale * y.numpy(), gamma=0.5)).double()
    near = torch.cdist(x, y).argmin(-1)  # what is left of the kernel where it underflows
    weights[torch.arange(len(x)), near] += 1e-300
    expected = ((weights @ onehot.double()).argmax(-1) == targets).double().mean().item()
    assert program.exact_accuracy(scale * x, scale * y, targets, onehot) == pytest.approx(expected)


def test_evaluate_chooses_the_scale_on_validation_and_tests_on_fresh_draws(monkeypatch):
    scales, counts = (0.01, 0.5, 2.0), (8, 32)
    for name, value in {"SCALES": scales, "COUNTS": counts, "DRAWS": 4, "METHODS": ("gerf", "trig")}.items():
        monkeypatch.setattr(program, name, value)
    dataset = kernel_data.load("iris", None).shuffled(1)
    result = program.evaluate(dataset)
    inputs, labels = program.split(dataset)
    x, y, held = (torch.from_numpy(inputs[part]) for part in ("validation", "train", "test"))
    onehot = torch.nn.functional.one_hot(torch.from_numpy(labels["train"]), 3).float()
    targets = {part: torch.from_numpy(values) for part, values in labels.items()}
    for method in ("gerf", "trig"):
        by_scale = [
            program.accuracies(method, s * x, s * y, targets["validation"], onehot, counts, range(4)).mean(-1)
            for s in scales
        ]
        for i, count in enumerate(counts):
            s = scales[int(np.argmax([row[i] for row in by_scale]))]
            cell = result["methods"][method][str(count)]
            assert cell["scale"] == s
            seeds = range(program.FIRST_TEST_SEED, program.FIRST_TEST_SEED + 4)
            test = program.accuracies(method, s * held, s * y, targets["test"], onehot, counts, seeds)
            assert cell["test"] == pytest.approx(test[i].mean())
            assert cell["std"] == pytest.approx(test[i].std(ddof=1))
    assert result["sizes"] == {"train": 134, "validation": 8, "test": 8}


def test_reading_of_formats(tmp_path):
    text, plain = "1,red,0.5,a\n2,blue,1e3,b\n3,red,-1,a\n", [[1, 0, 1, 0.5], [2, 1, 0, 1000], [3, 0, 1, -1]]
    arff = "% about\n@relation r\n@attribute a {x,y}\n@DATA\n" + text.replace("3,red", "% no row\n3,red")
    (tmp_path / "zipped.arff.gz").write_bytes(gzip.compress(arff.encode()))
    files = {
        "plain.csv": (text, plain),
        "head.csv": (f"size,colour,weight,kind\n{text}", plain),
        "zipped.arff.gz": (None, plain),
        "yeast.data": ("  Name  mcg gvh class\n  A_1  0.5 0.25 MIT\n  B_2  0.75  1 CYT\n", [[0.5, 0.25], [0.75, 1]]),
        "krkopt.data": (
            "wkf,wkr,wrf,wrr,bkf,bkr,depth\na,1,b,3,h,2,draw\nc,2,d,8,g,7,one\n",
            [[1, 1, 2, 3, 8, 2], [3, 2, 4, 8, 7, 7]],
        ),
    }
    for file, (content, expected) in files.items():
        if content is not None:
            (tmp_path / file).write_text(content)
        found = kernel_data.load(file.split(".")[0], tmp_path)
        np.testing.assert_array_equal(found.x, expected)
        assert found.labels.tolist() == ([0, 1, 0] if expected is plain else [[1, 0], [0, 1]][file == "krkopt.data"])
        assert found.classes == 2


def test_bad_data_are_refused(tmp_path):
    (tmp_path / "ragged.csv").write_text("1,2,3\n1,2\n")
    for name, folder, message in (
        ("abalone", None, "without data_dir, datasets must be among iris, wine"),
        ("mine", tmp_path, r"no file mine with ending .csv"),
        ("ragged", tmp_path, "rows of different widths or one"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel_data.load(name, folder)
    few = kernel_data.Dataset("few", np.zeros((9, 2)), np.zeros(9, dtype=int), 1)
    with pytest.raises(ValueError, match="at least 10 are needed"):
        program.split(few)


def test_split_is_90_5_5_and_standardised_on_the_training_part():
    source = np.random.default_rng(0)
    x = np.concatenate((source.normal(5, 3, (200, 2)), np.ones((200, 1))), axis=1)
    dataset = kernel_data.Dataset("x", x, np.arange(200), 200)
    inputs, labels = program.split(dataset.shuffled(0))
    assert [len(inputs[part]) for part in ("train", "validation", "test")] == [180, 10, 10]
    assert sorted(np.concatenate(list(labels.values()))) == list(range(200))
    np.testing.assert_allclose(inputs["train"].mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(inputs["train"].std(0), [1, 1, 0], atol=1e-12)
    train = x[labels["train"]]
    np.testing.assert_allclose(inputs["test"][:, 0], (x[labels["test"], 0] - train[:, 0].mean()) / train[:, 0].std())
    assert len(dataset.shuffled(0, 50).labels) == 50
    assert (dataset.shuffled(0, 50).labels == dataset.shuffled(0).labels[:50]).all()
    assert (dataset.shuffled(0).labels != dataset.shuffled(1).labels).any()


def test_the_program(tmp_path, capsys, monkeypatch, ran):
    for name, value in {"SCALES": (0.3, 1.0), "COUNTS": (4, 16), "DRAWS": 3}.items():
        monkeypatch.setattr(program, name, value)
    rows = np.random.default_rng(0).normal(size=(50, 3))
    lines = [",".join([*map(str, row), "yes" if row.sum() > 0 else "no"]) for row in rows]
    (tmp_path / "mine.csv").write_text("\n".join(lines))
    content, markdown = ran(program, "--data_dir", tmp_path, "--datasets", "mine", "iris", "--shuffles", 2)
    command = "python -m favor.eval.papers.kernel_classification --data_dir DATA --datasets mine"
    assert content["command"].startswith(command)
    mine = content["datasets"]["mine"]
    assert (mine["rows"], mine["dim"], mine["classes"], len(mine["splits"])) == (50, 3, 2, 2)
    values = [split["methods"]["cderf"]["16"]["test"] for d in content["datasets"].values() for split in d["splits"]]
    assert program.curve(list(content["datasets"].values()), "cderf")[1] == pytest.approx(100 * np.mean(values))
    assert f"{100 * np.mean(values):.1f}" in markdown
    assert "mean accuracy of sderf is at least that of gerf" in capsys.readouterr().out


def test_checks_fail_when_the_numbers_say_so(monkeypatch):
    monkeypatch.setattr(program, "COUNTS", (16,))

    def result(**accuracy):
        return {"splits": [{"methods": {name: {"16": {"test": value}} for name, value in accuracy.items()}}]}

    results = {"one": result(gerf=0.5, sderf=0.7, cderf=0.6), "two": result(gerf=0.6, sderf=0.6, cderf=0.6)}
    first, second = program.checks(results)
    assert not first.holds
    assert "M = 16: 60.00 and 65.00" in first.numbers
    assert second.holds
