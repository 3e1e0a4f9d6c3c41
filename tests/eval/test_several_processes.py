"""Several processes share an evaluation, and their results are those of one process to the last digit."""

import contextlib
import io
import json
import os
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from processes import run_several

from favor.eval import long_form
from favor.eval.common import processes
from favor.eval.glue import __main__ as glue

TIMES = ("seconds", "real_time_factor", "machine")


def evaluate(rank, commands, folder, number=1, address=None):
    """Runs programs, each given by its module and its words; writes how many pieces this process measured."""
    torch.set_num_threads(1)
    measured, gather, printed = [], processes.gather_object, io.StringIO()
    if number > 1:
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=number)
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number}
        os.environ |= {"ACCELERATE_USE_CPU": "true"} | {name: str(value) for name, value in places.items()}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        for name, words in commands.items():
            program = import_module(name)
            for module in (processes, program):
                counted = lambda given, name=name: measured.extend([name] * len(given)) or gather(given)  # noqa: E731
                patch.setattr(module, "gather_object", counted, raising=False)
            program.main([*words, "--output_dir", str(folder / name)])
    if number > 1:
        with pytest.raises(ValueError, match=f"leave out accelerate launch and give --num_processes {number}"):
            glue.main(["--tasks", "sst2"])
        dist.destroy_process_group()
    counts = {name: measured.count(name) for name in commands}
    (folder / f"{rank}.txt").write_text(json.dumps({"counts": counts, "printed": printed.getvalue()}))


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(part) for key, part in value.items() if key not in TIMES}
    return [without_times(part) for part in value] if isinstance(value, list) else value


def results(folder):
    """The content of all results, line by line, and the order of the lines; without times."""
    found = {}
    for path in folder.rglob("*.json*"):
        texts = path.read_text().split("\n") if path.suffix == ".jsonl" else [path.read_text()]
        found[str(path.relative_to(folder))] = [without_times(json.loads(text)) for text in texts if text]
    return found


@pytest.fixture
def commands(ctc, corpus, llama_folder, novel_file, bert_folder, glue_folder, tmp_path):
    labels = {"id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1}}
    torch.manual_seed(1)
    model = hf.BertForSequenceClassification.from_pretrained(bert_folder, **labels)
    torch.nn.init.normal_(model.classifier.weight)
    for part in (model, hf.AutoTokenizer.from_pretrained(bert_folder)):
        part.save_pretrained(tmp_path / "classifier")
    speech = ["--data_dir", corpus, "--eval_splits", "dev", "test", "--per_device_eval_batch_seconds", 1.5]
    data = ["--task_name", "sst2", "--data_dir", glue_folder, "--per_device_eval_batch_size", 5, "--exact_below", 0]
    language = ["--lengths", 60, 80, "--backends", "favor+:num_features=8"]
    needles = ["--tasks", "single", "--cases", 3, *language]
    found = {
        "favor.eval.asr": ["--model_name_or_path", ctc, "--beam_size", 3, *speech],
        "favor.eval.glue.__main__": ["--model_name_or_path", tmp_path / "classifier", *data],
        "favor.eval.language.perplexity": [llama_folder, "--texts", novel_file, "--samples", 3, *language],
        "favor.eval.language.needle": [llama_folder, "--text", novel_file, *needles],
    }
    return {name: [str(word) for word in words] for name, words in found.items()}


def test_two_processes_give_the_results_of_one(commands, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    run_several(evaluate, commands, two, 2, f"file://{tmp_path / 'rendezvous'}")
    evaluate(0, commands, one)
    assert len(results(one)) == 10
    assert results(two) == results(one)
    told, quiet, alone = (json.loads(p.read_text()) for p in (two / "0.txt", two / "1.txt", one / "0.txt"))
    assert quiet["printed"] == ""
    assert told["printed"].count("\n") == alone["printed"].count("\n")
    for name, count in alone["counts"].items():
        assert told["counts"][name] + quiet["counts"][name] == count
        assert 2 * quiet["counts"][name] >= count - 4
    assert all("2 processes" in path.read_text() for path in two.rglob("*.md"))


def test_a_program_that_cannot_share_its_work_is_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["long_form"])
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        long_form.cli()
    assert "favor.eval.long_form: error: runs in one process, got 2" in capsys.readouterr().err
