"""Performer Conformer: padding, causality, saving, the pipeline, the Transducer's parts."""

from itertools import pairwise

import numpy as np
import pytest
import tiny_speech
import torch
import transformers
from tiny_speech import SIZES, make_processor
from torch.nn import functional
from transformers import AutoModel, AutoModelForCTC, AutoProcessor, pipeline

from favor.models.conformer import Chunks, ConformerConfig, ConformerForCTC, ConformerForTransducer, ConformerModel
from favor.models.speech import transducer_greedy, transducer_loss

LABELS = torch.tensor([[3, 4, 4, 5], [6, 7, -100, -100], [8, -100, -100, -100]])
BACKENDS = ("sdpa", "eager", "favor+", "favor++", "favor#", "favor# window", "favor_relu")


def build(kind, backend: str = "favor#", **changes):
    name, _, window = backend.partition(" ")
    return tiny_speech.build(kind, name, {"window": 8 if window else 0}, **changes)


def batch(lengths=(90, 61, 13)) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(len(lengths), max(lengths), 10, generator=generator)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_features": features.masked_fill(~mask[..., None], 50.0), "attention_mask": mask}


PADDED = [(backend, causal, None) for backend in BACKENDS for causal in (False, True)]
PADDED += [(backend, False, Chunks(6)) for backend in ("sdpa", "favor+")]
PADDED += [("sdpa", False, Chunks(6, left=1)), ("eager", False, Chunks(6, left=0))]


@pytest.mark.parametrize(("backend", "causal", "chunks"), PADDED)
@pytest.mark.filterwarnings("ignore:.*parameters from this sequence:UserWarning")
def test_padding_changes_nothing(backend, causal, chunks):
    model, inputs = build(ConformerForCTC, backend, causal=causal), batch()
    with torch.no_grad():
        together = model(**inputs, chunks=chunks).logits
        assert together.isfinite().all()
        for row, length in enumerate([90, 61, 13]):
            alone = model(inputs["input_features"][row : row + 1, :length], chunks=chunks).logits[0]
            assert len(alone) == model.subsampled_lengths(torch.tensor(length))
            torch.testing.assert_close(together[row, : len(alone)], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
def test_padding_and_activation_checkpointing_change_no_gradient_and_no_statistics():
    """Training: batch normalisation counts real frames once, whatever padding holds and however long it is."""
    results = []
    for padding, extra, checkpointing in ((0.0, 0, False), (50.0, 40, False), (50.0, 0, True)):
        model, inputs = build(ConformerForCTC, dropout=0.0, activation_dropout=0.0, attention_dropout=0.0), batch()
        features = inputs["input_features"].masked_fill(~inputs["attention_mask"][..., None], padding)
        inputs["input_features"] = functional.pad(features, (0, 0, 0, extra), value=padding)
        inputs["attention_mask"] = functional.pad(inputs["attention_mask"], (0, extra))
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train()(**inputs, labels=LABELS).loss.backward()
        results.append([p.grad for p in model.parameters()] + [b for n, b in model.named_buffers() if "running" in n])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-4, atol=1e-5)
    model = build(ConformerForCTC).train()
    model(**batch((13,)), labels=torch.tensor([[3]])).loss.backward()  # of one frame
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_encoder_compiles_without_graph_breaks():
    model, inputs = build(ConformerForCTC, num_hidden_layers=1), batch()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not hasattr(transformers, "AutoModelForRNNT"), reason="transformers has no such Auto class")
@torch.no_grad()
def test_a_transducer_comes_back_and_lends_its_encoder(tmp_path):
    model, inputs = build(ConformerForTransducer, ctc_weight=0.3), batch()
    model.save_pretrained(tmp_path)
    loaded, encoder = (kind.from_pretrained(tmp_path) for kind in (transformers.AutoModelForRNNT, AutoModel))
    assert torch.equal(loaded.generate(**inputs), model.generate(**inputs))
    assert torch.equal(encoder(**inputs).last_hidden_state, model.encode(**inputs)[0])


@pytest.mark.parametrize("network", ["lstm", "stateless"])
def test_the_transducer_loss_is_that_of_all_logits(network):
    """And its prediction network goes token by token."""
    sizes = {"prediction_context_size": 3, "ctc_weight": 0.3, "max_cells": 7}
    model, inputs = build(ConformerForTransducer, prediction_network=network, **sizes), batch()
    out = model(**inputs, labels=LABELS)
    hidden, lengths = model.encode(**inputs)
    tokens, state, parts = functional.pad(LABELS.clamp_min(0), (1, 0)), None, []
    for token in tokens.split(1, dim=1):
        part, state = model.predict(token, state)
        parts.append(part)
        assert {len(tensor) for tensor in state} == {3}
    logits = model.join(hidden[:, :, None], torch.cat(parts, dim=1)[:, None])
    expected = transducer_loss(logits, LABELS, lengths, torch.tensor([4, 2, 1]))
    torch.testing.assert_close(out.transducer_loss, expected)
    torch.testing.assert_close(out.loss, 0.7 * expected + 0.3 * out.ctc_loss)
    out.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


PROCESSOR = make_processor("THE CAT SAT ON A MAT", "A DOG")


def test_the_pipeline_gives_times(tmp_path):
    build(ConformerForCTC, vocab_size=len(PROCESSOR.tokenizer)).save_pretrained(tmp_path)
    PROCESSOR.save_pretrained(tmp_path)
    audio = np.random.default_rng(0).normal(size=48000).astype(np.float32)
    transcriber = pipeline("automatic-speech-recognition", model=str(tmp_path), device="cpu")
    tokenizer, head = transcriber.tokenizer, transcriber.model.ctc_head
    inputs = transcriber.feature_extractor(audio, sampling_rate=16000)
    with torch.no_grad():
        # Random weights say one letter again and again; with this bias they make words.
        logits = transcriber.model(**inputs).logits[0]
        head.bias -= logits.mean(0)
        head.bias[:3] -= torch.tensor([0.0, 9.0, 9.0])
        head.bias[tokenizer.convert_tokens_to_ids("▁")] += (logits - logits.mean(0)).std()
        best = transcriber.model(**inputs).logits[0].argmax(-1).tolist()
    words, chars = (transcriber(audio.copy(), return_timestamps=unit) for unit in ("word", "char"))
    assert words["text"] == chars["text"] == "".join(one["text"] for one in chars["chunks"]) == tokenizer.decode(best)
    assert [one["text"] for one in words["chunks"]] == words["text"].split()
    assert len(words["chunks"]) > 1
    for one in chars["chunks"]:
        first, after = (round(second * 25) for second in one["timestamp"])
        assert {*tokenizer.convert_ids_to_tokens(best[first:after])} == {one["text"].replace(" ", "▁")}
    assert {one["timestamp"][0] for one in words["chunks"]} <= {one["timestamp"][0] for one in chars["chunks"]}
    chunked = transcriber(audio, chunk_length_s=1.0, stride_length_s=0.2, return_timestamps="word")
    assert [one["text"] for one in chunked["chunks"]] == chunked["text"].split()


def configured(**changes):
    return ConformerConfig(**{**SIZES, **changes})


ENCODER, (FRAMES, MASK) = build(ConformerModel), batch().values()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: configured(conv_kernel_size=4), "conv_kernel_size must be odd"),
        (lambda: configured(prediction_network="gru"), "prediction_network must be one of lstm, stateless"),
        (lambda: configured(ctc_weight=1.0), "ctc_weight must be in"),
        (lambda: configured(num_attention_heads=100), "num_attention_heads must be 1 to hidden_size, got 100"),
        (lambda: configured(num_hidden_layers=1025), "num_hidden_layers must be at most 1024, got 1025"),
        (lambda: configured(vocab_size=10**9), "vocab_size must be at most 16777216"),
        (lambda: configured(ctc_loss_reduction="none"), "mean or sum"),
        (lambda: configured(favor={"num_feature": 3}), "num_feature"),
        (lambda: ENCODER(FRAMES[..., :9]), r"\[batch, time, 10\], got \(3, 90, 9\)"),
        (lambda: ENCODER(FRAMES[:, :12]), "12 feature frames are too few"),
        (lambda: ENCODER(FRAMES, MASK.flip(1)), "padding on the right"),
        (lambda: ENCODER(FRAMES, MASK[:, 1:]), "as the features, got"),
    ],
)
def test_bad_configurations_and_inputs_are_refused(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.fixture(scope="module", params=[0.0, 0.3], ids=["alone", "with a CTC head"])
def transducer_folder(request, tmp_path_factory):
    """A saved Transducer that emits many tokens, equal neighbours among them, with its processor."""
    path = tmp_path_factory.mktemp("transducer")
    model = build(ConformerForTransducer, vocab_size=len(PROCESSOR.tokenizer), ctc_weight=request.param)
    with torch.no_grad():
        for parameter in model.joint.parameters():
            parameter.mul_(5)
        model.joint.head.bias[4] += 2
    model.save_pretrained(path)
    PROCESSOR.save_pretrained(path)
    return path


def test_the_pipeline_of_a_transducer_says_what_its_own_search_says(transducer_folder):
    processor = AutoProcessor.from_pretrained(transducer_folder)
    model = ConformerForTransducer.from_pretrained(transducer_folder)
    audio = [np.random.default_rng(seed).normal(size=size).astype(np.float32) for seed, size in ((0, 24000), (1, 9000))]
    tokens = transducer_greedy(model, *model.encode(**processor(audio, sampling_rate=16000)))
    assert any(first == second for ids in tokens for first, second in pairwise(ids))
    expected = [processor.decode(ids, group_tokens=False, skip_special_tokens=True) for ids in tokens]
    ids = model.generate(**processor(audio, sampling_rate=16000))
    for grouped in (True, False):
        assert processor.batch_decode(ids, group_tokens=grouped, skip_special_tokens=True) == expected
    parts = {"tokenizer": processor.tokenizer, "feature_extractor": processor.feature_extractor}
    for given in ({"model": str(transducer_folder)}, {"model": model, **parts}):
        transcriber = pipeline("automatic-speech-recognition", device="cpu", **given)
        assert isinstance(transcriber.model, ConformerForTransducer)
        assert [found["text"] for found in transcriber([piece.copy() for piece in audio])] == expected
        with pytest.raises(ValueError, match="chunk_length_s is for CTC models, this is a Transducer"):
            transcriber(audio[0].copy(), chunk_length_s=0.5, ignore_warning=True)


def test_a_transducer_is_no_ctc_model_unless_asked_for(transducer_folder, tmp_path):
    """A new head would have random weights; the head that is there is not what the Transducer says."""
    with pytest.raises(ValueError, match=r"got a Transducer: load it with ConformerForTransducer.from_pretrained"):
        AutoModelForCTC.from_pretrained(transducer_folder)
    model = ConformerForTransducer.from_pretrained(transducer_folder)
    action = "adds a CTC head with random weights" if model.ctc_head is None else "takes its CTC head alone"
    with pytest.raises(ValueError, match=rf'architectures=\["ConformerForCTC"\] here {action}'):
        ConformerForCTC.from_pretrained(transducer_folder)
    asked = ConformerForCTC.from_pretrained(transducer_folder, architectures=["ConformerForCTC"])
    torch.testing.assert_close(asked.encoder.state_dict(), model.encoder.state_dict(), rtol=0, atol=0)
    if model.ctc_head is not None:
        assert torch.equal(asked.ctc_head.weight, model.ctc_head.weight)
    asked.save_pretrained(tmp_path)
    assert isinstance(AutoModelForCTC.from_pretrained(tmp_path), ConformerForCTC)
