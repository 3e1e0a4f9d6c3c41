"""Small corpora of made-up speech: one that a model can learn, each letter is a tone; models that know its words."""

import io
import json
import re
import tarfile
from pathlib import Path

import numpy as np
import soundfile
import torch
import transformers
from tiny_speech import RATE, sound
from transformers import WhisperProcessor

from favor.eval.small_decoder import make_tokenizer
from favor.train import distill
from favor.train.speech import loaders
from favor.train.text import distill_data

WORDS = ("BAD", "CAB", "DAD", "FACE", "BEAD", "ACE", "FED", "CAFE")
# Settings of a training of a Conformer, with linear and with exact attention, of CTC on a Whisper, and of a Whisper.
CONFORMER = {"preset": "tiny", "tokenizer_type": "char", "attn_implementation": "favor#", "num_features": 16}
CONFORMER |= {"exact_below": 0, "per_device_train_batch_seconds": 8, "max_train_steps": 6, "learning_rate": 2e-3}
EXACT = CONFORMER | {"attn_implementation": "sdpa", "num_features": None, "exact_below": None, "max_train_steps": 4}
HEAD = {"architecture": "ctc", "tokenizer_type": "char", "per_device_train_batch_seconds": 24}
HEAD |= {"max_train_steps": 4, "learning_rate": 2e-3, "encoder_learning_rate": 4e-4}
WHISPER = {"attn_implementation": "favor#", "num_features": 16, "exact_below": 0, "max_train_steps": 4}
WHISPER |= {"per_device_train_batch_seconds": 24, "learning_rate": 4e-4}
# A model to go on from has a size and a tokenizer.
AGAIN = {"preset": None, "tokenizer_type": None}


def tones(text: str, generator: np.random.Generator) -> np.ndarray:
    """About 0.15 s for each letter, the pitch of which says what it is, and silence for a space."""
    parts = []
    for letter in text:
        time = np.arange(int(RATE * generator.uniform(0.13, 0.17))) / RATE
        pitch = 0 if letter == " " else 250 * 1.35 ** (ord(letter) - ord("A"))
        envelope = np.sin(np.pi * np.arange(len(time)) / len(time))
        parts.append(0.3 * envelope * np.sin(2 * np.pi * pitch * time))
    noise = 0.001 * generator.normal(size=sum(map(len, parts)))
    return (np.concatenate(parts) + noise).astype(np.float32)


def few_and_short(monkeypatch, samples: int, seconds: float) -> None:
    """Makes the samples of a distillation on the corpus, which is small, shorter and fewer."""
    monkeypatch.setattr(distill, "CALIBRATION_SAMPLES", samples)
    monkeypatch.setattr(loaders, "JOIN_SECONDS", seconds)
    for module in (loaders, distill_data):
        monkeypatch.setattr(module, "HELD_OUT_SAMPLES", samples)


def write_chapter(root: Path, split: str, speaker: int, chapter: int, said: list, ending: str = ".flac") -> None:
    """LibriSpeech's layout: (number, text, samples) of each utterance."""
    folder, name = root / "LibriSpeech" / split / str(speaker) / str(chapter), f"{speaker}-{chapter}"
    folder.mkdir(parents=True)
    for number, _, samples in said:
        soundfile.write(folder / f"{name}-{number:04d}{ending}", samples, RATE)
    (folder / f"{name}.trans.txt").write_text("".join(f"{name}-{number:04d} {text}\n" for number, text, _ in said))


def write_corpus(root: Path, sizes: dict[str, int], words: tuple[int, int] = (2, 4), seed: int = 0) -> Path:
    """LibriSpeech's layout: splits of so many utterances, one speaker and chapter each."""
    generator = np.random.default_rng(seed)
    for speaker, (split, size) in enumerate(sizes.items(), 1):
        said = []
        for index in range(size):
            text = " ".join(generator.choice(WORDS, size=generator.integers(*words)))
            said.append((index, text, tones(text, generator)))
        write_chapter(root, split, speaker, 7, said)
    return root


SPECIAL = [f"<|{word}|>" for word in ("endoftext", "startoftranscript", "startofprev", "nospeech", "notimestamps")]
TOKENS = [*(f"Ġ{word.lower()}" for word in WORDS), *"abcdef", "Ġ", *SPECIAL]
FRAMES = 600


def make_processor() -> WhisperProcessor:
    """Whisper's special tokens, and the words of the corpus in small letters."""
    words = [f"Ġ{word.lower()}" for word in WORDS]
    merges = [(word[:end], word[end]) for word in words for end in range(1, len(word))]
    vocabulary = dict.fromkeys([*TOKENS[:-5], *("".join(pair) for pair in merges)])
    entries = {token: number for number, token in enumerate([*vocabulary, *SPECIAL])}
    ends = dict.fromkeys(("unk_token", "bos_token", "eos_token", "pad_token"), SPECIAL[0])
    tokenizer = transformers.WhisperTokenizer(vocab=entries, merges=merges, **ends)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.set_prefix_tokens(predict_timestamps=False)
    return WhisperProcessor(transformers.WhisperFeatureExtractor(chunk_length=FRAMES // 100), tokenizer)


def save(path: Path, processor: WhisperProcessor) -> Path:
    """Saves the model and its processor in a folder."""
    torch.manual_seed(0)
    end, start, no_times = processor.tokenizer.convert_tokens_to_ids([SPECIAL[0], SPECIAL[1], SPECIAL[4]])
    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    sizes = {"encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": len(processor.tokenizer)}
    sizes |= {"max_source_positions": FRAMES // 2, "max_target_positions": 24}
    config = transformers.WhisperConfig(**sizes, **special, suppress_tokens=None, begin_suppress_tokens=None)
    model = transformers.WhisperForConditionalGeneration(config)
    options = {"max_length": 24, "is_multilingual": False, "return_timestamps": False}
    model.generation_config = transformers.GenerationConfig(**options, no_timestamps_token_id=no_times, **special)
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return path


def save_causal(folder):
    """Writes a LLaMA with random weights and its tokenizer."""
    tokenizer = make_tokenizer("bad cab face ace\nBAD CAB", 60)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.3, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


SPOKEN = ("BAT", "COT", "DO", "EAR", "FIN", "GO", "HER", "IT'S")


def transcript(number):
    """One to four words."""
    source = np.random.default_rng(number)
    return " ".join(source.choice(SPOKEN, source.integers(1, 5)))


def write_sound(path, seconds, seed=0, rate=RATE):
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, sound(seconds, seed, rate), rate)
    return path


def librispeech(folder, split="dev", ending=".flac", lengths=(1.0, 0.8, 1.2, 0.7), speakers=(7, 12)):
    """A corpus in LibriSpeech's layout: two speakers, a chapter each, half of the utterances in each."""
    for place, speaker in enumerate(speakers):
        numbers = range(place, len(lengths), 2)
        said = [(number, transcript(number), sound(lengths[number], number)) for number in numbers]
        write_chapter(folder, split, speaker, 100 + speaker, said, ending)
    return folder


def rows(folder, number=3, ending="wav"):
    """Audio files and the rows of a manifest for them."""
    for row in range(number):
        write_sound(folder / "audio" / f"{row}.{ending}", 0.5 + 0.1 * row, row)
    return [{"audio": f"audio/{row}.{ending}", "text": transcript(row)} for row in range(number)]


def assert_told(told, expected):
    """The reason of each name, and of no other, has the words that are expected."""
    assert told.keys() == expected.keys()
    for name, words in expected.items():
        assert re.search(words, told[name])


def write_manifest(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_shard(path, members, form=tarfile.USTAR_FORMAT):
    """A tar file of (name, bytes) pairs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def members(utterances, told=True):
    """Audio with a JSON file, or with a text alone."""
    pairs = []
    for one in utterances:
        row = {"text": one.text, "id": one.id, "speaker": one.speaker, "chapter": one.chapter, "seconds": one.seconds}
        text = (".json", json.dumps(row)) if told else (".txt", one.text + "\n")
        pairs += [(one.id + ".flac", one.audio.read_bytes()), (one.id + text[0], text[1].encode())]
    return pairs
