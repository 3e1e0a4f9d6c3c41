"""The benchmark measures what it says: formulas against dense float64, failures without times, skips, crossovers.

No speed is asserted.
"""

import json
import math

import pytest
import torch

from favor.attention.functional import favor_attention
from favor.eval.speed import __main__ as speed
from favor.eval.speed import measure, panel, reference, report
from favor.eval.speed import methods as speed_methods
from favor.eval.speed import models as speed_models
from favor.eval.speed.__main__ import DIRECTIONS, PASSES
from favor.eval.speed.cell import Cell, run_pass

TINY = ["--lengths", "32", "64"]
needs_performer = pytest.mark.skipif(
    speed_methods.Performer().missing() is not None, reason="performer-pytorch is not installed"
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    for name, value in {"NUM_FEATURES": 16, "HEADS": 2, "KEY_HEADS": 2, "HEAD_DIM": 16, "LAYERS": 1}.items():
        monkeypatch.setattr(speed, name, value)
    monkeypatch.setattr(panel, "REPEATS", 1)
    monkeypatch.setitem(measure.COPIED_BYTES, "cpu", 1 << 16)
    monkeypatch.setitem(measure.MATMUL_WIDTH, "cpu", 64)


def run(folder, *more):
    """Runs the program; returns its exit code, JSON and Markdown."""
    code = speed.main([*TINY, "--device", "cpu", "--output_dir", str(folder), "--name", "tiny", *more])
    return code, json.loads((folder / "tiny.json").read_text()), (folder / "tiny.md").read_text()


def numbers(value):
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from numbers(part)
    elif isinstance(value, float):
        yield value


@pytest.fixture
def absent(monkeypatch):
    """The optional packages as if they were not installed."""
    monkeypatch.setattr(
        speed_methods, "_problem", lambda module, requirement: f"not installed (pip install {requirement})"
    )


@pytest.mark.slow
def test_a_whole_run(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "KEY_HEADS", 1)
    own = ("--methods", "favor", "sdpa", "eager", "--families", "pos", "sderf")
    code, content, text = run(tmp_path, *own)
    assert code == 0
    assert (tmp_path / "tiny.png").read_bytes().startswith(b"\x89PNG")
    assert all(math.isfinite(number) for number in numbers(content))
    done = [cell for cell in content["cells"] if cell["status"] == "ok"]
    panels = {f"{d}, {p}" for d in DIRECTIONS for p in PASSES}
    for name in ("favor:pos", "favor:sderf", "sdpa:math", "eager"):
        own = [cell for cell in done if cell["method"] == name]
        assert {(cell["panel"], cell["length"]) for cell in own} == {(p, n) for p in panels for n in (32, 64)}
        for cell in own:
            assert cell["timing"]["lower"] <= cell["timing"]["median"] <= cell["timing"]["upper"]
            assert cell["check"]["errors"]["output"] <= cell["check"]["tolerance"]
            assert set(cell["check"]["errors"]) >= ({"query", "key", "value"} if "back" in cell["panel"] else set())
            assert cell["speedup"] > 0
            assert cell["roofline"] > 0
            assert (cell["peak_bytes"] is None) == (measure.MemoryServer.problem() is not None)
    assert content["command"].startswith("python -m favor.eval.speed --lengths 32 64")
    assert content["command"] in text
    assert content["machine"] in text
    assert str(tmp_path) not in text + json.dumps(content)
    assert {item["method"] for item in content["crossover"]} >= {"favor:pos", "favor:sderf"}


def test_a_wrong_method_fails_without_a_time(tmp_path, monkeypatch):
    def wrong(query, key, value, **kwargs):
        return 1.01 * favor_attention(query, key, value, **kwargs)

    monkeypatch.setattr(speed_methods, "favor_attention", wrong)
    code, content, text = run(tmp_path, "--methods", "favor", "sdpa", "--skip_memory", "--directions", "causal")
    assert code == 1
    for cell in content["cells"]:
        if cell["method"] == "favor:pos":
            assert cell["status"] == "failed"
            assert cell["timing"] is cell["speedup"] is cell["tflops"] is None
            assert cell["check"]["errors"]["output"] == pytest.approx(0.01, rel=1e-3)
        elif cell["method"] == "sdpa:math":
            assert cell["status"] == "ok"
    assert "FAILED (relative error" in text


def test_a_method_that_raises_fails_with_its_error(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no such thing\nand more")

    monkeypatch.setattr(speed_methods, "favor_attention", broken)
    more = ("--methods", "favor", "--skip_memory", "--directions", "causal", "--passes", "forward")
    _, content, text = run(tmp_path, *more)
    assert [cell["reason"] for cell in content["cells"]] == 2 * ["RuntimeError: no such thing"]
    assert "FAILED (RuntimeError: no such thing)" in text


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_wrong_gradient_is_found(name, elsewhere):
    """One sixteenth of the length, or a head that should have no gradient at all."""
    cell = Cell(64, True, True, heads=4, key_heads=2, head_dim=8)
    query, key, value, _ = cell.inputs()
    attend = speed_methods.Eager().prepare(cell).attend

    class Spoil(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor.clone()

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            if elsewhere:
                grad += 0.01 * grad.abs().amax()
            else:
                grad[:, :, :4] *= 1.01
            return grad

    def spoiled(query, key, value):
        inputs = {"query": query, "key": key, "value": value}
        inputs[name] = Spoil.apply(inputs[name])
        return attend(*inputs.values())

    options = {"causal": True, "backward": True}
    assert reference.compare(attend, reference.softmax_rows, query, key, value, **options).passed
    check = reference.compare(spoiled, reference.softmax_rows, query, key, value, **options)
    assert not check.passed
    assert check.worst.endswith(f"of {name}")


FORMULAS = [("landmark+0", "landmark+48"), ("landmark+64", "landmark+80"), ("pos@8", "pos@16")]
FORMULAS += [(name, "landmark") for name in ("pos", "gerf", "saderf", "aderf", "sderf")]


@pytest.mark.parametrize(("name", "wrong"), FORMULAS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.filterwarnings("ignore:.*parameters from this sequence:UserWarning")
def test_the_formula_is_what_is_computed_and_nothing_else(causal, name, wrong):
    cell = Cell(600, causal, True, heads=4, key_heads=2, head_dim=8, num_features=24)
    inputs = cell.inputs()[:3]
    options = {"causal": causal, "backward": True}
    prepared = speed_methods.Favor(name).prepare(cell)
    assert reference.compare(prepared.attend, prepared.rows, *inputs, **options).passed
    other = speed_methods.Favor(wrong).prepare(cell)
    assert not reference.compare(other.attend, prepared.rows, *inputs, **options).passed


@pytest.mark.parametrize("causal", [False, True])
def test_landmarks_alone_select_as_many_keys_as_by_default(causal):
    cell = Cell(2100, causal, False, heads=1, key_heads=1, head_dim=8, num_features=64)
    inputs = cell.inputs()[:3]
    found = [speed_methods.Favor(name).prepare(cell).attend(*inputs) for name in ("landmark", "landmark+2100")]
    assert torch.equal(found[0], favor_attention(*inputs, features="landmark", num_features=64, is_causal=causal))
    assert not torch.allclose(*found, atol=1e-3)
    assert speed_methods.Favor("landmark").prepare(cell).check(cell, *inputs).passed


@pytest.mark.parametrize("name", ["pos+64", "landmark@16", "landmark+64@16", "landmark+", "landmark+x", "pos@", "none"])
def test_only_landmarks_take_selected_keys_and_only_features_a_window(name):
    with pytest.raises(ValueError, match=r"alone, as NAME@WINDOW or as landmark\+KEYS"):
        speed_methods.Favor(name)


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_keys_change_nothing(causal, monkeypatch):
    cell = Cell(40, causal, True, head_dim=8, heads=2, key_heads=1, dtype="float64")
    query, key, value, _ = cell.inputs()
    omega = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = []
    for block in (100, 7):
        monkeypatch.setattr(reference, "BLOCK", block)
        sample = reference.Sample.draw(query, key, value, causal=causal)
        for formula in (
            lambda s: reference.favor_rows(s, "sderf", omega),
            lambda s: reference.performer_rows(s, omega),
        ):
            out, _ = formula(sample)
            rows.append((out, *torch.autograd.grad(out.square().sum(), (sample.query, sample.key, sample.value))))
    for one, other in zip(rows[:2], rows[2:], strict=True):
        for left, right in zip(one, other, strict=True):
            assert torch.allclose(left, right, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_the_other_formulas_are_the_dense_ones(causal):
    cell = Cell(40, causal, False, batch_size=2, heads=2, key_heads=2, head_dim=8, dtype="float64")
    query, key, value, _ = cell.inputs()
    sample = reference.Sample.draw(query, key, value, causal=causal, seed=5)
    place = (sample.batch, sample.head, sample.rows)
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
    assert torch.allclose(reference.softmax_rows(sample)[0], exact[place], atol=1e-12)
    weights = query @ key.transpose(-1, -2) / 8**0.5
    linear = (weights.tril() if causal else weights) @ value
    assert torch.allclose(reference.linear_rows(sample)[0], linear[place], atol=1e-12)


@needs_performer
@pytest.mark.parametrize("causal", [False, True])
def test_performer_is_its_formula_and_its_epsilon_matters(causal):
    cell = Cell(150, causal, True, heads=2, key_heads=1, head_dim=8, num_features=16)
    method = speed_methods.by_name("performer-pytorch")
    prepared = method.prepare(cell)
    query, key, value, slope = cell.inputs()
    assert prepared.check(cell, query, key, value).passed
    assert len(run_pass(prepared.attend, query, key, value, slope)) == 4
    # Without the epsilon the same features are those of FAVOR+, which is something else.
    sample = reference.Sample.draw(query, key, value, causal=causal)
    module = speed_methods._load("performer_pytorch")
    torch.manual_seed(0)
    omega = module.FastAttention(8, nb_features=16).projection_matrix
    with_epsilon, _ = reference.performer_rows(sample, omega)
    without, _ = reference.favor_rows(sample, "pos", omega)
    difference = (with_epsilon - without).norm() / without.norm()
    assert 1e-4 < difference < 0.5


def test_absent_packages_are_skipped_with_a_line(tmp_path, capsys, absent):
    more = ("--methods", "performer", "fla", "eager", "--skip_memory", "--directions", "causal", "--passes", "forward")
    code, content, text = run(tmp_path, *more)
    assert code == 0
    assert {cell["method"] for cell in content["cells"]} == {"eager"}
    printed = capsys.readouterr().out
    for name, requirement in (("performer-pytorch", "performer-pytorch==1.1.4"), ("fla", "flash-linear-attention")):
        (line,) = [note for note in content["notes"] if note.startswith(f"{name} skipped")]
        assert f"pip install {requirement}" in line
        assert line in printed
        assert line in text


def test_what_would_take_too_long_is_skipped(tmp_path):
    more = ("--methods", "favor", "--skip_memory", "--directions", "causal", "--passes", "forward")
    _, content, _ = run(tmp_path, *more, "--max_seconds", "1e-6")
    first, second = content["cells"]
    assert (first["length"], first["status"]) == (32, "ok")
    assert (second["length"], second["status"], second["timing"]) == (64, "skipped", None)
    assert "causal, forward: favor:pos skipped from L = 64 on: a pass would take" in content["notes"][0]


def test_what_would_need_too_much_memory_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "free_bytes", lambda device: 8e4)
    more = ("--methods", "eager", "--skip_memory", "--directions", "causal", "--passes", "forward")
    _, content, _ = run(tmp_path, *more)
    assert [cell["status"] for cell in content["cells"]] == ["ok", "skipped"]
    assert "it needs about 9.83e-05 GB, the limit is 4e-05 GB, half of the free memory" in content["notes"][0]


def test_prediction():
    assert measure.predict({}, 8, 2) is None
    assert measure.predict({4: 1.0}, 8, 2) == pytest.approx(4.0)
    assert measure.predict({4: 1.0}, 16, 1) == pytest.approx(4.0)
    assert measure.predict({2: 1.0, 4: 4.0}, 8, 1) == pytest.approx(16.0)
    # Overhead hides growth at short lengths; noise can make it look wild.
    assert measure.predict({2: 1.0, 4: 1.0}, 8, 1) == pytest.approx(2.0)
    assert measure.predict({2: 1.0, 4: 100.0}, 8, 1) == pytest.approx(100 * 2**2.5)


def test_crossover():
    quadratic = {n: 1e-6 * n**2 for n in (64, 128, 256, 512)}
    linear = {n: 1e-6 * 100 * n for n in (64, 128, 256, 512)}
    found = report.crossover(linear, quadratic)
    assert found == report.Crossover("interpolated", pytest.approx(100.0))
    assert report.crossover(quadratic, quadratic) == report.Crossover("not reached", 512.0)
    assert report.crossover({n: t / 10 for n, t in linear.items()}, quadratic) == report.Crossover("at or below", 64.0)
    assert report.crossover({1024: 1.0}, quadratic) is None
    # A win that does not last is none; lengths without an SDPA time do not count.
    flickers = {64: 1e-9, 128: 1.0, 256: 1e-9, 512: 1.0, 1024: 1e-9}
    assert report.crossover(flickers, quadratic) == report.Crossover("not reached", 512.0)


def result(method, length, seconds, panel="causal, forward"):
    return report.Result(panel, method, length, timing=measure.Timing(seconds, seconds, seconds, 1, 1))


def test_speedups_are_to_the_best_sdpa_of_the_cell():
    results = [result("sdpa:math", 8, 4.0), result("sdpa:flash", 8, 2.0), result("favor:pos", 8, 1.0)]
    results += [result("sdpa:math", 16, 3.0), result("sdpa:flash", 16, 6.0), result("favor:pos", 16, 1.5)]
    results += [result("favor:pos", 32, 1.0), result("favor:pos", 8, 1.0, panel="bidirectional, forward")]
    report.add_speedups(results)
    assert [r.speedup for r in results] == [0.5, 1.0, 2.0, 1.0, 0.5, 2.0, None, None]
    (cross,) = report.crossovers(results)
    assert cross == {"panel": "causal, forward", "method": "favor:pos", "kind": "at or below", "length": 8.0}


def test_samples_are_taken_in_turns():
    seen = []
    entries = {
        name: measure.Stopwatch(lambda name=name: seen.append(name), lambda: None, expected)
        for name, expected in (("a", 0.1), ("b", 0.1), ("slow", 9.0))
    }
    timings = measure.interleaved(entries, "cpu", repeats=4, seconds_per_cell=0.35)
    assert seen == ["b", "slow", "a", "a", "b", "a", "b"]
    assert [timings[name].repeats for name in ("a", "b", "slow")] == [3, 3, 1]


def test_what_raises_while_timed_is_reported():
    def bad():
        raise ValueError("no")

    timings = measure.interleaved({"bad": measure.Stopwatch(bad, lambda: None, 1.0)}, "cpu", 2, 1.0)
    assert isinstance(timings["bad"], ValueError)


@pytest.mark.slow
@pytest.mark.skipif(measure.MemoryServer.problem() is not None, reason="needs Linux")
def test_memory_counts_the_output_and_the_gradients():
    def request(backward):
        cell = Cell(4096, False, backward, head_dim=32)
        return {"method": "favor:pos", "cell": vars(cell)}, cell.length * cell.heads * cell.head_dim * 4

    with measure.MemoryServer(1) as server:
        forward, one = request(False)
        peak = server.peak(forward)
        assert one <= peak + 5e5  # the kernel counts pages in batches
        assert abs(server.peak(forward) - peak) < 1e6
        assert server.peak(request(True)[0]) > 3.9 * one
        with pytest.raises(RuntimeError, match="ValueError: expected the name of a method as in the tables"):
            server.peak({**forward, "method": "none"})


def test_models(tmp_path, monkeypatch):
    monkeypatch.setattr(speed_models, "HIDDEN", 24)
    monkeypatch.setattr(speed_models, "BACKENDS", ("sdpa", "favor+", "favor#"))
    code, content, text = run(tmp_path, "--model_types", "bert", "llama")
    assert code == 0
    panels = {f"{m}, {p}" for m in speed_models.MODELS for p in PASSES}
    assert {cell["panel"] for cell in content["cells"]} == panels
    assert all(cell["tokens_per_second"] > 0 for cell in content["cells"])
    assert len(content["crossover"]) == 2 * len(panels)
    assert "Tokens a second" in text
    assert (tmp_path / "tiny.png").exists()


def test_a_model_that_does_not_run_its_backend_fails(monkeypatch):
    monkeypatch.setattr(speed_models, "HIDDEN", 24)
    model = speed_models.Model.build(
        "bert", layers=1, longest=16, num_features=8, seed=0, dtype="float32", device="cpu"
    )
    tokens = model.tokens(1, 16)
    assert model.problem("favor+", tokens, None) is None
    monkeypatch.setattr(speed_models.Model, "use", lambda self, backend: None)
    assert model.problem("sdpa", tokens, None) == "expected the backend sdpa, but the model is set to favor+"


def test_unknown_features_are_refused():
    with pytest.raises(ValueError, match=r"expected features among .*, got 'none'"):
        speed_methods.select(["favor"], ["none"], "cpu")
