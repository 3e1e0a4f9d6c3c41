"""Parts that tests of the training programs share."""

import json
import shutil

import pytest
from accelerate.state import AcceleratorState, PartialState
from launching import caller

from favor.train import glue


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Resets accelerate's settings, which last as long as the process, after each test; a test may also call it."""

    def forget() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()

    yield forget
    forget()


@pytest.fixture
def train(bert_folder, glue_folder, tmp_path):
    """Gives a function that runs the program on the tiny checkpoint and data, with options as `name=value`."""
    settings = {"model_name_or_path": bert_folder, "data_dir": glue_folder}
    settings |= {"per_device_train_batch_size": 4, "max_train_steps": 3}
    call = caller(glue.main, tmp_path, settings)
    return lambda task="sst2", output="run", **values: call(output, task_name=task, **values)


@pytest.fixture(scope="session")
def still_folder(bert_folder, tmp_path_factory):
    """Saves the tiny BERT without dropout; its training does not depend on how samples are spread over batches."""
    folder = tmp_path_factory.mktemp("still") / "bert"
    shutil.copytree(bert_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
