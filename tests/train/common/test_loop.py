"""The order of samples, which class a checkpoint is loaded with, and the loss of a student."""

from itertools import product

import pytest
import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification

from favor.models import bert
from favor.models.conformer import ConformerConfig
from favor.models.stored_backend import keeps_backend, zoo_configuration, zoo_model
from favor.train.common.loop import EpochSampler, mix, weight_average
from favor.train.common.pretrained import load_exact
from favor.train.common.teacher import Teacher, hidden_loss, logits_loss, relative_squared_error

LENGTHS = torch.randint(5, 100, (103,), generator=torch.Generator().manual_seed(0)).tolist()
BATCH = 8


def padding(order):
    """Tokens of padding, all batches together."""
    batches = [[LENGTHS[i] for i in order[start : start + BATCH]] for start in range(0, len(order), BATCH)]
    return sum(len(batch) * max(batch) - sum(batch) for batch in batches)


def test_batches_grouped_by_length():
    plain, grouped = EpochSampler(len(LENGTHS), 3), EpochSampler(len(LENGTHS), 3, LENGTHS, BATCH)
    orders = [list(plain), list(grouped)]
    assert all(sorted(order) == list(range(len(LENGTHS))) for order in orders)
    assert padding(orders[1]) < 0.5 * padding(orders[0])
    assert list(grouped) == orders[1]
    grouped.set_epoch(1)
    assert list(grouped) != orders[1]
    assert sorted(grouped) == list(range(len(LENGTHS)))
    assert sorted(EpochSampler(5, 3, LENGTHS[:5], BATCH)) == list(range(5))  # fewer than a batch


def test_grouped_batches_are_in_no_order():
    # Sorted ones would end every epoch with the shortest samples, and learn from these last.
    longest = []
    for epoch in range(60):
        grouped = EpochSampler(len(LENGTHS), 3, LENGTHS, BATCH)
        grouped.set_epoch(epoch)
        lengths = torch.tensor([LENGTHS[i] for i in grouped], dtype=torch.float64)
        longest.append(torch.stack([batch.mean() for batch in lengths.split(BATCH)]))
    means, spread = torch.stack(longest).mean(0), torch.stack(longest).std() / 60**0.5
    assert len(means) == 13  # the last one of 7 samples
    assert (means - sum(LENGTHS) / len(LENGTHS)).abs().max() < 4 * spread


def test_the_average_follows_the_weights():
    weights = torch.nn.Linear(2, 1, bias=False)
    average, expected = weight_average(weights, 0.5), None
    for count, value in enumerate([1.0, 2.0, 5.0, -3.0]):
        torch.nn.init.constant_(weights.weight, value)
        average.update_parameters(weights)
        rate = min(0.5, (1 + count) / (10 + count))
        expected = value if expected is None else rate * expected + (1 - rate) * value
        torch.testing.assert_close(average.module.weight, torch.full((1, 2), expected))


def test_no_two_lists_of_numbers_give_one_seed():
    lists = [numbers for length in range(5) for numbers in product(range(4), repeat=length)]
    assert len({mix(*numbers) for numbers in lists}) == len(lists)


SIZES = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def test_the_zoo_is_found_by_what_its_classes_extend():
    assert zoo_configuration(BertConfig) is bert.PerformerBertConfig
    assert zoo_configuration(bert.PerformerBertConfig) is zoo_configuration(transformers.LlamaConfig) is None
    assert zoo_configuration(transformers.WhisperConfig) is None  # WhisperForCTC is another model than a Whisper
    assert zoo_model(transformers.BertForMaskedLM) is bert.PerformerBertForMaskedLM
    assert zoo_model(transformers.LlamaForCausalLM) is None
    assert keeps_backend("performer_bert")
    assert keeps_backend(ConformerConfig.model_type)
    assert not keeps_backend("bert")


def test_checkpoints_are_loaded_with_the_class_they_name_or_that_of_the_zoo(tmp_path):
    transformers.BertModel(BertConfig(**SIZES)).save_pretrained(tmp_path / "plain")
    assert type(load_exact(tmp_path / "plain")) is transformers.BertModel
    own = load_exact(tmp_path / "plain", performer=True)
    assert type(own) is bert.PerformerBertModel
    own.save_pretrained(tmp_path / "own")
    assert type(load_exact(tmp_path / "own")) is bert.PerformerBertModel
    BertForSequenceClassification(BertConfig(**SIZES)).save_pretrained(tmp_path / "head")
    assert type(load_exact(tmp_path / "head", performer=True)) is bert.PerformerBertForSequenceClassification
    transformers.BertForNextSentencePrediction(BertConfig(**SIZES)).save_pretrained(tmp_path / "other")
    assert type(load_exact(tmp_path / "other")) is transformers.BertForNextSentencePrediction
    with pytest.raises(ValueError, match="holds a BertForNextSentencePrediction, and there is no class"):
        load_exact(tmp_path / "other", performer=True)


def model(kind=BertForSequenceClassification, labels=3, seed=0, **options):
    torch.manual_seed(seed)
    return kind(BertConfig(**SIZES | {"num_hidden_layers": 2} | options, num_labels=labels)).eval()


def batch(label):
    ids = torch.arange(24).view(3, 8) % 19 + 1
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": label}


def test_divergence_is_that_of_torch():
    found, goal = torch.randn(2, 5, 4)
    logs = (own.log_softmax(-1) for own in (found, goal))
    expected = torch.nn.functional.kl_div(*logs, reduction="batchmean", log_target=True)
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


def test_scores_are_compared_by_their_difference_and_predictions_of_padding_do_not_count():
    student, exact, given = model(labels=1, seed=1), model(labels=1), batch(torch.randn(3))
    loss = Teacher(exact, hidden_weight=0.0, is_regression=True).loss(student, given)
    torch.testing.assert_close(loss, (student(**given).logits - exact(**given).logits).square().mean())
    student, exact = (model(transformers.BertForTokenClassification, seed=seed) for seed in (1, 0))
    given = batch(torch.zeros(3, 8, dtype=torch.long))
    loss = Teacher(exact, hidden_weight=0.0).loss(student, given)
    rows = given["attention_mask"] > 0
    found, goal = (each(**given).logits[rows] for each in (student, exact))
    torch.testing.assert_close(loss, logits_loss(found, goal, None))


def test_a_teacher_of_another_shape_is_refused():
    given = batch(torch.tensor([0, 2, 1]))
    for other in ({"hidden_size": 8}, {"num_hidden_layers": 3}):
        with pytest.raises(ValueError, match="give a teacher of the same shape, or set hidden_weight to 0"):
            Teacher(model(**other)).loss(model(), given)
        assert Teacher(model(**other), hidden_weight=0.0).loss(model(), given).isfinite()
