"""The table of programs that the command `favor` starts: groups of names, each with its module and a line of help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Program:
    """A program that is started by name."""

    module: str  # with its `cli`
    line: str  # of help


Groups = dict[str, dict[str, "Program | Folder"]]


@dataclass(frozen=True)
class Folder:
    """A name such as `train`, which the name of one of its programs follows."""

    line: str  # of help
    groups: Groups  # programs by name, in groups by title
    note: str = ""  # below the list

    def members(self) -> dict[str, Program | Folder]:
        """Gives the programs of all groups, by name."""
        return {name: member for group in self.groups.values() for name, member in group.items()}


def figures() -> dict[str, Program | Folder]:
    """Finds the programs of `favor.eval.papers`; the first line of each is its line of help."""
    above = Path(__file__).resolve().parents
    # In a checkout the folders stand at its root, in an installed package they are in `favor`.
    paths = [*above[2].glob("eval/papers/*.py"), *above[1].glob("favor/eval/papers/*.py")]
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(paths)}
    return {
        name: Program(f"favor.eval.papers.{name}", text.partition('"""')[2].partition("\n")[0].removesuffix("."))
        for name, text in texts.items()
        if "\ndef main(" in text
    }


TRAIN = Folder(
    "train, fine-tune or adapt a model",
    {
        "text": {
            "glue": Program("favor.train.glue", "fine-tune a pretrained model on a GLUE task"),
            "mlm": Program("favor.train.mlm", "continue the pre-training of a masked language model"),
            "clm": Program("favor.train.clm", "continue the training of a causal language model"),
            "distill": Program("favor.train.distill", "bring linear attention close to a model's exact attention"),
        },
        "speech": {
            "asr": Program("favor.train.asr", "train a Conformer to recognise speech"),
            "nst": Program("favor.train.nst", "noisy student training with speech without transcripts"),
        },
    },
    "On several GPUs: accelerate launch -m favor.train.NAME ...",
)
EVAL = Folder(
    "measure: tables, figures, error rates",
    {
        "quality": {
            "approximation": Program("favor.eval.approximation.__main__", "error of linear attention, per head"),
            "compatibility": Program("favor.eval.compatibility.__main__", "which models of transformers run"),
            "glue": Program("favor.eval.glue.__main__", "GLUE: tasks x backends x seeds"),
        },
        "time and memory": {
            "speed": Program("favor.eval.speed.__main__", "attention and whole models, by length"),
            "roofline": Program("favor.eval.speed.roofline", "least times on a GPU, by arithmetic"),
            "parallel": Program("favor.eval.speed.parallel", "sequences cut over processes: bytes, memory, time"),
            "generation": Program("favor.eval.generation", "time of a token in generation, and memory of the cache"),
            "gpu": Program("favor.eval.gpu", "all that needs a GPU, in visits of some minutes"),
        },
        "relative positions": {
            "positions": Program("favor.eval.positions.text", "T5 with landmarks: its loss, and time and memory"),
            "positions_speech": Program("favor.eval.positions.speech", "Parakeet with landmarks: errors, time, memory"),
        },
        "language models": {
            "needle": Program("favor.eval.language.needle", "what a model finds in a long text"),
            "perplexity": Program("favor.eval.language.perplexity", "perplexity on long texts"),
            "small_decoder": Program("favor.eval.small_decoder", "make a small LLaMA to train with favor train clm"),
        },
        "speech": {
            "asr": Program("favor.eval.asr", "error rates and speed of a saved speech model"),
            "long_form": Program("favor.eval.long_form", "whole chapters in one pass: time and memory"),
            "streaming": Program("favor.eval.streaming", "what each piece of a stream costs"),
            "whisper": Program("favor.eval.whisper", "a pretrained Whisper with a linear encoder"),
            "whisper_ctc": Program("favor.eval.whisper_ctc", "CTC on a Whisper's encoder: three searches"),
            "whisper_ctc_long": Program("favor.eval.whisper_ctc_long", "the same on long recordings"),
            "language_model": Program("favor.eval.speech.language_model", "an n-gram language model of books"),
            "lexicon": Program("favor.eval.speech.lexicon", "pronunciations of words, for phonemes as tokens"),
            "whisper_convert": Program("favor.eval.speech.whisper_convert", "Whisper from the format of CTranslate2"),
        },
        "figures and tables of papers": figures(),
    },
    "The demo is favor demo, the report in a browser favor report.",
)
ROOT = Folder(
    "linear attention for models of transformers",
    {
        "first steps": {
            "demo": Program("favor.eval.demo.__main__", "compare exact and linear attention on an example, offline"),
            "check": Program("favor_command.check", "which attention each layer of a model would run, and its cost"),
            "report": Program("favor.eval.report", "errors and times on your model and text, for a browser"),
            "convert": Program("favor_command.convert", "save a model that runs linear attention from now on"),
        },
        "programs": {
            "bench": Program("favor.eval.speed.__main__", "speed and memory on this machine (favor eval speed)"),
            "train": TRAIN,
            "eval": EVAL,
        },
    },
    "--debug before or after any command shows the traceback of an error; --version is that of favor.",
)
