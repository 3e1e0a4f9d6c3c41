"""The comparison of optimizers of an output layer: its tasks, its training loop, its choices, and a small run of it."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.optim import AdamW

from favor.eval.papers import head_optimizer, head_tasks
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


def test_the_program(images, tmp_path, monkeypatch, capsys, ran):
    monkeypatch.setitem(head_optimizer.GRIDS, "fashion", GRID)
    monkeypatch.setattr(head_optimizer, "SEEDS", 2)
    monkeypatch.setattr(head_optimizer, "MILESTONES", (1, 2))
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
