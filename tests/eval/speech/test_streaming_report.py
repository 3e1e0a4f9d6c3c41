"""Streaming: streams against the whole, the size of the state by its formula, the rules of the report.

No speed is asserted.
"""

import numpy as np
import pytest
import torch
from tiny_speech import save_model

from favor.eval import streaming
from favor.eval.speech.long_form_cell import Setup, noise
from favor.models.conformer import ConformerStream

SETUP = Setup("tiny", num_features=16, causal=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(streaming, "REPEATS", 2)
    monkeypatch.setattr(streaming, "CHECK_SECONDS", 1.3)


SMALL = ["--preset", "tiny", "--num_features", "16"]


def test_a_stream_that_is_wrong_is_found(monkeypatch, tmp_path, capsys):
    extractor, audio = streaming.make_extractor(SETUP), noise(1.5)
    model = streaming.build("favor+", extractor, SETUP)
    assert 0 <= streaming.difference(model, extractor, audio, 1280) < 1e-4
    right = ConformerStream.feed
    monkeypatch.setattr(ConformerStream, "feed", lambda self, piece: right(self, piece) + 0.01)
    assert streaming.difference(model, extractor, audio, 1280) == pytest.approx(0.01, rel=1e-2)
    monkeypatch.setattr(streaming, "measure", lambda *_: pytest.fail("measured"))
    assert streaming.main([*SMALL, "--output_dir", str(tmp_path), "--backends", "favor+"]) == 1
    assert "logits differ from those of a whole pass: favor+ by 0.01: no times are given" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    short = lambda self, piece: right(self, piece[: len(piece) // 2])  # noqa: E731
    for wrong in (lambda self, piece: torch.nan * right(self, piece), short):
        monkeypatch.setattr(ConformerStream, "feed", wrong)
        assert streaming.difference(model, extractor, audio, 1280) == float("inf")


@pytest.mark.parametrize("backend", ["favor+", "sdpa"])
def test_a_branch_goes_on_by_itself(backend):
    extractor, audio = streaming.make_extractor(SETUP), noise(3.0)
    model = streaming.build(backend, extractor, SETUP)
    stream = model.stream(extractor)
    streaming.feed(stream, audio[:16000], 1280)
    branch = streaming.branch(stream)
    assert branch.model is model
    assert branch.encoder.layers[0] is model.encoder.layers[0]
    found = streaming.feed(branch, audio[16000:], 1600)
    assert branch.frames > stream.frames
    torch.testing.assert_close(found, streaming.feed(stream, audio[16000:], 1600), rtol=0, atol=0)


def test_a_whole_run(ran):
    content, _ = ran(streaming, *SMALL, "--pieces_ms", 80, 320, "--minutes", 0.05, 0)
    assert max(content["differences"].values()) < 1e-4
    rows = {(row["piece_ms"], row["minutes"], row["backend"]): row for row in content["rows"]}
    assert len(rows) == 2 * 2 * 3
    for row in rows.values():
        assert 0 < row["median"] <= row["upper"]
        assert min(row["cpu_factor"], row["factor"]) > 0
    for piece in (80, 320):
        early, late = (rows[piece, minutes, "sdpa"] for minutes in (0, 0.05))
        assert (early["seconds"], late["seconds"]) == (pytest.approx(1.28), pytest.approx(3.0))
        # Keys and values of 4 layers, width 128, for every frame that is new.
        frames = round((late["seconds"] - early["seconds"]) / 0.04)
        assert late["state_bytes"] - early["state_bytes"] == pytest.approx(4 * 2 * 128 * 4 * frames, rel=0.03)
        for name in ("favor+", "favor#"):
            sizes = [rows[piece, minutes, name]["state_bytes"] for minutes in (0, 0.05)]
            # 16 features a head with values of width 32 and a weight each; 14 frames for the convolution.
            state = 4 * (4 * 16 * (32 + 1) + 14 * 128) * 4
            assert sizes == pytest.approx([state, state], rel=0.15)
    assert content["latency_seconds"] == pytest.approx(0.145)
    assert [check["statement"].split(":")[0] for check in content["checks"]] == 3 * ["favor+"] + 3 * ["favor#"]


def row(backend, minutes, state, cpu, factor):
    numbers = {"state_bytes": state, "cpu": cpu, "cpu_factor": factor}
    return {"backend": backend, "piece_ms": 40, "minutes": minutes, **numbers}


def test_what_is_claimed():
    sdpa = [row("sdpa", 0, 10, 1, 0.1), row("sdpa", 5, 1000, 9, 2.0)]
    good = [row("favor+", 0, 1000, 10, 0.4), row("favor+", 5, 1010, 15, 0.9)]
    assert [check.holds for check in streaming.checks([*good, *sdpa])] == [True, True, True]
    bad = [row("favor+", 0, 1000, 10, 0.4), row("favor+", 5, 1011, 15.1, 1.0)]
    assert [check.holds for check in streaming.checks([*bad, *sdpa])] == [False, False, False]


def test_features_of_noise_are_normalised_and_a_model_that_does_not_stream_is_refused(tmp_path):
    features = streaming.make_extractor(SETUP)(noise(5.0, 7), sampling_rate=16000).input_features[0]
    np.testing.assert_allclose(features.mean(0), 0, atol=0.25)
    np.testing.assert_allclose(features.std(0), 1, atol=0.25)
    with pytest.raises(ValueError, match="a model for streaming"):
        streaming.make_extractor(Setup(model_name_or_path=str(save_model(tmp_path, causal=True))))
