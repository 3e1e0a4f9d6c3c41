"""What runs a model in evaluation mode gives each of its modules its own mode back, also after an error."""

import ast
import contextlib
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from tiny_speech import build, make_processor
from transformers import BertConfig, BertModel

import favor
from favor.eval import asr
from favor.eval.papers.head_tasks import HeadTask
from favor.models.conformer import ConformerForCTC, ConformerForTransducer
from favor.models.speech import ConformerProcessor
from favor.models.whisper_ctc import WhisperCTCConfig, WhisperCTCFeatureExtractor, WhisperForCTC
from favor.train.common import teacher
from favor.train.speech import pseudo_labels
from favor.train.speech.data import Utterance

IDS = torch.arange(12).view(2, 6)
SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 16}
WHISPER = {"d_model": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 8, "vocab_size": 16}


def bert():
    return BertModel(BertConfig(**SIZES))


def speech(kind):
    processor = make_processor("GO DAD")
    if kind is WhisperForCTC:
        return kind(WhisperCTCConfig(**WHISPER)), ConformerProcessor(WhisperCTCFeatureExtractor(), processor.tokenizer)
    return build(kind, num_hidden_layers=1, vocab_size=len(processor.tokenizer)), processor


def transcribing(kind):
    model, processor = speech(kind)
    return model, lambda: model.transcribe(torch.zeros(8000), processor=processor)


def recognising():
    model, processor = speech(ConformerForCTC)
    return model, lambda: asr.recognise(model, processor, [None])


def labelling():
    model, processor = speech(ConformerForCTC)
    folder = Path(tempfile.mkdtemp())
    heard = [Utterance("a", "", folder / "a.wav", 1.0)]

    def call():
        with patch.object(pseudo_labels, "evaluation_loader", batches):  # that of torch draws a seed
            pseudo_labels.label(model, processor, heard, folder / "labels", teacher="t", beam_size=2)

    return model, call


def batches(*_args, **_options):
    mask = torch.ones(1, 40, dtype=torch.long)
    return [{"index": torch.tensor([0]), "input_features": torch.ones(1, 40, 10), "attention_mask": mask}]


def measuring():
    task = HeadTask(
        "", {"test": (torch.randn(6, 3), torch.arange(6) % 2)}, None, "", lambda model, x: model(x), 4, {}, ""
    )
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(), torch.nn.Linear(4, 2))
    return model, lambda: task.measure(model, "test")


def adapting(call, **options):
    model = bert()
    return model, lambda: call(model, dataloader=[IDS], exact_below=0, **options)


def looking():
    model = bert()
    return model, lambda: teacher.layers_of(model, {"input_ids": IDS})


CALLS = {
    "calibrate": lambda: adapting(favor.calibrate),
    "calibrate with weights": lambda: adapting(favor.calibrate, feature_weights=True, refine_steps=1),
    "convert": lambda: adapting(
        favor.convert, attn_implementation="landmark", layers="auto", length=6, flop_budget=9.0
    ),
    "transcribe, CTC": lambda: transcribing(ConformerForCTC),
    "transcribe, Transducer": lambda: transcribing(ConformerForTransducer),
    "transcribe, Whisper": lambda: transcribing(WhisperForCTC),
    "favor.eval.asr": recognising,
    "pseudo labels": labelling,
    "head_optimizer": measuring,
    "distill": looking,
}


def globals_of():
    random = torch.get_rng_state().numpy().tobytes()
    return torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads(), random


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_each_module_gets_its_own_mode_back(name, fails, monkeypatch):
    """A model in training with some modules frozen by `eval()`; torch's settings and random numbers stay, too."""
    monkeypatch.setattr(asr, "evaluation_loader", batches)
    model, call = CALLS[name]()
    model.train()
    for module in [*model.modules()][::2][1:]:
        module.eval()
    before = {name: module.training for name, module in model.named_modules()}
    assert {*before.values()} == {True, False}
    backend, settings, seen = getattr(getattr(model, "config", None), "_attn_implementation", None), globals_of(), []

    def watch(module, *_inputs):
        seen.append(module.training)
        if fails and len(seen) > 1:
            raise RuntimeError("stopped by the test")

    for module in model.modules():
        if not [*module.children()]:
            module.register_forward_pre_hook(watch)
    with pytest.raises(RuntimeError, match="stopped") if fails else contextlib.nullcontext():
        call()
    assert len(seen) > 1
    assert not any(seen)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert globals_of() == settings
    if fails and backend:
        assert model.config._attn_implementation == backend


def test_the_packages_switch_modes_in_one_place():
    """In `favor` and `models` nothing else calls `eval` or `train` of a model, which the test above could not know."""
    root, found = Path(favor.__file__).parent.parent, set()
    for path in [*root.glob("favor/**/*.py"), *root.glob("models/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in ("eval", "train"):
                found.add((path.name, ast.unparse(node.func)))
    assert found == {("modules.py", "model.eval"), ("tokenizer.py", "sentencepiece.SentencePieceTrainer.train")}
