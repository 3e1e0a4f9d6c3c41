"""Words found by their pronunciations, against the sum over all texts of phonemes; files, tokenizers, transcripts."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from tiny_speech import HAS_SEARCH, all_texts, needs_search, says_each_frame, sure_logits

from favor.models.conformer import ConformerFeatureExtractor, ConformerForCTC
from favor.models.speech import (
    ConformerProcessor,
    ConformerTokenizer,
    NgramModel,
    Pronunciations,
    WordLexicon,
    ctc_align,
    ctc_lexicon_beam,
    train_tokenizer,
    write_arpa,
)
from favor.models.speech.word_beam import search_emissions

LINES = ["SEE\tS I", "SEA\tS I", "EITHER\tI S", "EITHER\tS S", "IS\tI S", "EYE\tI", "LACKING\tS Z"]
TEXTS = ["EYE SEE EITHER", "EYE IS EITHER", "THE SEA IS", "EITHER SEE IS", "EYE SEE"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("lexicon") / "words.txt"
    path.write_text("\n".join(LINES) + "\n")
    return path


@pytest.fixture(scope="module")
def spoken(path):
    return Pronunciations(path)


@pytest.fixture(scope="module")
def tokenizer(path):
    """Phonemes I and S alone, so that LACKING cannot be said."""
    some = path.with_name("some.txt")
    some.write_text("\n".join(LINES[:-1]))
    return Pronunciations(some).tokenizer()


@pytest.fixture(scope="module")
def arpa(path):
    return write_arpa(TEXTS, path.with_name("lm.arpa"), 2, words=["LACKING"])


def said(tokenizer, text):
    """Words that a sequence of tokens can be, all of them; none if a word has other phonemes or no space in front."""
    first, *parts = " ".join(tokenizer.convert_ids_to_tokens(text)).split("▁")
    own = [[line.split("\t")[0] for line in LINES[:-1] if line.endswith(f"\t{part.strip()}")] for part in parts]
    return [] if first else list(itertools.product(*own))


@needs_search
@pytest.mark.parametrize("seed", range(3))
def test_every_text_of_known_words_has_its_score(arpa, tokenizer, spoken, seed):
    """A text has the CTC probability of one of its pronunciations, and the best text is found.

    Of texts with one state of the language model the decoder keeps the best, so that others may be lacking.
    """
    torch.manual_seed(seed)
    logits = 2 * torch.randn(1, 5, len(tokenizer))
    lexicon = WordLexicon(tokenizer, arpa, lm_weight=0.7, word_score=0.4, pronunciations=spoken)
    assert lexicon.words == 5
    model, best = NgramModel(arpa), {}
    for text, log_prob in all_texts(logits[0]):
        for words in said(tokenizer, text) if text else [()]:
            state, total = model.start(), log_prob + 0.4 * len(words)
            for word in words:
                state, more = model.score(state, word)
                total += 0.7 * more
            best.setdefault(words, {})[text] = total + 0.7 * model.finish(state)
    found = ctc_lexicon_beam(logits, [5], lexicon, beam_size=5000)[0]
    assert len(best) - 2 <= len(found) == len({one.words for one in found})
    assert [one.log_prob for one in found] == sorted((one.log_prob for one in found), reverse=True)
    for one in found:
        assert one.log_prob == pytest.approx(best[one.words][tuple(one.tokens)], abs=1e-4)
    heard = {one.words for one in found}
    assert found[0].words == max(heard, key=lambda words: max(best[words].values()))


@needs_search
def test_the_language_model_decides_between_homophones(tmp_path, tokenizer, spoken):
    ids = tokenizer("I S-I").input_ids
    logits = sure_logits(len(tokenizer), *ids)
    for word, other in (("SEE", "SEA"), ("SEA", "SEE")):
        path = write_arpa([*2 * [f"EYE {word}"], f"{other} {other} {other}"], tmp_path / "lm.arpa", 2)
        lexicon = WordLexicon(tokenizer, path, 1.0, 0.0, spoken)
        row = ctc_lexicon_beam(logits, [2 * len(ids)], lexicon)[0]
        assert row[0].words == ("EYE", word)
        assert ("EYE", other) in [one.words for one in row]
        emissions = search_emissions(logits, [2 * len(ids)], lexicon)[0]
        assert [one.word for one in emissions if one.word] == ["EYE", word]
        assert [one.token for one in emissions] == row[0].tokens == ids


ALIKE = [f"W{letter}" for letter in "ABCDEFGH"]


@needs_search
@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([f"{before} {name}" for count, name in enumerate(ALIKE, 1) for before in ALIKE[:count]], set(ALIKE[2:])),
        # A word that never begins a text: its place is that in all texts.
        ([*9 * ALIKE[:-1], *(f"{name} {ALIKE[-1]}" for name in ALIKE[:-1])], {ALIKE[-1]}),
    ],
)
def test_the_most_probable_of_many_homophones_can_be_found(texts, expected, tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("".join(f"{name}\tP\n" for name in ALIKE))
    spoken = Pronunciations(path)
    lexicon = WordLexicon(spoken.tokenizer(), write_arpa(texts, tmp_path / "lm.arpa", 2), pronunciations=spoken)
    found = set(lexicon.names.values())
    assert expected <= found
    assert len(found) == 6


@needs_search
def test_long_rows_are_searched_in_pieces(arpa, tokenizer, spoken, monkeypatch):
    """Cut in the middle of the longest pause; each piece is a text of its own. A sure blank parts equal phonemes."""
    first, last = (tokenizer(text).input_ids for text in ("I S-S", "S-I"))
    logits = sure_logits(len(tokenizer), *first, *4 * [0], *last)
    lexicon, frames = WordLexicon(tokenizer, arpa, 0.7, 0.4, spoken), [logits.shape[1]]
    for piece in (1000, 20):
        best = ctc_lexicon_beam(logits, frames, lexicon, piece=piece)[0][0]
        assert best.words == ("EYE", "EITHER", "SEE")
        assert best.tokens == [*first, *last]
        texts = [best.words] if piece == 1000 else [best.words[:2], best.words[2:]]
        assert best.log_prob == pytest.approx(sum(map(lexicon.score, texts)), abs=1e-3)
    monkeypatch.setattr(WordLexicon, "piece", 20)
    (found,) = search_emissions(logits, frames, lexicon)
    assert [replace(one, word="") for one in found] == ctc_align(logits, frames, [best.tokens])[0]
    assert [one.word for one in found if one.word] == list(best.words)


def test_texts_of_phonemes(spoken, tmp_path):
    assert spoken.write("SEE  EITHER SEA") == "S-I I-S S-I"
    assert spoken.read("S-I S-S I-I S") == "SEE EITHER I-I S"
    assert spoken.spellings("EITHER") == ["I-S", "S-S"]
    assert spoken.spellings("OTHER") == []
    tokenizer = spoken.tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert Pronunciations(spoken.save(tmp_path)).spoken == spoken.spoken
    for one in (tokenizer, ConformerTokenizer.from_pretrained(tmp_path)):
        ids = one("S-I  I-S").input_ids
        assert one.convert_ids_to_tokens(ids) == ["▁", "S", "I", "▁", "I", "S"]
        assert one.decode(ids, group_tokens=False) == "S-I I-S"
        space, s, i = ids[:3]
        # A search may leave out the first space, repeat one, or end with one.
        assert one.decode([i, i, 0, i, space, 0, space, s, space, space], group_tokens=True) == "I-I S"
        assert one.decode([space], group_tokens=False) == one.decode([], group_tokens=False) == ""
        assert one("").input_ids == []
        assert one.unk_token_id in one("S-OTHER").input_ids


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"lexicon must be a text in UTF-8 with lines WORD<TAB>PH PH.*none.txt"),
        (b"\xe9\tE\n", "must be a text in UTF-8"),
        (b"", "must hold at least one word"),
        (b"GOOD G UH D", "line 1: must be a word, a tab and phonemes"),
        (b"A\tP\nGOOD DAY\tG", "line 2: must be"),
        (b"A\t", "line 1: must be"),
        (b"A\tP-Q", "without '-'"),
        (b"A\t<pad>", "line 1: must be"),
        ("A\tP ▁".encode(), "line 1: must be"),
    ],
)
def test_refusals_of_files(tmp_path, content, message):
    path = tmp_path / "none.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        Pronunciations(path)


def test_refusals(spoken, arpa):
    with pytest.raises(ValueError, match=r"lacks 2 words of the transcripts: OTHER, MORE. Add a line WORD<TAB>PH PH"):
        spoken.write("OTHER SEE MORE OTHER")
    letters = train_tokenizer(["A B"], "char")
    with pytest.raises(ValueError, match=r"no word whose phonemes are tokens of the model.* SEE S-I"):
        spoken.check(letters)
    if HAS_SEARCH:
        with pytest.raises(ValueError, match="no word that the tokenizer can pronounce; one of its words is 'EITHER'"):
            WordLexicon(letters, arpa, pronunciations=spoken)


@pytest.fixture(scope="module")
def parts(tokenizer):
    """A model, its processor and two recordings."""
    torch.manual_seed(2)
    waveforms = [0.1 * torch.randn(length).numpy() for length in (12000, 20000)]
    processor = ConformerProcessor(ConformerFeatureExtractor(feature_size=10), tokenizer)
    return says_each_frame(len(tokenizer)), processor, waveforms


def test_transcribe_looks_words_up(parts, path, spoken):
    """Without a language model, with times."""
    model, processor, (_, waveform) = parts
    plain = model.transcribe(waveform, processor=processor)[0].text
    result = model.transcribe(waveform, 1, "word", processor, lexicon=path)[0]
    assert result.text == spoken.read(plain) != plain
    assert [one.text for one in result.spans] == result.text.split()
    assert model.transcribe(waveform, 1, "segment", processor, 9.0, lexicon=spoken)[0].spans[0].text == result.text
    phonemes = model.transcribe(waveform, 1, "char", processor, lexicon=spoken)[0].spans
    assert {one.text.strip() for one in phonemes} <= {"S", "I", ""}


@needs_search
def test_transcribe_finds_words_by_their_pronunciation(parts, tokenizer, path, spoken, arpa, tmp_path):
    model, processor, waveforms = parts
    weights = {"lm_weight": 0.3, "word_score": 1.0}
    results = model.transcribe(waveforms, 2, "word", processor, language_model=arpa, lexicon=path, **weights)
    lexicon = WordLexicon(tokenizer, arpa, **weights, pronunciations=spoken)
    for waveform, result in zip(waveforms, results, strict=True):
        with torch.no_grad():
            logits = model(processor(waveform, sampling_rate=16000)["input_features"]).logits
        best = ctc_lexicon_beam(logits, [logits.shape[1]], lexicon)[0][0]
        assert result.text.split() == [one.text for one in result.spans] == list(best.words) != []
    with pytest.raises(ValueError, match="hotwords has no effect with a lexicon of pronunciations"):
        model.transcribe(waveforms, processor=processor, language_model=arpa, lexicon=path, hotwords=["SEE"])
    # The lexicon in the folder of the model is found.
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    spoken.save(tmp_path)
    loaded = ConformerForCTC.from_pretrained(tmp_path).eval()
    again = loaded.transcribe(waveforms, 2, "word", language_model=arpa, **weights)
    assert [one.text for one in again] == [one.text for one in results]
    other = lexicon.weighted(2.0, -1.0)
    expected = [WordLexicon(tokenizer, arpa, *own, spoken).score(["EYE", "SEE"]) for own in ((2.0, -1.0), (0.3, 1.0))]
    assert [one.score(["EYE", "SEE"]) for one in (other, lexicon)] == pytest.approx(expected)
    for bad in ((-1.0, 0.0), (0.0, math.nan)):
        with pytest.raises(ValueError, match="must be a number"):
            lexicon.weighted(*bad)
