"""Sequences cut over two processes: training, resuming and evaluation are those of one process; what is refused."""

import json
from types import SimpleNamespace

import pytest
import torch
from launching import caller, fork, kill_after, options
from safetensors.torch import load_file
from stopping import stopped_after
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import favor
from favor.train import clm, glue, mlm
from favor.train.common.checkpoint import open_run
from favor.train.common.lock import releases_locks
from favor.train.common.pieces import Pieces, pieces_of

STEPS = {"max_train_steps": 20, "checkpointing_steps": 2, "learning_rate": 1e-3, "dropout": 0}
STEPS |= {"max_length": 32, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 5}
PLUS = {"attn_implementation": "favor+", "num_features": 8, "exact_below": 0}
CUT = {"sequence_parallel": 3}
SIZES = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


@pytest.mark.parametrize("program", [mlm, clm, glue], ids=["mlm", "clm", "glue"])
def test_two_processes_are_one(program, bert_folder, decoder_folder, text, shards, glue_folder, tmp_path):
    """Also when they resume what one process began, or one what they began when one of them was killed."""
    given = {**STEPS, **PLUS, "model_name_or_path": decoder_folder if program is clm else bert_folder}
    source = {mlm: {"train_file": text}, clm: {"dataset_name": shards}}
    given |= source.get(program, {"task_name": "sst2", "data_dir": glue_folder})
    given |= {"window": 4} if program is mlm else {}
    call = caller(program.main, tmp_path, given)
    whole = call("whole")
    words = options({**given, "output_dir": tmp_path / "cut", "sequence_parallel": 2})
    if program is mlm:
        kill_after(2, tmp_path / "cut", program.__spec__.name, *words, processes=2)
        call("cut", ("resume",))
    else:
        with stopped_after(2):
            call("cut")
        printed = fork(program.__spec__.name, *words, "--resume", processes=2)
        assert printed.count("continuing from checkpoint-2") == 1  # accelerate gives both of them each batch
    cut = json.loads((tmp_path / "cut" / "all_results.json").read_text())
    assert (cut["num_processes"], cut["steps"]) == (1 if program is mlm else 2, 20)
    assert cut["metrics"] == pytest.approx(whole["metrics"], rel=1e-4)
    assert cut["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-5)
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all((first[name] - second[name]).abs().max() < 1e-4 for name in first)
    assert not list((tmp_path / "cut" / "checkpoint-20").glob("process_1*"))  # so that one process can resume it
    with pytest.raises(ValueError, match=r"num_processes, divided by --sequence_parallel .* was 1 and is 2"):
        releases_locks(open_run)(tmp_path / "cut", {"num_processes": 2}, resume=True, overwrite=False)


def test_samples_of_a_batch_are_gathered_once():
    """Two groups of two processes with two samples each, of which the last one was repeated by accelerate."""
    every = torch.tensor([[[1], [2]], [[10], [20]], [[3], [4]], [[30], [40]]]).flatten(0, 1)
    state = SimpleNamespace(end_of_dataloader=True, remainder=3)
    pieces = Pieces(SimpleNamespace(gather=lambda rows: every, gradient_state=state))
    pieces.size = 2
    assert pieces.gather(every[:2])[..., 0].tolist() == [[1, 2, 3], [10, 20, 30]]


def test_what_needs_whole_sequences_is_refused(bert_folder, text, tmp_path):
    with pytest.raises(ValueError, match=r"takes a multiple of 3 processes, got 1: .*--nproc_per_node 3"):
        mlm.main(options({"model_name_or_path": bert_folder, "train_file": text, "output_dir": tmp_path / "o"} | CUT))
    bert = favor.configure(BertForMaskedLM(BertConfig(**SIZES)), "favor+", window=4)
    llama = favor.configure(LlamaForCausalLM(LlamaConfig(**SIZES)), "landmark")
    exact = BertForMaskedLM(BertConfig(**SIZES))
    for model, given, message in (
        (exact, {}, "sdpa attention would see a piece alone: add --attn_implementation favor"),
        (bert, {"max_length": 90}, "max_length must be a multiple of 12, got 90"),
        (llama, {"max_length": 96}, "max_length must be a multiple of 192, got 96"),
        (bert, {"head_optimizer": "softmax_bound"}, "does not go with head_optimizer softmax_bound"),
        (bert, {"teacher": "folder"}, "does not go with a teacher"),
    ):
        with pytest.raises(ValueError, match=message):
            pieces_of(None, model, {"max_length": 96, "head_optimizer": "adamw", **CUT, **given})
