"""The loss of a student: each part against torch's own functions, and what it refuses."""

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification

from favor.train.common.teacher import Teacher, hidden_loss, logits_loss, relative_squared_error

TINY = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 20}


def model(kind=BertForSequenceClassification, labels=3, seed=0, **options):
    torch.manual_seed(seed)
    return kind(BertConfig(**TINY | options, num_labels=labels)).eval()


def batch(label):
    ids = torch.arange(24).view(3, 8) % 19 + 1
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": label}


def test_divergence_is_that_of_torch():
    found, goal = torch.randn(2, 5, 4)
    log_p, log_q = (own.log_softmax(-1) for own in (goal, found))
    expected = torch.nn.functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    torch.testing.assert_close(logits_loss(found, goal, None), expected)
    kept = torch.tensor([1, 0, 1, 1, 0])
    only = logits_loss(found[kept > 0], goal[kept > 0], None)
    torch.testing.assert_close(logits_loss(found, goal, kept), only)


def test_padding_has_no_part_in_the_error_of_hidden_states():
    found, goal = torch.randn(2, 3, 5, 4)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 0]])
    rows = mask > 0
    expected = (found[rows] - goal[rows]).square().sum() / goal[rows].square().sum()
    torch.testing.assert_close(relative_squared_error(found, goal, mask), expected)
    twice = hidden_loss((goal, found, goal), (found, goal, goal), mask)  # the first are the embeddings
    torch.testing.assert_close(twice, expected / 2)


@pytest.mark.parametrize("weights", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.5, 2.0, 0.25)], ids=str)
def test_the_loss_is_the_weighted_sum_of_its_parts(weights):
    student, exact = model(seed=1), model()
    given = batch(torch.tensor([0, 2, 1]))
    hidden, logits, task = weights
    teacher = Teacher(exact, hidden_weight=hidden, logits_weight=logits, task_weight=task)
    loss = teacher.loss(student, given)
    own, goal = (each(**given, output_hidden_states=True) for each in (student, exact))
    expected = hidden * hidden_loss(own.hidden_states, goal.hidden_states, given["attention_mask"])
    expected = expected + logits * logits_loss(own.logits, goal.logits, None) + task * own.loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert student.bert.embeddings.word_embeddings.weight.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in exact.parameters())


def test_scores_are_compared_by_their_difference():
    student, exact, given = model(labels=1, seed=1), model(labels=1), batch(torch.randn(3))
    loss = Teacher(exact, hidden_weight=0.0, is_regression=True).loss(student, given)
    expected = (student(**given).logits - exact(**given).logits).square().mean()
    torch.testing.assert_close(loss, expected)


def test_predictions_of_padding_do_not_count():
    student, exact = model(BertForTokenClassification, seed=1), model(BertForTokenClassification)
    given = batch(torch.zeros(3, 8, dtype=torch.long))
    loss = Teacher(exact, hidden_weight=0.0).loss(student, given)
    rows = given["attention_mask"] > 0
    found, goal = (each(**given).logits[rows] for each in (student, exact))
    torch.testing.assert_close(loss, logits_loss(found, goal, None))


def test_a_teacher_of_another_shape_is_refused():
    given = batch(torch.tensor([0, 2, 1]))
    for other in ({"hidden_size": 16}, {"num_hidden_layers": 3}):
        with pytest.raises(ValueError, match="give a teacher of the same shape, or set hidden_weight to 0"):
            Teacher(model(**other)).loss(model(), given)
        assert Teacher(model(**other), hidden_weight=0.0).loss(model(), given).isfinite()
