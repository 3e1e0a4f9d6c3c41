"""Long recordings in a Parakeet: both tasks at tiny sizes, and how recordings are cut."""

import pytest
import torch

from favor import registry
from favor.eval.positions import speech, speech_cell, speech_model

TINY = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 2}
TINY |= {"num_mel_bins": 10, "subsampling_factor": 2, "subsampling_conv_channels": 4}


@pytest.fixture
def tiny(sized):
    sized(speech_cell, SIZES=TINY)
    sized(speech_model, SIZES=TINY, JOINED=(1.5, 2.5), EVERY=1)
    sized(speech, isolated=lambda limit, threads, task, *arguments: task(*arguments))
    yield
    registry.FAMILIES.pop("local")
    registry.BACKENDS.pop("local")


def test_both_tasks(corpus, ran, tiny, tmp_path):
    times, text = ran(speech, "--task", "time", "--minutes", 0.1, name="times")
    assert [cell["frames"] for cell in times["cells"]] == [300] * len(speech_cell.TIMED)
    assert "| 0.1 | 300 |" in text
    words = ("--task", "error", "--minutes", 0.02, "--data_dir", corpus)
    errors, _ = ran(speech, *words, "--max_train_steps", 4, name="errors")
    assert len(errors["cells"]) == 4 * len(speech_cell.COMPARED)
    assert {cell["error"] for cell in errors["cells"] if cell["label"] == "exact (sdpa)"} == {0.0}
    model = ("--model_name_or_path", tmp_path / "out" / "errors_model")
    (tmp_path / "out" / "errors.jsonl").unlink()
    again, _ = ran(speech, *words, *model, name="errors")
    assert again["cells"] == errors["cells"]


def test_recordings_hold_all_utterances_of_a_speaker():
    parts = [speech_model.Heard(torch.full((frames, 1), frames), str(frames), "a") for frames in (300, 200, 400, 350)]
    found = speech_model.recordings([*parts, parts[0]._replace(speaker="b")], 7.0)
    assert [own.text for own in found] == ["300 200 400", "400 350"]
    assert [len(own.features) for own in found] == [900, 750]
