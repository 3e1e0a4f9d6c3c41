"""A corpus, a Whisper, and the training program with the settings of a module."""

import pytest
from launching import caller
from speech import write_corpus
from tiny_whisper import make_processor, save

from favor.train import asr


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), {"train": 10, "dev": 3})


@pytest.fixture(scope="session")
def whisper(tmp_path_factory):
    return save(tmp_path_factory.mktemp("whisper") / "whisper", make_processor())


@pytest.fixture
def train(corpus, request, tmp_path):
    """Calls the program with SETTINGS of the module, on the Whisper where they name no preset; `name=value` each."""
    settings = {"data_dir": corpus, "seed": 1} | request.module.SETTINGS
    if "preset" not in settings:
        settings["model_name_or_path"] = request.getfixturevalue("whisper")
    return caller(asr.main, tmp_path, settings)
