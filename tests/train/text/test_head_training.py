"""The output layer's own optimizer in the training program: options, accumulation, resuming."""

import pytest
import torch
from safetensors.torch import load_file
from stopping import whole_and_resumed
from transformers import AutoModelForSequenceClassification

from favor.optim import CombinedOptimizer, SoftmaxBound
from favor.train.common.pretrained import make_optimizer
from favor.train.glue import Arguments

BOUND = {"head_optimizer": "softmax_bound"}


def close(one, other, atol):
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    for name in first:
        # Attention does not change with a key's bias: its gradient is rounding noise, which Adam blows up.
        if not name.endswith("key.bias"):
            torch.testing.assert_close(first[name], second[name], atol=atol, rtol=1e-4)


def given(bert_folder, *words):
    return Arguments.parse(
        ["--model_name_or_path", str(bert_folder), "--task_name", "sst2", "--output_dir", "o", *words]
    )


def test_every_parameter_has_one_optimizer_and_options_arrive(bert_folder):
    model = AutoModelForSequenceClassification.from_pretrained(bert_folder)
    words = ("--head_optimizer", "softmax_bound", "--head_learning_rate", "0.5")
    arguments = given(bert_folder, *words)
    optimizer, clipped = make_optimizer(model, arguments.train, arguments.head, 2)
    assert isinstance(optimizer, CombinedOptimizer)
    _, head = optimizer.optimizers
    assert isinstance(head, SoftmaxBound)
    group = head.param_groups[0]
    assert group["lr"] == 0.5
    assert {id(p) for p in group["params"]} == {id(p) for p in model.classifier.parameters()}
    parameters = [p for each in optimizer.param_groups for p in each["params"]]
    assert sorted(map(id, parameters)) == sorted(map(id, model.parameters()))
    assert not {id(p) for p in clipped} & {id(p) for p in model.classifier.parameters()}


def test_adamw_head_with_a_learning_rate_of_its_own(bert_folder):
    model = AutoModelForSequenceClassification.from_pretrained(bert_folder)
    arguments = given(bert_folder, "--head_learning_rate", "0.5")
    optimizer, clipped = make_optimizer(model, arguments.train, arguments.head, 2)
    assert [group["lr"] for group in optimizer.param_groups] == [5e-5, 5e-5, 0.5, 0.5]
    assert len(clipped) == len(list(model.parameters()))


def test_regression_is_refused(train):
    with pytest.raises(ValueError, match="is for a softmax, and this task is a regression"):
        train("stsb", **BOUND)


def test_it_learns_with_its_defaults(train):
    # The words good and bad decide, and the body hardly moves: what is learnt, the head learns.
    settings = {"max_train_steps": 60, "learning_rate": 1e-4}
    bound, adamw = train(output="bound", **settings, **BOUND), train(output="adamw", **settings)
    assert bound["metrics"]["accuracy"] > 0.6
    assert bound["train_loss"] < adamw["train_loss"] - 0.02


@pytest.mark.parametrize("head", [{}, BOUND], ids=["AdamW", "SoftmaxBound"])
def test_accumulated_steps_are_those_of_large_batches(head, train, still_folder, tmp_path):
    """Without dropout, and with sizes that divide, two batches of 4 are one of 8."""
    common = {"model_name_or_path": still_folder, **head}
    train(output="two", gradient_accumulation_steps=2, **common)
    train(output="one", per_device_train_batch_size=8, **common)
    close(tmp_path / "two", tmp_path / "one", atol=1e-5)


def test_resume_repeats_the_uninterrupted_run(train, tmp_path):
    settings = {"max_train_steps": 7, "checkpointing_steps": 2, **BOUND}
    whole, resumed = whole_and_resumed(train, tmp_path, 4, **settings)
    assert resumed["train_loss"] == whole["train_loss"]
