"""T5 with landmarks: both tasks of the program, tiny."""

import lzma

import torch
from own_family import registered

from favor.eval.positions import encoder, spans, text


def test_the_loss_with_all_keys_is_the_exact_one(ran, sized, tmp_path):
    for name in ("train", "valid"):
        with lzma.open(tmp_path / f"novels_{name}.txt.xz", "wt") as stream:
            stream.write("".join(f"{number} boats sail to the island. " for number in range(60)))
    sizes = {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 16, "num_layers": 1, "num_decoder_layers": 1}
    sized(spans, SHAPE={**spans.SHAPE, **sizes}, STAGES=((64, 2, 2, 0.5), (128, 1, 1, 0.15)))
    sized(text, WANTED_LENGTH=600, SAMPLES={600: 2})
    with registered():
        content, page = ran(text, "--task", "loss", "--data_dir", tmp_path, "--lengths", 600, "--threads", 1)
    found = {row["attention"]: row for row in content["results"]}
    assert {*found} == {*text.VARIANTS}
    assert found["sdpa"]["error"] == 0 < found["landmark, M = 64, K = 64"]["error"] < found["local"]["error"]
    assert found["landmark"]["error"] < 1e-5  # 768 keys are all
    assert abs(found["landmark"]["above"]) < 1e-3
    assert "DATA" in page


def test_corruption_hides_spans_and_keeps_the_rest():
    ids = spans.FIRST_BYTE + torch.arange(200)
    inputs, labels = spans.corrupt(ids, torch.Generator().manual_seed(0))
    hidden, number, length = spans.corrupted_length(200)
    assert (hidden, number, length, len(inputs)) == (30, 2, 173, 173)
    bare = [own[(own >= spans.FIRST_BYTE) & (own < spans.FIRST_SENTINEL)].tolist() for own in (inputs, labels)]
    assert sorted(bare[0] + bare[1]) == ids.tolist()
    assert len(bare[1]) == hidden
    assert spans.corrupted_length(spans.bytes_of(2048))[2] == 2048


def test_speed_has_time_and_memory_of_every_attention(ran, sized, monkeypatch):
    shape = {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 16, "num_layers": 1, "vocab_size": 50}
    sized(encoder, SHAPE=shape, BUDGET=0.0, FEW=16)
    sized(text, ROUNDS=2, LONGEST={"eager": 256, "sdpa": 256}, SPEED_LENGTH=256)
    monkeypatch.setattr(text, "isolated", lambda limit, threads, task, *arguments: task(*arguments))
    monkeypatch.setattr(encoder, "release_early", lambda: None)
    content, page = ran(text, "--task", "speed", "--lengths", 256, 320, "--threads", 1, code=1)
    rows = [(row["tokens"], row["attention"]) for row in content["results"]]
    assert rows == [*((256, name) for name in encoder.BACKENDS), (320, "landmark"), (320, "favor+")]
    assert all(0 < row["attention_wall"] < row["wall"] for row in content["results"])
    assert page.count("DOES NOT HOLD") > 0
