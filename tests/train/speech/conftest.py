"""A corpus, a Whisper, models of one step, and the training program."""

from functools import partial

import pytest
from launching import caller, forget_accelerator
from speech_corpus import CONFORMER, HEAD, make_processor, save, write_corpus

from favor.models.conformer.configuration_conformer import PRESETS
from favor.train import asr


@pytest.fixture(autouse=True, scope="session")
def smaller():
    """Makes the smallest preset smaller: a quarter of the steps' time, and it learns as well."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "subsampling_conv_channels": 32}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", PRESETS["tiny"] | sizes)
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), {"train": 10, "dev": 3})


@pytest.fixture(scope="session")
def whisper(tmp_path_factory):
    return save(tmp_path_factory.mktemp("models") / "whisper", make_processor())


@pytest.fixture(scope="session")
def models(corpus, whisper):
    """The folder of the Whisper, of a Conformer, and of CTC on the Whisper, which have learned for one step."""
    common = {"data_dir": corpus, "max_train_steps": 1}
    for name, settings in (("conformer", CONFORMER), ("ctc", HEAD | {"model_name_or_path": whisper})):
        caller(asr.main, whisper.parent, settings | common)(name)
        forget_accelerator()
    return whisper.parent


@pytest.fixture
def training(corpus, request, tmp_path):
    """Calls the program with some settings, on the Whisper where they name no preset; `name=value` each."""

    def call(settings, *given, **values):
        settings = {"data_dir": corpus, "seed": 1} | settings
        if "preset" not in settings:
            settings["model_name_or_path"] = request.getfixturevalue("whisper")
        return caller(asr.main, tmp_path, settings)(*given, **values)

    return call


@pytest.fixture
def train(training):
    """Calls the program to make a Conformer with linear attention."""
    return partial(training, CONFORMER)
