"""CTC beam search with a language model and hotwords, against all texts; files of language models, read and written."""

import base64
import gzip
import itertools
import math
import random
import sys
import zlib
from collections import Counter

import pytest
import torch
from tiny_speech import all_texts, build, make_processor, says_each_frame

from favor.models.conformer import ConformerForTransducer
from favor.models.speech import (
    NgramModel,
    WordLexicon,
    WordScorer,
    ctc_align,
    ctc_lexicon_beam,
    ctc_word_beam,
    join_words,
    train_tokenizer,
    write_arpa,
)
from favor.models.speech.word_beam import search_emissions

pytest.importorskip("flashlight.lib.text.decoder", reason="needs flashlight-text, of the extra lm")

LN10 = math.log(10)
LETTERS = train_tokenizer(["A B", "AB BA"], "char")
UNIGRAMS = {"<s>": (-99, -0.3), "</s>": (-0.9, 0), "<unk>": (-1.5, 0), "A": (-0.6, -0.2), "B": (-0.8, -0.4)}
UNIGRAMS |= {"AB": (-1.0, -0.1)}
BIGRAMS = {("<s>", "A"): -0.4, ("A", "B"): -0.5, ("B", "</s>"): -0.3, ("AB", "AB"): -0.7}
ARPA = ["\\data\\", "ngram 1=6", "ngram 2=4", "", "\\1-grams:"]
ARPA += [f"{own}\t{word}" + (f"\t{backoff}" if backoff else "") for word, (own, backoff) in UNIGRAMS.items()]
ARPA += ["", "\\2-grams:", *(f"{own}\t{' '.join(words)}" for words, own in BIGRAMS.items()), "", "\\end\\"]
# The same model, made by KenLM's program build_binary.
BINARY = """
c-qU&O)OBz$yLZGDJihh*U!#KO-##7%}LQq&d=3P&QD2INXswEO)OC;OD!tS%+FIW<zhg9274f}pAks>2Lg}?BUFY7OdhaD7Gs0bEDWfCjR80K
dF(CQ@$a*|Skc6}a=w48Eq;*AgeG24r?}U$trTo0dqbE1B`#5OW{@4T{_GRY7h;0gePBPx@eB;d4$Yc5b6;9o8pxduvt~-#pFQKV4~T*EnSCJt
0qMOkvpGI7WwdNG76$pbvFPoG+UlBCh&lw=T)W_b&JV`D#>U3`k;OIJ%rERY)T{uq&!#jl+m6Ae7>M<Ogd>9!gQF7z0G>NtCj
"""


@pytest.fixture(scope="module")
def arpa(tmp_path_factory):
    path = tmp_path_factory.mktemp("lm") / "lm.arpa"
    path.write_text("\n".join(ARPA) + "\n")
    return path


def by_hand(words):
    """Log probability of a text and its end, by the rule of the ARPA format."""
    total, before = 0.0, "<s>"
    for word in [*(word if word in ("A", "B", "AB") else "<unk>" for word in words), "</s>"]:
        backed_off = UNIGRAMS[before][1] + UNIGRAMS[word][0]
        total, before = total + BIGRAMS.get((before, word), backed_off), word
    return LN10 * total


@pytest.mark.parametrize("frames", [0, 1, 4])
@pytest.mark.parametrize("known", [False, True])
def test_every_text_has_its_ctc_probability_and_the_score_of_its_words(arpa, known, frames):
    """Against the sum over all texts, or those of known words, each of which begins with a space."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(1, frames, len(LETTERS))
    kind, more = (WordLexicon, {}) if known else (WordScorer, {"hotwords": ["A", "B A"], "hotword_weight": 1.3})
    scorer = kind(LETTERS, arpa, lm_weight=0.7, word_score=0.4, **more)
    expected = {}
    for text, log_prob in all_texts(logits[0]) if frames else [((), 0.0)]:
        words = "".join(LETTERS.convert_ids_to_tokens(text)).replace("▁", " ").split()
        if known and not (set(words) <= {"A", "B", "AB"} and list(text) == LETTERS(" ".join(words)).input_ids):
            continue
        hot = 0 if known else words.count("A") + sum(pair == ("B", "A") for pair in itertools.pairwise(words))
        expected[text] = log_prob + 0.7 * by_hand(words) + 0.4 * len(words) + 1.3 * hot
    found = ctc_word_beam(logits, [frames], scorer, beam_size=5000)[0]
    scores = [one.log_prob for one in found]
    assert scores == sorted(scores, reverse=True)
    assert dict(zip((tuple(one.tokens) for one in found), scores, strict=True)) == pytest.approx(expected, abs=1e-4)
    assert len(found) == len(expected)


def test_impossible_tokens_are_in_no_hypothesis():
    torch.manual_seed(1)
    logits = torch.randn(1, 4, len(LETTERS))
    logits[:, :, 1:4] = -math.inf
    found = ctc_word_beam(logits, [4], WordScorer(LETTERS, hotwords=["A"]), 3000)[0]
    assert {token for one in found for token in one.tokens} == {4, 5}
    assert all(math.isfinite(one.log_prob) for one in found)


def test_a_hotword_is_worth_the_same_however_it_is_cut_into_tokens(arpa):
    scorer = WordScorer(LETTERS, hotwords=["AB A", "A"], hotword_weight=2.0)
    expected = {"A": 2, "AB": 0, "AB A": 4, "AB AB": 0, "AB A A": 6, "A AB AB A": 6, "B": 0, "": 0}
    assert {text: scorer.score(LETTERS(text).input_ids) for text in expected} == pytest.approx(expected)
    context, total = scorer.start(), 0.0
    for token, sum_so_far in zip(LETTERS("AB A").input_ids, (0, 2, 1, 1.5, 2), strict=True):
        context, gain = scorer.advance(context, token)
        total += gain
        assert total == pytest.approx(sum_so_far)  # of a whole hotword, or of the letters of one that has begun


def test_a_hotword_outside_of_the_model_has_the_probability_of_a_rare_word(tmp_path):
    path = tmp_path / "closed.arpa"
    path.write_text("\n".join(ARPA).replace("ngram 1=6", "ngram 1=5").replace("-1.5\t<unk>\n", ""))
    tokens = LETTERS("BA").input_ids
    options = {"language_model": NgramModel(path), "lm_weight": 1.0, "word_score": 0.0}
    end = LN10 * UNIGRAMS["</s>"][0]
    assert WordScorer(LETTERS, **options).score(tokens) == pytest.approx(LN10 * -100.3 + end)
    scorer = WordScorer(LETTERS, hotwords=["BA"], hotword_weight=3.0, **options)
    assert scorer.score(tokens) == pytest.approx(LN10 * -7 + end + 3)


@pytest.mark.parametrize("kind", ["arpa", "upper", "gzip", "binary"])
def test_files_of_language_models(arpa, tmp_path, kind):
    path = tmp_path / f"lm.{kind}"
    content = {"arpa": arpa.read_bytes(), "gzip": gzip.compress(arpa.read_bytes())}
    content["upper"] = arpa.read_bytes().replace(b"<unk>", b"<UNK>")  # KenLM takes it too
    content["binary"] = zlib.decompress(base64.b85decode(BINARY.replace("\n", "")))
    path.write_bytes(content[kind])
    model = NgramModel(path)
    assert model.words == {"A", "B", "AB"}
    for words in ([], ["A", "B"], ["B", "A", "AB", "AB"], ["C"], ["<s>", "A"], ["</s>"]):
        state, total = model.start(), 0.0
        for word in words:
            state, log_prob = model.score(state, word)
            total += log_prob
        assert total + model.finish(state) == pytest.approx(by_hand(words), abs=1e-5)


def test_long_rows_are_searched_in_pieces(arpa, monkeypatch):
    """Cut at blanks, the best text, its score and its times are those of one search."""
    tokens = LETTERS("AB A BA AB B A").input_ids
    torch.manual_seed(2)
    frames = 3 * len(tokens)
    logits = 0.5 * torch.randn(1, frames, len(LETTERS)) - 4.0
    logits[0, range(0, frames, 3), tokens] = 6.0
    logits[0, range(1, frames, 3), tokens] = 5.0
    logits[0, 2::3, 0] = 20.0
    scorer = WordScorer(LETTERS, arpa, hotwords=["AB B", "BA"], hotword_weight=2.0)
    whole, times = (search(logits, [frames], scorer)[0] for search in (ctc_word_beam, search_emissions))
    assert times == ctc_align(logits, [frames], [tokens])[0]
    monkeypatch.setattr(WordScorer, "piece", 10)
    pieces = ctc_word_beam(logits, [frames], scorer, piece=10)[0]
    assert whole[0].tokens == pieces[0].tokens == tokens
    assert pieces[0].log_prob == pytest.approx(whole[0].log_prob, abs=1e-3)
    assert search_emissions(logits, [frames], scorer)[0] == times


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no model\n", "cannot be read as a language model: first non-empty line was"),
        (b"\xff\xfe\x00", "is neither an ARPA file in UTF-8 nor a binary file of KenLM"),
        (gzip.compress(b"\\data\\\n" * 99, mtime=0)[:20], "is neither an ARPA file in UTF-8 nor"),
        (b"mmap lm http<unk>\0\xff\0", "is neither an ARPA file in UTF-8 nor"),
        (b"mmap lm http", "was built without its words: give the ARPA file"),
        (None, "language_model must be an ARPA file or a binary file of KenLM; .* is no file"),
    ],
)
def test_refusals_of_files(tmp_path, content, message):
    path = tmp_path / "lm"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        NgramModel(path)


LM = {"language_model": "lm.arpa"}
WRONG = ("TWO WORDS", "", "</s>")
ZEROS = torch.zeros(1, 2, len(LETTERS))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: WordScorer(LETTERS, lm_weight=0.5), "lm_weight needs language_model, which is not given"),
        (lambda: WordScorer(LETTERS, hotword_weight=3), "hotword_weight needs hotwords, which is not given"),
        (lambda: WordScorer(LETTERS, lm_weight=-1.0, **LM), "lm_weight must be a number of at least 0"),
        (lambda: WordScorer(LETTERS, word_score=math.nan, **LM), "word_score must be a number, got nan"),
        (lambda: WordScorer(LETTERS, hotwords=["A"], hotword_weight=math.inf), "hotword_weight must be a number"),
        (lambda: WordScorer(LETTERS, hotwords=["A", "Ba"]), "cannot write 'a' of 'Ba'"),
        (lambda: WordScorer(LETTERS, hotwords=[" "]), "hotwords must not hold an empty word"),
        (lambda: WordScorer(LETTERS, hotwords="AB"), "must be a list of words, got the string 'AB'"),
        (lambda: WordScorer(LETTERS, "small.arpa"), "no word that the tokenizer can write; one .* is 'a'"),
        (lambda: WordLexicon(LETTERS, "small.arpa"), "no word that the tokenizer can write; one .* is 'a'"),
        (lambda: WordLexicon(LETTERS, "lm.arpa", lm_weight=-1), "lm_weight must be a number of at least 0"),
        (lambda: WordLexicon(train_tokenizer(["A B", "AB BA"] * 9, "bpe", 8), "lm.arpa"), "must be one of characters"),
        (lambda: write_arpa(["A"], "lm", 1), "order must be 2 to 6, which KenLM reads, got 1"),
        (lambda: write_arpa(["A"], "lm", 7), "order must be 2 to 6, which KenLM reads, got 7"),
        *((lambda word=word: write_arpa(["A"], "lm", words=[word]), "must be single words") for word in WRONG),
        (lambda: write_arpa("A B", "lm"), "texts must be a list of texts, or lines of a file, got a string"),
        (lambda: write_arpa(["", " "], "lm"), "texts must hold at least one word"),
        (lambda: write_arpa(["A <unk>"], "lm"), "texts must not hold <s>, </s>, <unk>, got 'A <unk>'"),
        (lambda: ctc_word_beam(ZEROS, [2], WordScorer(LETTERS), 0), "beam_size must be at least 1, got 0"),
        (lambda: ctc_word_beam(ZEROS[..., 1:], [2], WordScorer(LETTERS)), r"logits must be \[B, L, 6\]"),
        (lambda: ctc_word_beam(ZEROS + math.nan, [2], WordScorer(LETTERS)), "logits must be finite"),
        (lambda: ctc_lexicon_beam(ZEROS[..., 1:], [2], WordLexicon(LETTERS, "lm.arpa")), r"logits must be \[B, L, 6"),
        (lambda: ctc_lexicon_beam(ZEROS, [2], WordLexicon(LETTERS, "lm.arpa"), piece=2), "at least 3 frames, got 2"),
    ],
)
def test_refusals(arpa, call, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lm.arpa").write_bytes(arpa.read_bytes())
    write_arpa(["a b"], "small.arpa")
    with pytest.raises((TypeError, ValueError), match=message):
        call()


# One says one letter per frame.
MODELS = says_each_frame(len(LETTERS)), build(ConformerForTransducer, vocab_size=len(LETTERS))
PROCESSOR = make_processor("A B", "AB BA")


@pytest.mark.parametrize("known_words", [False, True])
def test_transcribe_searches_with_times(arpa, known_words):
    model, processor = MODELS[0], PROCESSOR
    torch.manual_seed(3)
    waveforms = [0.1 * torch.randn(length).numpy() for length in (12000, 20000)]
    options = {"lm_weight": 2.0, "word_score": 2.5, "hotwords": ["B AB"], "hotword_weight": 2.0}
    options = {"lm_weight": 0.0, "word_score": -4.0} if known_words else options
    given = {"processor": processor, "known_words": known_words, "beam_size": 20, **options}
    results = model.transcribe(waveforms, 1, "word", language_model=arpa, **given)
    again = model.transcribe(waveforms, 2, "word", language_model=NgramModel(arpa), **given)
    assert [one.text for one in results] == [one.text for one in again]
    scorer = (WordLexicon if known_words else WordScorer)(processor.tokenizer, arpa, **options)
    for waveform, result in zip(waveforms, results, strict=True):
        with torch.no_grad():
            logits = model(processor(waveform, sampling_rate=16000)["input_features"]).logits
        best = ctc_word_beam(logits, [logits.shape[1]], scorer, 20)[0][0].tokens
        assert result.text == processor.decode(best, group_tokens=False)
        aligned = join_words(processor.tokenizer.spans(ctc_align(logits, [logits.shape[1]], [best])[0]))
        assert [one.text for one in result.spans] == result.text.split()
        assert not known_words or set(result.text.split()) <= {"A", "B", "AB"}
        for span, word in zip(result.spans, aligned, strict=True):
            assert (span.text, span.confidence) == (word.text, pytest.approx(word.confidence, abs=1e-4))
            assert (span.start, span.end) == pytest.approx((0.04 * word.start, 0.04 * word.end))
    greedy = model.transcribe(waveforms, processor=processor)
    assert [one.text for one in greedy] != [one.text for one in results]
    assert model.transcribe(waveforms, processor=processor, beam_size=1, hotwords=[]) == greedy
    assert model.transcribe(waveforms, processor=processor, beam_size=5)[0].text


@pytest.mark.parametrize(
    ("options", "message", "of_transducer"),
    [
        ({"beam_size": 1, "hotwords": ["A"]}, "beam_size must be above 1 with hotwords, got 1", None),
        ({"hotwords": ["A"]}, None, "hotwords needs a ConformerForCTC, got a ConformerForTransducer"),
        ({"beam_size": 0}, "beam_size must be at least 1, got 0", None),
        ({"beam_size": 4}, None, "beam_size needs a ConformerForCTC"),
        ({"word_score": 1.0}, "word_score needs language_model", "word_score needs a ConformerForCTC"),
        ({"known_words": True}, "known_words needs language_model, whose words are the known ones", None),
        ({"known_words": True, "language_model": "lm"}, None, "known_words needs a ConformerForCTC"),
        ({"known_words": True, "language_model": "lm", "hotwords": ["A"]}, "hotwords has no effect", None),
        ({"known_words": True, "language_model": "lm", "beam_size": 1}, "beam_size must be above 1", None),
    ],
)
def test_transcribe_refuses_what_it_would_ignore(options, message, of_transducer):
    for model, said in zip(MODELS, (message, of_transducer), strict=True):
        if said is not None:
            with pytest.raises(ValueError, match=said):
                model.transcribe(torch.zeros(9000), processor=PROCESSOR, **options)


def test_a_search_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashlight", None)
    for options in ({"beam_size": 4}, {"hotwords": ["A"]}, {"language_model": "lm.arpa"}):
        with pytest.raises(ImportError, match=r'flashlight-text is not installed .*`pip install "favor\[lm\]"`'):
            MODELS[0].transcribe(torch.zeros(9000), processor=PROCESSOR, **options)


def test_a_row_that_says_nothing_has_no_words(arpa):
    lexicon = WordLexicon(LETTERS, arpa)
    logits = torch.full((1, 3, len(LETTERS)), -math.inf)
    logits[..., LETTERS.unk_token_id] = 0.0
    assert ctc_lexicon_beam(logits, [3], lexicon) == [[]]
    assert search_emissions(logits, [3], lexicon) == [[]]
    assert ctc_lexicon_beam(logits, [3], lexicon, piece=3)[0] == []


@pytest.mark.parametrize("order", [2, 3, 6])
def test_a_written_model_gives_a_probability_to_every_word(tmp_path, order):
    texts = ["THE CAT SAT", "THE DOG SAT ON THE CAT", "A", "", "THE CAT SAT ON THE MAT", "SAT SAT SAT"]
    model = NgramModel(write_arpa(texts, tmp_path / "lm.arpa", order))
    assert model.words == {word for text in texts for word in text.split()}
    for history in ("", "THE", "THE CAT", "ON THE CAT", "SAT", "MAT MAT", "BIRD", "SAT ON THE CAT SAT SAT"):
        state = model.start()
        for word in history.split():
            state, _ = model.score(state, word)
        each = [math.exp(model.score(state, word)[1]) for word in [*model.words, "BIRD"]]
        assert sum(each) + math.exp(model.finish(state)) == pytest.approx(1, abs=1e-4)


def test_a_written_model_by_hand(tmp_path):
    """Two texts, too few for discounts of their own: 0.5 from all counts of 1, and 1 from counts of 2.

    Before A are 1, before B 2, before C 1 and before the end 2 different words, in all 6, over 5 kinds with `<unk>`.
    """
    model = NgramModel(write_arpa(["A B", "B C"], tmp_path / "lm.arpa", 2))
    before = {"A": 0.5, "B": 2 - 1, "C": 0.5, "</s>": 2 - 1, "D": 0}
    alone = {word: (count + (0.5 + 1 + 0.5 + 1) / 5) / 6 for word, count in before.items()}
    after_begin = {word: (count + 2 * 0.5 * alone[word]) / 2 for word, count in {"A": 0.5, "B": 0.5, "D": 0}.items()}
    for word, expected in after_begin.items():
        assert math.exp(model.score(model.start(), word)[1]) == pytest.approx(expected, abs=1e-5)
        assert math.exp(model.score(model.start(in_text=True), word)[1]) == pytest.approx(alone[word], abs=1e-5)
    state, _ = model.score(model.start(), "B")
    assert math.exp(model.finish(state)) == pytest.approx((0.5 + 2 * 0.5 * alone["</s>"]) / 2, abs=1e-5)


def test_discounts_out_of_range_are_those_of_few_counts(tmp_path):
    """Words said one, two, three times and, five of them, four times: 3 or more would give 3 - 4 / 3 * 5 = -3.7.

    As a first word one said four times has 4 of 26, less 1.5. A word is preceded by a beginning alone, and the end by
    eight words, in all 16, over 10 kinds with `<unk>`.
    """
    texts = [f"W{word}" for word, times in enumerate((1, 2, 3, 4, 4, 4, 4, 4)) for _ in range(times)]
    model = NgramModel(write_arpa(texts, tmp_path / "lm.arpa", 2))
    alone = (1 - 0.5 + (8 * 0.5 + 1.5) / 10) / 16
    expected = (4 - 1.5 + (0.5 + 1 + 6 * 1.5) * alone) / 26
    assert math.exp(model.score(model.start(), "W7")[1]) == pytest.approx(expected, abs=1e-5)


def kneser_ney(texts, words, history, word):
    """P(word | history) straight from the texts, by equations 26 and 27 of Chen and Goodman (1999), order 3."""
    grams = [
        [tuple(text[place : place + size]) for text in texts for place in range(len(text) - size + 1)]
        for size in (1, 2, 3)
    ]
    counts = [Counter(found) for found in grams]
    for size in (0, 1):
        before = Counter(gram[1:] for gram in counts[size + 1])
        counts[size] = {gram: counts[size][gram] if gram[0] == "<s>" else before[gram] for gram in counts[size]}
    del counts[0][("<s>",)]

    def probability(history):
        own = {gram[-1]: count for gram, count in counts[len(history)].items() if gram[:-1] == history}
        shorter = probability(history[1:]) if history else 1 / (len(words) + 2)
        if not own:
            return shorter
        once, twice, thrice, often = (list(counts[len(history)].values()).count(number) for number in range(1, 5))
        part = once / (once + 2 * twice)
        taken = [0, 1 - 2 * part * twice / once, 2 - 3 * part * thrice / twice, 3 - 4 * part * often / thrice]
        discounted = own.get(word, 0) - taken[min(3, own.get(word, 0))]
        return (discounted + shorter * sum(taken[min(3, count)] for count in own.values())) / sum(own.values())

    return probability(history)


def test_a_written_model_is_smoothed_as_kneser_and_ney_do(tmp_path):
    generator = random.Random(0)
    words = [f"W{number}" for number in range(40)]
    weights = [1 / (number + 1) for number in range(40)]
    texts = [generator.choices(words, weights, k=generator.randint(1, 6)) for _ in range(120)]
    model = NgramModel(write_arpa([" ".join(text) for text in texts], tmp_path / "lm.arpa", 3))
    said = [["<s>", *text, "</s>"] for text in texts]
    for text in texts[:12]:
        state, history = model.start(), ("<s>",)
        for word in [*text, "W0", "W7"]:
            expected = kneser_ney(said, model.words, history, word)
            state, log_prob = model.score(state, word)
            assert math.exp(log_prob) == pytest.approx(expected, rel=1e-4)
            history = (*history, word)[-2:]


def test_more_words_of_a_written_model(tmp_path):
    """Words that the texts lack are as probable as `<unk>`, and all probabilities still sum to 1."""
    model = NgramModel(write_arpa(["A B", "B A A"], tmp_path / "lm.arpa", 2, words=["NEW", "A"]))
    assert model.words == {"A", "B", "NEW"}
    start = model.start()
    scores = {word: model.score(start, word)[1] for word in ("A", "B", "NEW", "OTHER")}
    assert scores["NEW"] == pytest.approx(scores["OTHER"])
    assert sum(map(math.exp, [*scores.values(), model.finish(start)])) == pytest.approx(1, abs=1e-4)
