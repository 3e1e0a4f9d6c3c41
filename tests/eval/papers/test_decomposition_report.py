"""The comparison of decompositions: what its numbers mean, by other ways to the same, and what it writes."""

import math

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.metrics import average_precision_score

from favor.decomposition import L1KernelPCA, VRPower
from favor.eval.papers import decomposition as program
from favor.eval.papers import power_methods as methods


@pytest.fixture(autouse=True)
def small(sized):
    sized(program.torch, set_num_threads=lambda count: None)
    sized(program, ROUNDS=1, DRAWS=2, SETS=("digits", "planted"), SWEEPS=(1, 5, 50), STARTS=2, TRIES=2, REPEATS=1)
    sized(methods, ITERATIONS=200, ROWS=200, GAPS=(0.05,), PASSES=3, SEEDS=1)


def write_keel(folder):
    """Small files in the KEEL form, outliers far from the rest, a column that is constant."""
    source = np.random.default_rng(0)
    for file, outlier, other in (("wisconsin.dat", "4", "2"), ("ionosphere.dat", "b", "g")):
        rows, labels = source.normal(size=(35, 3)), [other] * 30 + [outlier] * 5
        rows[30:] += [6, -6, 6]
        lines = (f"{a:.3f}, {b:.3f}, 0.0, {c:.3f}, {own}\n" for (a, b, c), own in zip(rows, labels, strict=True))
        (folder / file).write_text("".join(lines))


def test_wbc_is_all_benign_and_21_malignant_rows():
    drawn = [program.wbc(seed) for seed in (None, 0, 0, 1)]
    assert [(x.shape, labels.sum()) for x, labels in drawn] == [((378, 30), 21)] * 4
    assert drawn[0][0][drawn[0][1]][0, 0] == 17.99  # the first row of the data
    assert np.array_equal(drawn[1][0], drawn[2][0])
    assert not np.array_equal(drawn[1][0], drawn[3][0])


def test_l2_scores_follow_the_model_of_l1_scores():
    x = np.random.default_rng(0).normal(size=(60, 5)) * [3, 2, 1, 1, 0.5]
    model = L1KernelPCA().fit(x)
    assert program.distances(model.scores_) == pytest.approx(model.outlier_score(x))


def test_area_is_a_mean_over_rounds_of_the_trapezoid_rule():
    labels, scores = np.array([1, 0, 1, 0], bool), np.array([4.0, 3.0, 2.0, 1.0])
    # Points (recall, precision): (0, 1), (.5, 1), (.5, .5), (1, 2/3), and precision .5 at recall 1.
    by_hand = 0.5 * 1 + 0.5 * (0.5 + 2 / 3) / 2
    assert program.area(labels, scores) == pytest.approx(by_hand)
    assert by_hand != pytest.approx(average_precision_score(labels, scores))
    mean = (by_hand + program.area(labels, -scores)) / 2
    assert program.area(labels, np.stack((scores, -scores))) == pytest.approx(mean)


def test_keel_files(tmp_path):
    with pytest.raises(ValueError, match=r"--keel_dir must be a folder with wisconsin.dat, ionosphere.dat"):
        program.keel("BreastW", tmp_path)
    write_keel(tmp_path)
    for name in program.KEEL:
        x, labels = program.keel(name, tmp_path)
        assert x.shape == (35, 3)
        assert np.array_equal(np.flatnonzero(labels), np.arange(30, 35))
        found = program.areas((x, labels))
        assert set(found) == set(program.METHODS)
        # Far in all directions at once: a forest cannot miss that.
        assert found["isolation forest"] > 0.9


def test_without_keel_files_the_report_says_so(monkeypatch):
    monkeypatch.setattr(program.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(program, "areas", lambda dataset: dict.fromkeys(program.METHODS, 0.5))
    found = program.measure_outliers(None)
    assert found["not_run"] == ["BreastW", "Ionosphere"]
    assert "Not run, for want of the KEEL files: BreastW, Ionosphere." in "\n".join(program.outlier_lines(found))
    # L1 no better than L2, and .5 is not within .03 of .55.
    assert [check.holds for check in program.outlier_checks(found)] == [False, False, False]


@pytest.mark.parametrize("form", [np.asarray, sparse.csr_matrix])
def test_the_objective_is_half_the_squared_error_that_both_report(form):
    V = form(np.random.default_rng(0).poisson(1.0, size=(30, 20)).astype(float))
    W, H = program.start(V, 3, 0)
    for make in program.nmf_methods().values():
        model = make(n_components=3, max_iter=5)
        left = model.fit_transform(V, W=W.copy(), H=H.copy())
        expected = pytest.approx(model.reconstruction_err_**2 / 2, rel=1e-9)
        assert program.divergence(V, left, model.components_) == expected
        assert model.n_iter_ == 5


def test_the_start_is_one_sweep_of_mu():
    V, count = program.problem("planted")
    assert (V.shape, count) == ((300, 200), 10)
    first = program.start(V, 10, 3)
    source = np.random.default_rng(3)
    W, H = source.uniform(size=(300, 10)), source.uniform(size=(10, 200))
    turned = program.nmf_methods()[program.MU](n_components=10, max_iter=1)
    left = turned.fit_transform(V.T, W=H.T.copy(), H=W.T.copy())  # sklearn starts with W, which is our H
    assert pytest.approx(first[1]) == left.T
    assert pytest.approx(first[0]) == turned.components_.T


def test_equal_time_and_equal_sweeps(monkeypatch):
    monkeypatch.setattr(program, "problem", lambda name: (np.random.default_rng(0).poisson(2.0, (40, 30)) * 1.0, 3))
    found = program.measure_nmf()
    here = found["sets"]["digits"]
    assert here["shape"] == [40, 30]
    V = program.problem("digits")[0]
    again = program.run(program.MU, V, 3, 5, program.start(V, 3, 1))[0]
    assert here["objective"][program.MU][1][1] == again
    # One number of sweeps that claims name, and it is the last one too.
    assert list(here["equal_time"]) == ["50"]
    for trial, line in zip(here["equal_time"]["50"], here["objective"][program.MU], strict=True):
        assert trial["sweeps"] >= 1
        assert trial["mu"] == pytest.approx(line[2])
    assert len(program.nmf_checks(found)) == 4
    assert len([line for line in program.nmf_lines(found) if line.startswith("| digits")]) == 6


whole_problem = methods.problem


def fewer_components(name):
    """The first four components: quick."""
    likelihoods, counts = whole_problem(name)
    return likelihoods[:, :4], counts


@pytest.mark.parametrize("name", ["separated", "poisson"])
def test_the_optimum_is_one_and_theory_is_the_rate_of_the_jacobian(name):
    given = fewer_components(name)
    best = methods.optimum(given)
    g = methods.gradient(given, best)
    assert best.sum().item() == pytest.approx(1, abs=1e-12)
    assert (g - 1)[best > 0].abs().max() < 1e-12
    assert (g <= 1 + 1e-12).all()
    for shift in (None, *methods.SHIFTS):

        def exact(pi, shift=shift):
            factor = methods.gradient(given, pi) if shift is None else (shift + methods.gradient(given, pi)).square()
            return pi * factor / (pi * factor).sum()

        # The package's step is the formula, and its derivative along the simplex has the radius of the theory.
        near = (best + 0.01) / (best + 0.01).sum()
        assert torch.allclose(methods.step(given, near, shift), exact(near), atol=1e-12)
        jacobian = torch.autograd.functional.jacobian(exact, best)
        basis = torch.linalg.qr(torch.cat((torch.ones(len(best), 1).double(), torch.eye(len(best)).double()), 1))[0]
        tangent = basis[:, 1:]
        radius = torch.linalg.eigvals(tangent.T @ jacobian @ tangent).abs().max().item()
        assert methods.theory(given, best, shift) == pytest.approx(radius, rel=1e-6)


def test_rows_have_the_spectrum_and_baselines_are_what_they_say():
    values = methods.spectrum(0.2)
    X, true = methods.rows_with(values, 300, 0)
    found, vectors = np.linalg.eigh(X.T @ X / 300)
    assert found[::-1] == pytest.approx(values)
    assert abs(vectors[:, -1] @ true) == pytest.approx(1)
    assert methods.error(3 * true, true) < 1e-30
    assert methods.error(np.cos(0.3) * true + np.sin(0.3) * vectors[:, 0], true) == pytest.approx(np.sin(0.3) ** 2)
    C, start = X.T @ X / 300, np.random.default_rng(1).normal(size=50)
    for beta in (0.0, 0.16):
        before, x = np.zeros(50), start
        points = methods.power(X, start, beta)
        for _ in range(5):
            before, x = x, C @ x - beta * before
            assert next(points) == pytest.approx(x / np.linalg.norm(x))


def test_oja_steps_row_by_row():
    X = np.random.default_rng(0).normal(size=(20, 4))
    x = np.random.default_rng(1).normal(size=4)
    expected = x / np.linalg.norm(x)
    for t, i in enumerate(np.random.default_rng((7, 2)).permutation(20), start=300):
        expected = expected + 2.0 / t * X[i] * (X[i] @ expected)
    found = next(methods.oja(X, x, 2.0, 7))
    assert found / np.linalg.norm(found) == pytest.approx(expected / np.linalg.norm(expected))


def test_paths_of_estimators_are_theirs():
    X, true = methods.rows_with(methods.spectrum(0.3), 500, 0)
    watched = methods._Watched(random_state=0, tol=1e-7)
    path = methods.estimator_path(watched, X, true, 1000)
    plain = VRPower(random_state=0, tol=1e-7).fit(X)
    assert path[-1] == (plain.passes_ - 1, methods.error(plain.components_[0], true))
    assert [passes for passes, _ in path] == pytest.approx([line.passes - 1 for line in plain.history_])
    # No epoch that would end beyond the limit; what was reached before is the same.
    limited = methods.estimator_path(methods._Watched(random_state=0, tol=1e-7), X, true, 20)
    assert limited == path[: len(limited)]
    assert len(limited) < len(path)
    assert limited[-1][0] <= 20 < path[len(limited)][0]


def test_numbers_of_sequences_and_the_claim():
    assert methods.measured_rate([0.1 * 0.5**k for k in range(60)]) == pytest.approx(0.5)
    assert math.isnan(methods.measured_rate([0.1, 0.05]))
    assert methods.thinned([3.0, 2.0, 1.0]) == [(0, 3.0), (1, 2.0), (2, 1.0)]
    assert methods.passes_to([(1.0, 0.5), (2.5, 1e-5)], 1e-4) == 2.5
    assert methods.passes_to([(1.0, 0.5)], 1e-4) == math.inf
    for power, vr, holds in ((190.0, 12.0, True), (140.0, 12.0, False), (190.0, 26.0, False)):
        passes = {methods.POWER: (9.0, power), methods.VR_POWER: (4.0, vr)}
        cells = {name: {"passes": own, "seeds": [[count] for count in own]} for name, own in passes.items()}
        (check,) = methods.pca_checks({"gaps": {"0.05": cells}})
        assert check.holds == holds


def test_writes_a_report_with_checks(tmp_path, sized, capsys, ran):
    counts = np.random.default_rng(0).poisson(2.0, (40, 30)) * 1.0
    sized(program, problem=lambda name: (counts, 3), wbc=lambda seed=None: program.keel("BreastW", tmp_path))
    sized(methods, problem=fewer_components)
    write_keel(tmp_path)
    result, _ = ran(program, "--parts", "pca", "nmf", "outliers", "mixture", "--keel_dir", tmp_path, code=0)
    assert "decomposition --parts pca nmf outliers mixture --keel_dir DATA --name x" in result["command"]
    assert list(result["parts"]) == ["outliers", "nmf", "mixture", "pca"]
    assert sorted(path.stem for path in tmp_path.glob("out/*.png")) == ["x_mixture", "x_nmf", "x_pca"]
    for cell in result["parts"]["mixture"]["problems"]["poisson"]["methods"].values():
        assert cell["rate"] == pytest.approx(cell["theory"], rel=0.05)
    # Three passes are not enough, and the report says so.
    (claim,) = [check for check in result["checks"] if check["statement"].startswith("VRPower")]
    assert not claim["holds"]
    assert f"DOES NOT HOLD: {claim['statement']}" in capsys.readouterr().out
    assert result["parts"]["pca"]["gaps"]["0.05"][methods.VR_POWER]["passes"] == ["inf", "inf"]
