"""Samples of two texts: as the tokenizer itself would make them of two texts."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from favor.train.distill import parse_arguments
from favor.train.text.distill_data import IGNORED, Pairs, Texts


def words_of(*template):
    """A tokenizer of single words with a template for one text and for two."""
    names = ["<s>", "</s>", "<unk>", "a", *(f"w{number}" for number in range(200))]
    tokenizer = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if template:
        special = [("<s>", 0), ("</s>", 1)]
        tokenizer.post_processor = processors.TemplateProcessing(template[0], template[1], special)
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if ":1" in "".join(template) else [])]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", model_input_names=names)


TEMPLATES = {
    "bert": ("<s> $A </s>", "<s> $A </s> $B:1 </s>:1"),
    "roberta": ("<s> $A </s>", "<s> $A </s> </s> $B </s>"),
    "xlnet": ("$A </s> <s>", "$A </s> $B:1 </s>:1 <s>:1"),
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=list(TEMPLATES))
def test_a_pair_is_what_the_tokenizer_makes_of_two_texts(template):
    tokenizer = words_of(*template)
    one = tokenizer("a")["input_ids"]
    before = one.index(tokenizer("a", add_special_tokens=False)["input_ids"][0])
    text = " ".join(f"w{number}" for number in range(30))
    ids = torch.tensor([tokenizer(text)["input_ids"]] * 50)
    labels = torch.where(ids > 3, 1000 + ids, IGNORED)
    pairs = Pairs(tokenizer, before, len(one) - before - 1, probability=1.0)
    made = pairs({"input_ids": ids, "labels": labels}, torch.Generator().manual_seed(0))
    words = tokenizer.convert_ids_to_tokens(range(204))
    second_starts = set()
    for place, (row, goals) in enumerate(zip(made["input_ids"], made["labels"], strict=True)):
        found = [words[token] for token in row.tolist()]
        numbers = [int(word[1:]) if word.startswith("w") else None for word in found]
        # The first text begins with w0; the second is every other run of words.
        length = next(place for place in range(before, len(numbers)) if numbers[place] is None) - before
        rest = [number for number in numbers[before + length :] if number is not None]
        assert numbers[before : before + length] == list(range(length))
        assert rest == list(range(rest[0], rest[0] + len(rest)))
        assert 0 <= rest[0] <= length
        second_starts.add(rest[0] == length)
        expected = tokenizer(" ".join(found[before : before + length]), " ".join(f"w{n}" for n in rest))
        assert expected["input_ids"] == row.tolist()
        assert expected.keys() - {"attention_mask"} == made.keys() - {"labels"}
        if "token_type_ids" in made:
            assert expected["token_type_ids"] == made["token_type_ids"][place].tolist()
        assert torch.equal(goals, torch.where(row > 3, 1000 + row, IGNORED))
    assert second_starts == {True, False}
    assert torch.equal(ids[0], torch.tensor(tokenizer(text)["input_ids"]))  # the batch itself is unchanged


def test_some_samples_stay_single_and_short_ones_all(bert_folder):
    tokenizer = AutoTokenizer.from_pretrained(bert_folder)
    (word,) = tokenizer("a", add_special_tokens=False)["input_ids"][:1]
    ids = torch.full((400, 12), word)
    ids[:, 0], ids[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
    made = Pairs(tokenizer, 1, 1, probability=0.25)({"input_ids": ids}, torch.Generator().manual_seed(1))
    number = int((made["token_type_ids"].sum(1) > 0).sum())
    assert abs(number - 100) < 4 * (400 * 0.25 * 0.75) ** 0.5
    single = made["token_type_ids"].sum(1) == 0
    assert torch.equal(made["input_ids"][single], ids[single])
    short = {"input_ids": ids[:, [0, 1, 2, 3, -1]]}
    assert torch.equal(Pairs(tokenizer, 1, 1, 1.0)(short, torch.Generator())["input_ids"], short["input_ids"])
    assert Pairs(tokenizer, 1, 1, 0.0)(short, torch.Generator()) is short


def test_a_tokenizer_without_tokens_between_texts_is_an_error():
    with pytest.raises(ValueError, match="needs a tokenizer that sets special tokens between two texts"):
        Pairs(words_of(), 0, 0, 0.5)
    Pairs(words_of(), 0, 0, 0.0)


def test_steps_draw_lengths_and_pairs_that_depend_on_seed_and_step_alone(bert_folder, text, tmp_path):
    words = ["--model_name_or_path", bert_folder, "--train_file", text, "--output_dir", tmp_path, "--max_length", 32]
    words += ["--lengths", 8, 16, 32, "--pair_probability", 0.5, "--attention_steps", 8]
    texts = Texts(parse_arguments([str(word) for word in words]), AutoTokenizer.from_pretrained(bert_folder), 1, 8)
    batch = next(iter(texts.loader(labels=False, decoder=False)))
    made = [texts.shaped(batch, step) for step in range(60)]
    again = [texts.shaped(batch, step) for step in range(60)]
    assert {own["input_ids"].shape[1] for own in made} == {8, 16, 32}
    assert {bool(own["token_type_ids"].any()) for own in made} == {True, False}
    assert all(torch.equal(one[name], two[name]) for one, two in zip(made, again, strict=True) for name in one)
    assert [own["input_ids"].shape[1] for own in texts.held_out[:3]] == [8, 16, 32]
