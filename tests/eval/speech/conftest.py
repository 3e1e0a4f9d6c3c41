"""A small corpus and a small CTC model."""

import pytest
from tiny_speech import save_model, write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def ctc(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("ctc"))
