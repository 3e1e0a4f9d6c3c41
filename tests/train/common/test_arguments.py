"""Options of dataclasses on a command line, and that their help names what the code takes."""

from dataclasses import MISSING, dataclass

import pytest

from favor.train.common.arguments import Checked, option
from favor.train.common.program import DataclassParser


@dataclass(kw_only=True)
class Base(Checked):
    """Of the base. And more."""

    name: str = option(MISSING, "A name.", choices=("x", "other"))
    number: int | None = option(None, "A number.", above=0, most=5)


@dataclass(kw_only=True)
class Further(Base):
    """Of the further one."""

    rate: float = option(0.5, "50 % of it.")
    resume: bool = option(False, "Go on.")
    seeds: list[int] = option([1, 2], "Seeds.", least=0, below=9)
    words: list[str] | None = option(None, "Words.")


def read(*words):
    return DataclassParser("prog", "Text.", [Further]).parse(words)[0]


def test_values_have_the_types_of_their_fields():
    assert read("--name", "x") == Further(name="x", number=None, rate=0.5, resume=False, seeds=[1, 2], words=None)
    given = ("--name", "x", "--number", "3", "--rate", "2", "--resume", "--seeds", "4", "5", "--words", "a", "b")
    assert read(*given) == Further(name="x", number=3, rate=2.0, resume=True, seeds=[4, 5], words=["a", "b"])
    assert isinstance(read(*given).rate, float)


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--number", "0"), "number must be greater than 0 and at most 5, got 0"),
        (("--number", "6"), "number must be greater than 0 and at most 5, got 6"),
        (("--seeds", "0", "9"), r"seeds must be at least 0 and less than 9, got \[0, 9\]"),
        (("--seeds", "8", "-1"), "seeds must be at least 0"),
        (("--name", "othre"), "name must be one of x, other, got 'othre': did you mean other"),
    ],
)
def test_values_that_are_not_allowed_are_errors(words, said):
    with pytest.raises(ValueError, match=said):
        read("--name", "x", *words)
    assert read("--name", "x", "--number", "5", "--seeds", "0").seeds == [0]
    read("--name", "x").seeds.append(3)
    assert read("--name", "x").seeds == [1, 2]  # lists are not shared
