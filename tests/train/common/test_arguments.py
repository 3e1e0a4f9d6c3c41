"""Options of dataclasses on a command line, and that their help names what the code takes."""

from dataclasses import dataclass, field, fields

import pytest

import favor
from favor.models.speech.transcript.tokenizer import MODEL_TYPES
from favor.train.common.arguments import BackendArguments, option
from favor.train.common.program import DataclassParser
from favor.train.speech.arguments import SpeechDataArguments


@dataclass(kw_only=True)
class Base:
    """Of the base. And more."""

    name: str = field(metadata={"help": "A name."})
    number: int | None = option(None, "A number.")


@dataclass(kw_only=True)
class Further(Base):
    """Of the further one."""

    rate: float = option(0.5, "50 % of it.")
    resume: bool = option(False, "Go on.")
    seeds: list[int] = field(default_factory=lambda: [1, 2], metadata={"help": "Seeds."})
    words: list[str] | None = field(default=None, metadata={"help": "Words."})


def read(*words):
    return DataclassParser("prog", "Text.", [Further]).parse(words)[0]


def test_values_have_the_types_of_their_fields():
    assert read("--name", "x") == Further(name="x", number=None, rate=0.5, resume=False, seeds=[1, 2], words=None)
    given = ("--name", "x", "--number", "3", "--rate", "2", "--resume", "--seeds", "4", "5", "--words", "a", "b")
    assert read(*given) == Further(name="x", number=3, rate=2.0, resume=True, seeds=[4, 5], words=["a", "b"])
    assert isinstance(read(*given).rate, float)


def test_default_lists_are_not_shared():
    read("--name", "x").seeds.append(3)
    assert read("--name", "x").seeds == [1, 2]


@pytest.mark.parametrize(("word", "value"), [("true", True), ("Yes", True), ("0", False), ("false", False)])
def test_a_switch_may_be_written_out(word, value):
    assert read("--name", "x", "--resume", word).resume is value


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "the following arguments are required: --name"),
        (("--name", "x", "--resume", "maybe"), "expected true or false, got 'maybe'"),
        (("--name", "x", "--number", "1.5"), "invalid int value: '1.5'"),
    ],
)
def test_wrong_values_are_one_line(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        read(*words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_options_stand_in_the_group_of_the_class_that_has_them():
    text = DataclassParser("prog", "Text.", [Further]).format_help()
    assert text.startswith("usage: prog --name NAME [OPTION ...]\n\nText.\n")
    base, further = text.partition("Of the base:\n")[2].split("Of the further one:\n")
    assert [line.split()[0] for line in base.splitlines() if line.startswith("  --")] == ["--name", "--number"]
    assert "50 % of it. (default: 0.5)" in further
    assert "Seeds. (default: 1 2)" in " ".join(further.split())


def text_of(kind, name):
    return next(own.metadata["help"] for own in fields(kind) if own.name == name)


def test_help_names_what_there_is():
    """Help does not import the modules that know it."""
    assert ", ".join(MODEL_TYPES) in text_of(SpeechDataArguments, "tokenizer_type")
    named = text_of(BackendArguments, "attn_implementation").split(", another of")[0].split(", ")
    assert {"favor#", "landmark"} < set(named) <= set(favor.BACKENDS)
