"""A small corpus, a small CTC model, and runs of programs that write a report."""

import json

import pytest
from tiny_speech import save_model, write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def ctc(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("ctc"))


@pytest.fixture
def sized(monkeypatch):
    """Gives a function that sets constants of a module, until the test ends."""

    def call(module, **values):
        for name, value in values.items():
            monkeypatch.setattr(module, name, value)

    return call


@pytest.fixture
def ran(tmp_path):
    """Gives a function that runs a program, checks what all share, and returns its JSON and its Markdown."""

    def call(program, *words, name="x", code=None, folder=tmp_path / "out"):
        found = program.main([*map(str, words), "--output_dir", str(folder), "--name", name])
        content, text = json.loads((folder / f"{name}.json").read_text()), (folder / f"{name}.md").read_text()
        assert found == (int(not all(check["holds"] for check in content["checks"])) if code is None else code)
        assert (content if "command" in content else content["facts"])["command"] in text
        assert str(tmp_path) not in text + json.dumps(content)
        assert all(path.stat().st_size > 1000 for path in folder.glob("*.png"))
        return content, text

    return call
