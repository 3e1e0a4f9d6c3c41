"""The command `favor`: its help, what it finds, how it ends, and what `check` and `convert` say of tiny models."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from test_programs import ROOT as REPOSITORY
from test_programs import programs
from transformers import AutoModelForCausalLM, DebertaV2Config, Gemma2Config, Gemma2Model, LlamaConfig, LlamaForCausalLM

import favor
from favor.eval.common.pretrained import minilm_path
from favor_command import command
from favor_command.check import without_weights
from favor_command.program import DEBUG
from favor_command.programs import EVAL, ROOT, TRAIN, Folder
from favor_command.saved import read_config

TINY = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SAVED = {"config.json", "model.safetensors", "generation_config.json"}
KINDS = {"linear", "exact", "local", "refused"}


@pytest.fixture
def start(monkeypatch, capsys):
    """Runs the command with some words in this process; returns its exit code, what it printed and its errors."""
    monkeypatch.setattr(sys, "argv", ["favor"])

    def call(*words):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            command.run([str(word) for word in words])
        return ended.value.code or 0, *capsys.readouterr()

    return call


@pytest.fixture
def replaced(monkeypatch):
    """Has the command find a program of the test in place of any other; the words that it saw are in a list."""
    seen = []

    def by(cli):
        monkeypatch.setattr(command, "import_module", lambda name: SimpleNamespace(cli=cli))

    by(lambda: seen.append(list(sys.argv)))
    return SimpleNamespace(seen=seen, by=by)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny saved models; all but the decoder are a config alone."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY, vocab_size=20)).save_pretrained(root / "llama")
    Gemma2Config(**TINY, vocab_size=20).save_pretrained(root / "gemma2")
    DebertaV2Config(**TINY, vocab_size=20).save_pretrained(root / "deberta")
    return root


@pytest.mark.parametrize(("words", "folder"), [((), ROOT), (("train",), TRAIN), (("eval",), EVAL)])
def test_help_lists_every_name_once_with_a_line(start, words, folder):
    code, printed, _ = start(*words)
    assert code == 0
    lines = [line.split(maxsplit=1) for line in printed.splitlines() if line.startswith("  ")]
    assert dict(lines) == {name: member.line for name, member in folder.members().items()}
    assert len(lines) == sum(map(len, folder.groups.values()))
    assert all(f"\n{title}:\n" in printed for title in folder.groups)


def reachable(folder=ROOT):
    for member in folder.members().values():
        yield from reachable(member) if isinstance(member, Folder) else [member.module]


def test_every_program_is_reachable():
    found = {module.removesuffix(".__main__") for module in reachable()}
    assert found == {*programs(), "favor_command.check", "favor_command.convert"}


def test_words_are_handed_on(start, replaced):
    assert start("--version")[:2] == (0, f"favor {favor.__version__}\n")
    assert start("train", "glue", "--seed", "1")[0] == 0
    assert start("eval", "feature-weights", "x")[0] == 0
    assert start(DEBUG, "bench", "--num_attention_heads", "2")[0] == 0
    assert replaced.seen == [
        ["favor train glue", "--seed", "1"],
        ["favor eval feature-weights", "x"],
        ["favor bench", DEBUG, "--num_attention_heads", "2"],
    ]


@pytest.mark.parametrize(
    ("words", "name", "hint"),
    [
        ("chek", "favor", "unknown command chek: did you mean check?"),
        ("train gleu", "favor train", "unknown command gleu: did you mean glue?"),
        ("glue", "favor", "unknown command glue: did you mean train glue?"),
        ("--hlep", "favor", "unknown option --hlep: did you mean --help?"),
        ("check M --lenght 5", "favor check", "unknown option --lenght: did you mean --lengths?"),
        ("check M --device tpu", "favor check", "argument --device: invalid choice: 'tpu' (choose from"),
        ("check no/such/model", "favor check", "expected a model, got 'no/such/model'"),
        ("bench --hep", "favor bench", "unknown option --hep: did you mean --help?"),
        ("check {llama} --attn_implementation lanmark", "favor check", "attn_implementation"),
        ("check {llama} --lengths 0", "favor check", "length must be at least 1, got 0"),
    ],
)
def test_errors_are_one_line(start, folders, words, name, hint):
    code, printed, said = start(*words.format(llama=folders / "llama").split())
    assert (code, printed, said.count("\n")) == (2, "", 1)
    assert said.startswith(f"{name}: error: {hint}")


def test_a_missing_package_is_one_line_and_debug_shows_where(start, monkeypatch):
    def fails(name):
        raise ImportError("datasets is not installed")

    monkeypatch.setattr(command, "import_module", fails)
    code, _, said = start("train", "glue")
    assert (code, said) == (2, "favor train glue: error: datasets is not installed (--debug shows where)\n")
    for words in ([DEBUG, "train", "glue"], ["train", "glue", DEBUG]):
        with pytest.raises(ImportError):
            command.run(words)


def test_ctrl_c_says_how_to_go_on(start, replaced, monkeypatch):
    from favor.train.common.program import program

    def stopped():
        raise KeyboardInterrupt("stopped at step 4; continue with --resume, from checkpoint-4")

    def during_import(name):
        raise KeyboardInterrupt

    replaced.by(program("favor-glue", stopped))
    code, _, said = start("train", "glue")
    assert (code, said) == (130, "\nfavor train glue: stopped at step 4; continue with --resume, from checkpoint-4\n")
    monkeypatch.setattr(command, "import_module", during_import)
    code, _, said = start("train", "glue")
    assert code == 130
    assert said == "\nfavor train glue: stopped before the program began; the same command starts it again\n"


def kinds(description):
    """Kind of each layer as `favor check` writes it, from `favor.describe`."""
    linear = favor.registry.FAMILIES
    return {layer.layer: "linear" if layer.runs in linear else layer.runs for layer in description.layers}


def printed_kinds(printed):
    """Kinds of each layer at all lengths, from the table of `favor check`."""
    rows = [line.replace(",", " ").split() for line in printed.split("\n\n")[0].splitlines()[1:]]
    return {row[0]: [word for word in row[1:] if word in KINDS] for row in rows}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_check_says_what_describe_says(start, folders, bert_folder, name, device):
    folder = bert_folder if name == "bert" else folders / "llama"
    lengths = (100, 1024, 40000)
    words = ["--lengths", *lengths, "--num_features", 64, "--window", 16, "--device", device]
    code, printed, _ = start("check", folder, "--attn_implementation", "favor+", *words)
    assert code == 0
    model = without_weights(read_config(str(folder)))
    model = favor.configure(model, "favor+", num_features=64, window=16)
    expected = [favor.describe(model, length, device=device) for length in lengths]
    found = [kinds(description) for description in expected]
    assert printed_kinds(printed) == {layer: [own[layer] for own in found] for layer in found[0]}
    assert {"exact", "linear"} == {kind for own in found for kind in own.values()}
    last = expected[-1].layers[0]
    assert f"linear, speed {last.speed:g}, memory {last.memory:g}" in printed
    assert f": {expected[0].layers[0].why}\n" in printed


def test_check_says_how_many_positions_there_are(start, folders):
    positions = LlamaConfig.from_pretrained(folders / "llama").max_position_embeddings
    for length, said in ((positions, 0), (positions + 1, 1)):
        printed = start("check", folders / "llama", "--lengths", 16, length)[1]
        assert printed.count(f"the config has {positions} positions: ") == said


def test_the_page_shows_what_check_prints(start):
    page = (REPOSITORY / "docs/guides/command.md").read_text()
    shown = page.partition("$ favor check minilm --lengths 512 8192\n")[2].partition("```")[0]
    assert start("check", minilm_path(), "--lengths", 512, 8192)[1] == shown


def test_check_gives_1_where_nothing_is_linear(start, folders):
    code, printed, _ = start("check", folders / "llama", "--lengths", 16)
    assert code == 1
    assert "2 exact" in printed.splitlines()[-1]
    code, printed, _ = start("check", folders / "gemma2", "--lengths", 100000)
    model = favor.configure(Gemma2Model(Gemma2Config.from_pretrained(folders / "gemma2")), "landmark")
    described = favor.describe(model, 100000)
    assert code == 1
    assert printed_kinds(printed) == {layer.layer: ["refused"] for layer in described.layers}
    assert f"refused at 100000: {described.layers[0].why}\n" in printed
    code, printed, _ = start("check", folders / "deberta")
    assert (code, printed.count("\n")) == (1, 1)
    assert printed.startswith("DebertaV2Model is refused: ")
    assert "never asks transformers for a backend" in printed


def test_convert_saves_a_model_that_loads_as_linear(start, folders, bert_folder, tmp_path):
    options = ["--num_features", 8, "--exact_below", 0]
    code, printed, _ = start("convert", folders / "llama", tmp_path / "out", *options)
    assert code == 0
    assert "2 of 2 attention layers are linear" in printed
    assert "no tokenizer or processor was found" in printed
    assert {path.name for path in (tmp_path / "out").iterdir()} <= SAVED
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before = AutoModelForCausalLM.from_pretrained(folders / "llama")
    assert [layer.runs for layer in favor.describe(again, 50).layers] == ["landmark"] * 2
    assert all(torch.equal(new, old) for new, old in zip(again.parameters(), before.parameters(), strict=True))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["favor"]["num_features"] == 8
    assert "with landmark on cpu" in start("check", tmp_path / "out", "--lengths", 50)[1]
    assert start("convert", bert_folder, tmp_path / "bert")[0] == 0
    assert (tmp_path / "bert" / "tokenizer.json").is_file()


def test_convert_refuses_before_it_loads_weights(start, folders, tmp_path):
    for name, reason in (("gemma2", "soft-capped logits"), ("deberta", "never asks transformers for a backend")):
        code, _, said = start("convert", folders / name, tmp_path / name)
        assert code == 2
        assert reason in said
        assert not (tmp_path / name).exists()
    code, _, said = start("convert", folders / "llama", folders)
    assert code == 2
    assert "expected a new folder" in said
