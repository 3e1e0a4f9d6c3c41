"""Parts that tests of the training programs share."""

import contextlib
import io
import json
import shutil
from types import SimpleNamespace

import pytest
from launching import caller, forget_accelerator

from favor.train import glue


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Resets accelerate's settings after each test; a test may also call it."""
    yield forget_accelerator
    forget_accelerator()


@pytest.fixture
def train(bert_folder, glue_folder, tmp_path):
    """Gives a function that runs the program on the tiny checkpoint and data, with options as `name=value`."""
    settings = {"model_name_or_path": bert_folder, "data_dir": glue_folder}
    settings |= {"per_device_train_batch_size": 4, "max_train_steps": 3}
    call = caller(glue.main, tmp_path, settings)
    return lambda task="sst2", output="run", **values: call(output, task_name=task, **values)


@pytest.fixture(scope="session")
def classifier(bert_folder, glue_folder, tmp_path_factory):
    """Trains on SST-2 with favor+ until no error is left: the folder, the results, and what was printed."""
    folder, printed = tmp_path_factory.mktemp("classifier"), io.StringIO()
    settings = {"model_name_or_path": bert_folder, "data_dir": glue_folder, "task_name": "sst2"}
    settings |= {"attn_implementation": "favor+", "num_features": 16, "exact_below": 0}
    settings |= {"per_device_train_batch_size": 4, "max_train_steps": 60, "learning_rate": 1e-2}
    with contextlib.redirect_stdout(printed):
        results = caller(glue.main, folder, settings)("plain")
    return SimpleNamespace(folder=folder / "plain", results=results, printed=printed.getvalue())


@pytest.fixture(scope="session")
def still_folder(bert_folder, tmp_path_factory):
    """Saves the tiny BERT without dropout; its training does not depend on how samples are spread over batches."""
    folder = tmp_path_factory.mktemp("still") / "bert"
    shutil.copytree(bert_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
