"""Reports on features (kernel classification, variances, weights) against formulas, and small runs of them."""

import gzip
import math

import numpy as np
import pytest
import torch
from sklearn.kernel_approximation import RBFSampler
from sklearn.metrics.pairwise import rbf_kernel
from transformers import LlamaForCausalLM

import favor
from favor import features
from favor.eval.papers import datasets as kernel_data
from favor.eval.papers import feature_weights, variance
from favor.eval.papers import kernel_classification as program
from favor.eval.papers.feature_weights import PLAIN, REFINED, WEIGHTS, Divergences, Variant
from favor.eval.papers.kernel_classification import METHODS
from favor.integrations.adapt import calibrate
from favor.integrations.adapt.observe import observe

SCALE = 0.5


@pytest.fixture(scope="module")
def iris():
    """Queries, training inputs (standardised), their labels, and training labels one-hot."""
    inputs, labels = program.split(kernel_data.load("iris", None).shuffled(0))
    x = torch.from_numpy(np.concatenate((inputs["validation"], inputs["test"])))
    targets = torch.from_numpy(np.concatenate((labels["validation"], labels["test"])))
    onehot = torch.nn.functional.one_hot(torch.from_numpy(labels["train"]), 3).float()
    return x, torch.from_numpy(inputs["train"]), targets, onehot


def naive_scores(method: str, x, y, onehot, pick, seed: int) -> torch.Tensor:
    """The estimate of FAVOR#, section 5.2, in float64, without stabilisation, with `pick` of 32 features."""
    if method == program.RBF_SAMPLER:
        sampler = RBFSampler(gamma=0.5, n_components=32, random_state=seed).fit(x.numpy())
        kernel = torch.from_numpy(sampler.transform(x.numpy())[:, pick] @ sampler.transform(y.numpy())[:, pick].T)
    else:
        rf = features.get(method, alpha=-0.5)
        omega = rf.draw(32, x.shape[-1], generator=torch.Generator().manual_seed(seed))
        if method == "trig":
            kernel = rf.kernel(x, y, omega[pick[: len(pick) // 2]])
        else:
            omega, params = omega[pick], rf.fit(x, y)
            if rf.antithetic:
                half = len(pick) // 2
                torch.testing.assert_close(omega[half:], -omega[:half])
            logs = [rf.log_phi(rows, omega, params, side) for rows, side in ((x, "query"), (y, "key"))]
            kernel = logs[0].exp() @ logs[1].exp().T / len(pick)
    return kernel @ onehot.double()


@pytest.mark.parametrize("method", METHODS)
def test_scores_are_those_of_the_estimated_kernel(method, iris):
    """Up to a factor of each query, at the largest M and at a smaller one that shares its draw."""
    x, y, _, onehot = iris
    x, y = SCALE * x, SCALE * y
    picks = [program.columns_of(method, count, 32) for count in (32, 8)]
    for pick, scores in zip(picks, program.scorer(method, x, y, onehot, 32)(3, picks), strict=True):
        expected = naive_scores(method, x, y, onehot, pick, 3)
        if method in program.POSITIVE:
            expected, scores = expected / expected.sum(-1, keepdim=True), scores / scores.sum(-1, keepdim=True)
        else:
            scores = scores * expected.abs().max() / scores.abs().max()
        torch.testing.assert_close(scores.double(), expected, rtol=0, atol=1e-4)
    x, y, _, onehot = iris
    for scale in (1e-2, 100.0, 1e4):  # any scale gives finite scores
        for scores in program.scorer(method, scale * x, scale * y, onehot, 16)(0, [torch.arange(16), torch.arange(4)]):
            assert scores.isfinite().all()
            assert method not in program.POSITIVE or (scores.sum(-1) > 0.1).all()


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_accuracy_of_the_exact_kernel(iris, scale):
    x, y, targets, onehot = iris
    weights = torch.from_numpy(rbf_kernel(scale * x.numpy(), scale * y.numpy(), gamma=0.5)).double()
    near = torch.cdist(x, y).argmin(-1)  # what is left of the kernel where it underflows
    weights[torch.arange(len(x)), near] += 1e-300
    expected = ((weights @ onehot.double()).argmax(-1) == targets).double().mean().item()
    assert program.exact_accuracy(scale * x, scale * y, targets, onehot) == pytest.approx(expected)


def test_evaluate_chooses_the_scale_on_validation_and_tests_on_fresh_draws(sized):
    scales, counts = (0.01, 0.5, 2.0), (8, 32)
    sized(program, SCALES=scales, COUNTS=counts, DRAWS=4, METHODS=("gerf", "trig"))
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
    chess = "wkf,wkr,wrf,wrr,bkf,bkr,depth"
    text, plain = "1,red,0.5,a\n2,blue,1e3,b\n3,red,-1,a\n", [[1, 0, 1, 0.5], [2, 1, 0, 1000], [3, 0, 1, -1]]
    arff = "% about\n@relation r\n@attribute a {x,y}\n@DATA\n" + text.replace("3,red", "% no row\n3,red")
    (tmp_path / "zipped.arff.gz").write_bytes(gzip.compress(arff.encode()))
    files = {
        "plain.csv": (text, plain),
        "head.csv": (f"size,colour,weight,kind\n{text}", plain),
        "zipped.arff.gz": (None, plain),
        "yeast.data": ("  Name  mcg gvh class\n  A_1  0.5 0.25 MIT\n  B_2  0.75  1 CYT\n", [[0.5, 0.25], [0.75, 1]]),
        "krkopt.data": (f"{chess}\na,1,b,3,h,2,draw\nc,2,d,8,g,7,one\n", [[1, 1, 2, 3, 8, 2], [3, 2, 4, 8, 7, 7]]),
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
    assert (dataset.shuffled(0).labels != dataset.shuffled(1).labels).any()


def test_the_program(tmp_path, capsys, sized, ran):
    sized(program, SCALES=(0.3, 1.0), COUNTS=(4, 16), DRAWS=3)
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


def sets(sigma: float = 0.4, length: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(sigma * rows for rows in variance.draw_sets("heterogen", length, {}, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("sigma", [0.01, 0.1, 1.0])
def test_trigonometric_features(sigma):
    x, y = sets(sigma)
    r = (x[:, None] - y).square().sum(-1)
    phase = variance.log_relative_variance("trig (phase)", x, y)
    torch.testing.assert_close(phase, (r.exp() + (-r).exp() / 2 - 1).log(), rtol=0, atol=1e-9)
    pair = variance.log_relative_variance("trig (sin/cos)", x, y)
    torch.testing.assert_close(pair, (2 * (torch.cosh(r) - 1)).log(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", variance.FAMILIES)
@pytest.mark.parametrize("sigma", [0.02, 0.4])
def test_the_fast_form_is_the_formula_of_the_library(name, sigma):
    x, y = sets(sigma, length=80)
    rf = variance.FAMILIES[name]
    moment = rf.log_relative_second_moment(x, y, rf.fit(x, y))
    expected = moment + torch.log(-torch.expm1(-moment))
    torch.testing.assert_close(variance.log_relative_variance(name, x, y), expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", ["saderf", "aderf", "cderf"])
def test_dead_pixels_do_no_harm(name):
    """Coordinates that are zero in one set or in both, with next to no regularisation, against SDERF's number."""
    x, y = sets(1.0, length=300)
    x[:, :10] = 0
    y[:, 5:15] = 0
    y = y[:, torch.randperm(64, generator=torch.Generator().manual_seed(1))]
    value = variance.log_relative_variance(name, x, y).mean()
    assert value < 1.5 * variance.log_relative_variance("sderf", x, y).mean()


def test_resize_averages_over_areas():
    images = np.arange(2 * 32 * 32).reshape(2, 32, 32)
    blocks = images.reshape(2, 8, 4, 8, 4).mean((2, 4))
    np.testing.assert_allclose(variance.resize(images), blocks)
    np.testing.assert_allclose(variance.resize(np.ones((1, 28, 28))), np.ones((1, 8, 8)))
    row = np.array([[[6.0, 3.0, 0.0]] * 3])
    np.testing.assert_allclose(variance.resize(row, 2)[0, 0], [(6 + 1.5) / 1.5, 1.5 / 1.5])


def test_regimes():
    generator = torch.Generator().manual_seed(0)
    x, y = variance.draw_sets("sphere", 500, {}, generator)
    torch.testing.assert_close(x.norm(dim=-1), torch.ones(500, dtype=torch.float64))
    assert y.mean(0).norm() < 0.1
    x, y = variance.draw_sets("heterogen", 2000, {}, generator)
    assert abs(x.mean().item()) < 0.02
    assert y.mean().item() == pytest.approx(1, abs=0.02)
    images = {"mnist": torch.arange(20.0)[:, None].expand(-1, 64), "cifar10": 100 + torch.zeros(3, 64)}
    x, y = variance.draw_sets("mnist", 10, images, generator)
    assert sorted(torch.cat((x, y))[:, 0].tolist()) == list(range(20))
    x, y = variance.draw_sets("mnist/cifar10", 10, images, generator)
    assert x.max() < 20
    assert (y == 100).all()
    assert len(y) == 10


def test_the_figure_of_variances(tmp_path, capsys, sized, ran):
    sized(variance, SETS=2, VECTORS=16, SIGMAS=(0.5, 1.0))
    source = np.random.default_rng(0)
    np.savez(tmp_path / "mnist_10k.npz", x_train=source.integers(0, 256, (40, 28, 28), dtype=np.uint8))
    np.savez(tmp_path / "cifar10_gray_6k.npz", x=source.integers(0, 256, (40, 32, 32), dtype=np.uint8))
    content, markdown = ran(variance, "--images_dir", tmp_path)
    assert content["command"] == "python -m favor.eval.papers.variance --images_dir DATA --name x"
    generator = torch.Generator().manual_seed(2)
    pairs = [variance.draw_sets("heterogen", 16, {}, generator) for _ in range(2)]
    expected = np.mean([variance.log_relative_variance("gerf", 0.5 * x, 0.5 * y).mean() for x, y in pairs])
    value = content["log_relative_variance"]["heterogen"]["gerf"][0]
    assert value == pytest.approx(expected, abs=1e-10)
    assert f" {value:.3f} " in markdown
    assert "holds: heterogen: sderf is below gerf" in capsys.readouterr().out
    np.savez(tmp_path / "mnist_10k.npz", other=np.zeros((2, 28, 28)))
    with pytest.raises(ValueError, match=r"expected the array 'x_train' in .*, got other"):
        variance.load_images(tmp_path)
    (tmp_path / "mnist_10k.npz").unlink()
    with pytest.raises(ValueError, match=r"images_dir must hold mnist_10k.npz, with x_train"):
        variance.load_images(tmp_path)


def test_without_a_folder_scikit_learn_stands_in():
    images, _ = variance.load_images(None)
    for pixels in images.values():
        assert pixels.shape[1] == 64
        assert 0 <= pixels.min() < pixels.max() <= 1


def test_checks_of_variances_fail_when_the_numbers_say_so(monkeypatch):
    monkeypatch.setattr(variance, "SIGMAS", (1.0,))
    low = {name: [1.0] for name in variance.METHODS}
    results = {"heterogen": {**low, "cderf": [1.06], "gerf": [6.5]}, "cifar10": {**low, "gerf": [10.5]}}
    found = variance.checks(results)
    assert [check.holds for check in found] == [False, True, False]
    assert "0.06" in found[0].numbers
    assert found[2].line().startswith("DOES NOT HOLD: cifar10: sderf")


SMALL = ["--max_length", "32", "--baselines", "8", "16", "--windows", "0", "8", "--seeds", "0"]


def test_divergence_of_grouped_causal_heads(decoder_folder):
    """A window over everything is softmax; without one, row by row from the output of `favor_attention`."""
    decoder, ids = LlamaForCausalLM.from_pretrained(decoder_folder).eval(), torch.arange(20)[None] % 11
    exact, plain = Variant("favor+", 8, 32, PLAIN, 0), Variant("favor+", 8, 0, PLAIN, 0)
    found, seen = Divergences({exact: None, plain: None}), []
    with torch.no_grad():
        for callback in (found, seen.append):
            with observe(decoder, callback):
                decoder(ids)
    assert max(map(abs, found.divergence[exact])) < 1e-5
    assert max(found.error[exact]) < 1e-5
    o = seen[0]  # the first layer
    for head in range(4):
        options = {"features": "pos", "num_features": 8, "scale": o.scale, "layer": o.layer, "is_causal": True}
        eye = torch.eye(20).expand(1, 2, -1, -1)
        rows = favor.favor_attention(o.query, o.key, eye, **options)[0, head]
        total = 0.0
        for i in range(20):
            softmax = (o.scale * o.key[0, head // 2, : i + 1] @ o.query[0, head, i]).softmax(-1)
            total += (softmax * (softmax.log() - rows[i, : i + 1].log())).sum().item() / 20
        assert math.isclose(found.divergence[plain][head], total, rel_tol=1e-3)


def test_the_report_on_weights(bert_folder, text, sized, ran):
    sized(feature_weights, CALIBRATION_SAMPLES=2, HELD_OUT_SAMPLES=2, NUM_FEATURES=8)
    sized(calibrate, REFINE_STEPS=50)
    words = [bert_folder, "--text", text, "--held_out", text, *SMALL, "--backends", "favor+", "favor#"]
    content, report = ran(feature_weights, *words, code=0)
    rows = {(row["window"], row["backend"], row["kind"], row["M"]): row for row in content["rows"]}
    assert len(rows) == 2 * (2 + 1 + 4 + 2)
    for window in (0, 8):
        assert rows[window, "favor+", WEIGHTS, 8]["kl"] < rows[window, "favor+", PLAIN, 8]["kl"]
        assert rows[window, "favor#", REFINED, 8]["kl"] < rows[window, "favor#", WEIGHTS, 8]["kl"]
    assert f"{text.name}, window 8" in report


def test_a_check_of_weights_that_fails_says_so():
    common = {"text": "t", "window": 0, "backend": "favor+"}
    for learned, said in ((1.1, "DOES NOT HOLD"), (1.0, "holds")):
        cells = ((PLAIN, 192, 1.0), (WEIGHTS, 64, learned), (PLAIN, 64, 0.1))
        (check,) = feature_weights.acceptance([common | {"kind": k, "M": m, "kl": kl} for k, m, kl in cells])
        assert check.line().startswith(f"{said}: favor+, window 0, t")
