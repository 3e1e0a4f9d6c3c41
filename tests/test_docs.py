"""What pages of `docs` say of the code is so."""

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import soundfile
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import favor
import favor.decomposition
import favor.landmark
import favor.optim
from favor.models.conformer import ConformerConfig, ConformerFeatureExtractor, ConformerForCTC
from favor.models.speech import ConformerProcessor, train_tokenizer
from favor.models.whisper_ctc import WhisperCTCConfig, WhisperCTCFeatureExtractor, WhisperForCTC

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))
import tables  # noqa: E402

PAGES = sorted((ROOT / "docs").rglob("*.md"))
TROUBLES = ROOT / "docs/guides/troubleshooting.md"


def raised():
    """All messages of errors of the package."""
    return [text for path in tables.files(["favor", "models"]) for _, text in tables.messages_of(path)]


def test_every_quoted_message_is_raised():
    source = "\n".join(raised())
    quoted = re.findall(r"^- `(.+?)`.*:", TROUBLES.read_text(), re.MULTILINE)
    assert len(quoted) > 30
    for message in quoted:
        pattern = r"[^\n]*".join(re.escape(part) for part in message.split("..."))
        assert re.search(pattern, source), message


def test_the_list_of_messages_has_those_of_the_package():
    page = tables.made(TROUBLES.read_text())
    missing = [text for text in raised() if text.strip(" .") and tables.cell_of(text) not in page]
    assert missing == []


def test_a_table_of_speeds_has_the_numbers_of_its_file():
    made = tables.speed("speed_landmark_cpu | bidirectional, forward").splitlines()
    columns = [cell.strip() for cell in made[0].split("|")]
    row = next(line for line in made if line.startswith("| 16,384 |"))
    shown = row.split("|")[columns.index("landmark, 256 selected keys")]
    cells = json.loads((ROOT / "eval/results/speed/speed_landmark_cpu.json").read_text())["cells"]
    wanted = ("bidirectional, forward", "favor:landmark+256", 16384)
    cell = next(cell for cell in cells if (cell["panel"], cell["method"], cell["length"]) == wanted)
    assert float(shown) == pytest.approx(cell["speedup"], rel=0.01)
    with pytest.raises(ValueError, match="no panel"):
        tables.speed("speed_landmark_cpu | sideways")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_comments_give_something_and_names_of_tests_and_of_the_package_exist(page):
    text = page.read_text()
    assert text.count("<!--") == len(tables.COMMENT.findall(text))
    assert "<!--" not in tables.made(text)
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
        assert f"def {name}(" in (ROOT / path).read_text() if name else (ROOT / path).exists(), f"{path}::{name}"
    for name in re.findall(r"`favor\.((?:features|optim|decomposition|landmark)\.\w+(?:\.\w+)?)`", text):
        thing = favor
        for part in name.split("."):
            thing = getattr(thing, part)


def snippets(name):
    """The Python examples of a guide, with the smallest model."""
    text = (ROOT / f"docs/guides/{name}.md").read_text().replace('preset("small"', 'preset("tiny"')
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_the_examples_of_decoders_run():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ids = torch.randint(3, 40, (1, 200), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, eos_token_id=None, **sizes)).eval()
    model.generation_config.max_new_tokens = 20
    grows, fixed, static = snippets("decoders")
    names = {"favor": favor, "model": model, "inputs": inputs, "dataloader": [inputs]}
    for snippet in (grows, static, fixed):  # the last one sets a window
        exec(snippet, names)
    assert names["cache"].get_seq_length() == 219


def test_the_example_of_long_recordings_runs():
    names = {"waveform": 0.1 * torch.randn(16000).numpy()}
    exec(snippets("long_recordings")[0], names)
    assert len(names["tokens"]) == 1


def test_the_examples_of_speech_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tokenizer = train_tokenizer(["GOOD MORNING"], "char")
    ConformerForCTC(ConformerConfig.preset("tiny", vocab_size=len(tokenizer))).save_pretrained("out/asr")
    ConformerProcessor(ConformerFeatureExtractor(), tokenizer).save_pretrained("out/asr")
    sizes = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
    WhisperForCTC(WhisperCTCConfig(**sizes, vocab_size=len(tokenizer))).save_pretrained("out/phonemes")
    ConformerProcessor(WhisperCTCFeatureExtractor(), tokenizer).save_pretrained("out/phonemes")
    for name in ("one.flac", "two.mp3"):
        soundfile.write(name, 0.1 * torch.randn(24000).numpy(), 16000)
    names = {}
    has_decoder = find_spec("flashlight") is not None  # the extra lm, up to Python 3.12
    for snippet in snippets("speech"):
        if has_decoder or "language_model" not in snippet:
            exec(snippet, names)
    assert len(names["results"]) == 2
    assert names["logits"].shape == (1, 75, len(tokenizer))
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-2:]] == ["GOOD", "MORNING"]


def test_the_examples_of_streaming_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tokenizer, audio = train_tokenizer(["GOOD MORNING"], "char"), (0.1 * torch.randn(16000)).split(4000)
    options = {"causal": True, "attn_implementation": "favor+", "favor": {"exact_below": 0}}
    for folder, causal in (("out/asr", True), ("out/chunks", False)):
        config = ConformerConfig.preset("tiny", vocab_size=len(tokenizer), **{**options, "causal": causal})
        ConformerForCTC(config).save_pretrained(folder)
        ConformerProcessor(ConformerFeatureExtractor(normalize="none"), tokenizer).save_pretrained(folder)
    names = {"microphone": audio, "microphones": list(zip(audio, audio[::-1], strict=True))}
    first, chunked, text, many, *others = snippets("streaming")
    exec(first, names)
    assert names["stream"].frames > 0
    exec(chunked, names)
    assert not names["model"].config.causal
    exec(text, names)
    assert capsys.readouterr().out.count("so far:") == 4
    exec(many, names)
    assert [stream.seconds > 0 for stream in names["streams"]] == [True, True]
    names["pieces"] = torch.randn(2, 3, 1, 2, 5, 8)
    for snippet in others:
        exec(snippet, names)
    assert names["out"].shape == (1, 2, 5, 8)
