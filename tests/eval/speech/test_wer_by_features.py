"""WER against the number of features: the mean over time against its formula, the table against numbers by hand."""

import itertools
import json
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
from launching import forget_accelerator
from PIL import Image
from tiny_speech import save_model, write_corpus

from favor.eval import asr as evaluation
from favor.eval.papers import wer_by_features as program
from favor.eval.papers.wer_by_features import parse_arms, training_words
from favor.models.conformer import ConformerForCTC

SCORES = {
    # By arm, stage and seed: WER and CER of dev in percent.
    "sdpa": {"converted": [(40.0, 20.0), (40.0, 20.0)], "trained": [(20.0, 10.0), (25.0, 8.0)]},
    "uniform_mean": {"converted": [(100.0, 80.0), (100.0, 80.0)], "trained": [(30.0, 15.0), (35.0, 12.0)]},
    "favor++:8": {"converted": [(90.0, 60.0), (80.0, 50.0)], "trained": [(29.0, 12.0), (32.0, 10.0)]},
    "favor#:sderf:8": {"converted": [(80.0, 50.0), (70.0, 40.0)], "trained": [(24.0, 11.0), (30.0, 11.0)]},
    "favor#:sderf:128": {"converted": [(50.0, 30.0), (45.0, 25.0)], "trained": [(21.0, 16.0), (26.0, 12.0)]},
}


@pytest.fixture(autouse=True)
def fresh_accelerator():
    yield
    forget_accelerator()


@pytest.fixture(scope="module", autouse=True)
def registered():
    program.register_uniform_mean()


def uniform(value, mask=None, causal=False, **options):
    """The attention function, with queries and keys that must not matter."""
    query, key = (torch.randn(*value.shape[:2], value.shape[2], 4, dtype=value.dtype) for _ in range(2))
    module = torch.nn.Module()
    module.is_causal, module.config = causal, SimpleNamespace()
    return program.uniform_mean_forward(module, query, key, value, mask, **options)[0]


@pytest.mark.parametrize("causal", [False, True])
def test_mean_over_time_is_the_mean_of_real_frames(causal):
    torch.manual_seed(0)
    value = torch.randn(3, 2, 7, 5, dtype=torch.float64, requires_grad=True)
    lengths = (7, 4, 1)
    padding = torch.arange(7) < torch.tensor(lengths)[:, None]
    out = uniform(value, padding[:, None, None].expand(-1, 1, 7, -1), causal)
    assert out.shape == (3, 7, 2, 5)
    values = value.detach().numpy()
    for sample, length in enumerate(lengths):
        for frame in range(length):
            seen = frame + 1 if causal else length
            expected = values[sample, :, :seen].mean(1)
            np.testing.assert_allclose(out[sample, frame].detach(), expected, rtol=1e-12)
    out[1, 2].sum().backward()
    seen = 3 if causal else 4
    expected = torch.zeros_like(value)
    expected[1, :, :seen] = 1 / seen
    torch.testing.assert_close(value.grad, expected)
    torch.testing.assert_close(uniform(value.detach())[0, 3], value[0].detach().mean(1))


def test_dropout_leaves_values_out():
    out = uniform(torch.ones(1, 1, 1000, 1), dropout=0.25)
    kept = out[0, 0].item() * 0.75
    assert (out == out[0, 0]).all()
    assert 0 < abs(kept - 0.75) < 0.06
    assert kept * 1000 == pytest.approx(round(kept * 1000), abs=1e-2)


@torch.no_grad()
def test_mean_over_time_in_a_model(tmp_path):
    """Padding changes nothing, and neither do the queries and keys."""
    model = ConformerForCTC.from_pretrained(save_model(tmp_path), attn_implementation="uniform_mean").eval()
    batch, mask = torch.randn(2, 130, 20), torch.arange(130)[None] < torch.tensor([[90], [130]])
    inputs = batch[:1, :90]
    alone = model(inputs).logits[0]
    torch.testing.assert_close(model(batch, mask).logits[0, : len(alone)], alone, atol=1e-5, rtol=1e-5)
    for layer in model.encoder.layers:
        layer.self_attn.q_proj.weight.normal_()
        layer.self_attn.k_proj.weight.normal_()
    assert torch.equal(model(inputs).logits[0], alone)
    model.set_attn_implementation("sdpa")
    assert not torch.allclose(model(inputs).logits[0], alone, atol=1e-3)


def test_arms():
    labels = {"sdpa": ["sdpa"], "favor++": ["favor++:8", "favor++:32"], "favor#:wderf:4": ["favor#:wderf:4"]}
    assert {text: [arm.label for arm in parse_arms(text, [8, 32])] for text in labels} == labels
    sharp = "favor# --features sderf --num_features 8 --exact_below 0"
    for text, expected in {"favor#:sderf:8": sharp, "uniform_mean": "uniform_mean"}.items():
        (arm,) = parse_arms(text, [8])
        assert training_words(arm) == ["--attn_implementation", *expected.split()]
    parsed, _ = program.parse_arguments(["--name", "x", "--output_dir", "y"])
    assert len({arm.slug for arm in parsed.backends}) == len(parsed.backends) == 11


def test_user_errors():
    common = ["--name", "x", "--output_dir", "y"]
    assert program.parse_arguments([*common, "--architecture", "ctc"])[1] == ["--architecture", "ctc"]
    for words, message in (
        ("--backends favor*:8", "backend must be one of"),
        ("--backends favor++:sderf:8", "features are those of favor#"),
        *((f"{own} 1", f"{own} is set by") for own in ("--seed", "--window", "--exact_below=64", "--resume")),
        ("--model_name_or_path m --architecture ctc", "--architecture is set by the program"),
        ("--report_only --max_train_steps 3", "--report_only nothing is trained"),
    ):
        with pytest.raises(ValueError, match=message):
            program.parse_arguments([*common, *words.split()])


def write_arm(folder, label, seed, **changes):
    """The files of one finished arm, of SCORES."""
    (arm,) = parse_arms(label, [])
    names = ("dev_wer", "dev_cer")
    stages = {stage: dict(zip(names, values[seed], strict=True)) for stage, values in SCORES[label].items()}
    record = {"arm": label, "backend": replace(arm, num_features=None).label, "num_features": arm.num_features}
    record |= {"seed": seed, "machine": "a machine", "converted": stages["converted"], "wall_seconds": 100.0 + seed}
    record["arguments"] = ["--model_name_or_path", "folder/base", "--data_dir", "secret/place"]
    results = {"metrics": stages["trained"], "steps": 7, "seconds_per_step": 0.5 + seed, "parameters": 1234}
    results |= {"hours": {"train": 1.5, "dev": 0.25}, "utterances": {"train": 10, "dev": 3}, "versions": {"torch": "2"}}
    results |= {"device": "cpu", "arguments": {"eval_splits": ["dev"]}, "peak_memory_bytes": (300 + seed) * 2**20}
    place = folder / arm.slug / f"seed_{seed}"
    place.mkdir(parents=True)
    (place / "arm.json").write_text(json.dumps({**record, **changes}))
    (place / "all_results.json").write_text(json.dumps(results))
    return place


def report_only(folder):
    """Runs the program without training; its JSON, and the cells of its tables by section and arm."""
    words = ["--output_dir", str(folder), "--results_dir", str(folder / "results"), "--name", "x", "--report_only"]
    assert program.main(words) == 0
    place = folder / "results" / "wer_by_features_x"
    sections = {}
    for line in place.with_suffix(".md").read_text().splitlines():
        if line.startswith("#"):
            section = sections.setdefault(line.lstrip("# "), {})
        elif line.startswith("| "):
            name, count, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            section[name, count] = cells
    with Image.open(place.with_suffix(".png")) as plot:
        assert len(plot.getcolors(1 << 20)) > 3
    return json.loads(place.with_suffix(".json").read_text()), sections


def test_numbers_of_the_table(tmp_path):
    for label, seed in itertools.product(reversed(SCORES), (1, 0)):
        write_arm(tmp_path, label, seed)
    content, sections = report_only(tmp_path)
    assert [row["arm"] for row in content["rows"]] == list(SCORES)
    for row in content["rows"]:
        assert row["seeds"] == [0, 1]
        for stage, column in itertools.product(("converted", "trained"), (0, 1)):
            name = ("dev_wer", "dev_cer")[column]
            own, exact = (np.array(SCORES[arm][stage])[:, column] for arm in (row["arm"], "sdpa"))
            for kind, values in (("scores", own), ("normalised", own / exact)):
                found = row[kind][stage][name]
                assert found["values"] == pytest.approx(values)
                assert found["mean"] == pytest.approx(values.mean())
                assert found["std"] == pytest.approx(values.std(ddof=1))
    # 24 / 20 = 1.2 and 30 / 25 = 1.2; 11 / 10 = 1.1 and 11 / 8 = 1.375.
    shown = ["27.00 ± 4.24", "1.200 ± 0.000", "11.00 ± 0.00", "1.238 ± 0.194"]
    assert sections["After training: dev"]["`favor#:sderf`", "8"] == shown
    assert sections["Cost of the training"]["mean over time", "-"] == ["7", "1.000", "100", "301", "1234"]
    assert content["command"].startswith("python -m favor.eval.papers.wer_by_features --model_name_or_path")
    assert "--data_dir DATA" in content["command"]
    assert (content["versions"], content["machine"]) == ({"torch": "2"}, "a machine")


def test_checks(tmp_path):
    for label in SCORES:
        write_arm(tmp_path, label, 0)
    checks = {check["statement"]: check for check in report_only(tmp_path)[0]["checks"]}
    after, best = "after training", "favor#:sderf is at most favor++ at every M"
    mean = "every backend is below the mean over time"
    rows = itertools.product(("WER", "CER"), (best, mean))
    expected = {f"dev, {unit} {after}: {claim}": (unit, claim) != ("CER", mean) for unit, claim in rows}
    assert {statement: check["holds"] for statement, check in checks.items()} == expected
    assert checks[f"dev, WER {after}: {best}"]["numbers"] == "M = 8: 24.00 and 29.00"
    numbers = "favor#:sderf with M = 128: 16.00, mean over time 15.00"
    assert checks[f"dev, CER {after}: {mean}"]["numbers"] == numbers


def test_unfinished_and_different_arms(tmp_path):
    unfinished = write_arm(tmp_path, "favor++:8", 1)
    (unfinished / "all_results.json").unlink()
    with pytest.raises(ValueError, match="expected finished arms below"):
        report_only(tmp_path)
    write_arm(tmp_path, "favor++:8", 0)
    write_arm(tmp_path, "sdpa", 1)
    assert [run["arm"] for run in program.read(tmp_path)] == ["favor++:8", "sdpa"]
    content, sections = report_only(tmp_path)  # nothing is normalised by the exact arm of another seed
    assert sections["After training: dev"]["`favor++`", "8"] == ["29.00", "-", "12.00", "-"]
    assert content["rows"][1]["normalised"]["trained"]["dev_wer"]["mean"] is None
    write_arm(tmp_path, "sdpa", 0, arguments=["--max_train_steps", "3"])
    with pytest.raises(ValueError, match=r"seed_\d has other arguments"):
        report_only(tmp_path)


def command(ctc, corpus, folder, *flags):
    words = f"--model_name_or_path {ctc} --data_dir {corpus} --output_dir {folder} --results_dir {folder}/results"
    words += " --name x --seeds 3 --eval_splits dev test --max_train_steps 2 --learning_rate 1e-2 --warmup_ratio 0"
    return [*words.split(), *flags]


def test_audio_without_a_frame_counts_neither_before_nor_after_the_training(ctc, tmp_path):
    corpus = write_corpus(tmp_path)
    words = ["--model_name_or_path", str(ctc), "--data_dir", str(corpus), "--eval_splits", "dev", "--output_dir"]
    whole = program.evaluate_converted([*words, str(tmp_path / "whole")], 0)
    soundfile.write(corpus / "short.wav", np.zeros(2000), 16000)
    with (corpus / "dev.jsonl").open("a") as rows:
        rows.write(json.dumps({"id": "short", "audio": "short.wav", "text": "GO FIN"}) + "\n")
    words.append(str(tmp_path / "more"))
    with pytest.raises(ValueError, match=r"short .*11 feature frames, too few"):
        program.evaluate_converted(words, 0)
    assert program.evaluate_converted([*words, "--max_bad", "1"], 0) == whole


@pytest.mark.slow
def test_arms_from_a_model(ctc, corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program, "in_own_process", lambda function, words: function(words))
    words = command(ctc, corpus, tmp_path / "runs", "--backends", "sdpa", "uniform_mean", "favor++:4")
    assert program.main(words) == 0
    assert capsys.readouterr().out.count("seed 3: finished") == 3
    content = json.loads((tmp_path / "runs" / "results" / "wer_by_features_x.json").read_text())
    assert [row["arm"] for row in content["rows"]] == ["sdpa", "uniform_mean", "favor++:4"]
    # Which would be refused.
    assert "--architecture" not in content["command"]
    finished = {}
    for row in content["rows"]:
        (arm,) = parse_arms(row["arm"], [])
        place = tmp_path / "runs" / arm.slug / "seed_3" / "all_results.json"
        results, finished[place] = json.loads(place.read_text()), place.stat().st_mtime_ns
        assert results["attn_implementation"] == arm.name
        assert (results["steps"], results["seed"], row["steps"]) == (2, 3, 2)
        for name, value in results["metrics"].items():
            assert row["scores"]["trained"][name]["values"] == [value]
        assert row["wall_seconds"] > row["seconds_per_step"] > 0
        if arm.num_features:
            assert (results["favor"]["num_features"], results["favor"]["exact_below"]) == (4, 0)
    assert sorted(content["rows"][0]["scores"]["trained"]) == ["dev_cer", "dev_wer", "test_cer", "test_wer"]

    # As converted: what the evaluation program measures on the model itself.
    backend = ["--attn_implementation", "favor++", "--num_features", "4", "--exact_below", "0", "--seed", "3"]
    for row, options in ((content["rows"][0], []), (content["rows"][2], backend)):
        own = ["--model_name_or_path", str(ctc), "--data_dir", str(corpus), "--eval_splits", "dev", "test"]
        evaluation.main([*own, "--device", "cpu", "--output_dir", str(tmp_path / "asr"), *options])
        for split, found in json.loads((tmp_path / "asr" / "asr.json").read_text())["splits"].items():
            for metric in ("wer", "cer"):
                converted = row["scores"]["converted"][f"{split}_{metric}"]["values"]
                assert converted == pytest.approx([found["searches"]["greedy"][metric]])

    assert program.main(words) == 0
    assert capsys.readouterr().out.count("was finished before") == 3
    assert {place: place.stat().st_mtime_ns for place in finished} == finished
    with pytest.raises(ValueError, match=r"(?s)other arguments .* 1e-2.* here .* 1e-3"):
        program.main([word.replace("1e-2", "1e-3") for word in words])


def test_an_interrupted_arm_goes_on(ctc, corpus, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(program, "in_own_process", lambda function, words: calls.append(words) or function(words))
    words = command(ctc, corpus, tmp_path, "--backends", "sdpa", "--checkpointing_steps", "1")
    assert program.main(words) == 0
    folder = tmp_path / "sdpa" / "seed_3"
    before = json.loads((folder / "all_results.json").read_text())
    (folder / "all_results.json").unlink()
    converted = json.loads((folder / "arm.json").read_text())["converted"]
    monkeypatch.setattr(program, "evaluate_converted", lambda *_: pytest.fail("it is there already"))
    assert program.main(words) == 0
    assert [call[-1] == "--resume" for call in calls] == [False, True]
    assert json.loads((folder / "all_results.json").read_text())["metrics"] == before["metrics"]
    record = json.loads((folder / "arm.json").read_text())
    assert (record["converted"], record["wall_seconds"]) == (converted, None)


def test_a_diverged_arm_does_not_stop_the_others(ctc, corpus, tmp_path, monkeypatch, capsys):
    def train(function, words):
        if "favor++" in words:
            raise FloatingPointError("the loss is nan at step 1")
        return function(words)

    monkeypatch.setattr(program, "in_own_process", train)
    assert program.main(command(ctc, corpus, tmp_path, "--backends", "favor++:4", "sdpa")) == 1
    printed = capsys.readouterr()
    assert "[1/2] favor++:4 seed 3: FAILED: the loss is nan" in printed.out
    assert "failed: [1/2] favor++:4 seed 3" in printed.err
    assert [run["arm"] for run in program.read(tmp_path)] == ["sdpa"]


def test_a_training_has_a_process_of_its_own():
    assert program.in_own_process(eval, "__import__('os').getpid()") != os.getpid()


def test_an_arm_from_new_weights(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "in_own_process", lambda function, words: function(words))
    words = f"--backends uniform_mean --output_dir {tmp_path} --results_dir {tmp_path} --name x --data_dir {corpus}"
    words += " --preset tiny --tokenizer_type char --max_train_steps 1 --architecture transducer"
    assert program.main(words.split()) == 0
    folder = tmp_path / "uniform_mean" / "seed_0"
    results, record = (json.loads((folder / name).read_text()) for name in ("all_results.json", "arm.json"))
    assert (results["attn_implementation"], results["arguments"]["architecture"]) == ("uniform_mean", "transducer")
    assert "converted" not in record
    assert record["wall_seconds"] > 0
    content = json.loads((tmp_path / "wer_by_features_x.json").read_text())
    assert "--architecture transducer" in content["command"]
