"""Word pieces against sentencepiece, and decoding against the definition of CTC."""

import itertools
import json
import pickle
import random

import numpy as np
import pytest
import sentencepiece
import torch
from transformers import Wav2Vec2CTCTokenizer

from favor.models.speech import ConformerTokenizer, normalize_transcript, train_tokenizer

MODELS = [("unigram", 80), ("bpe", 80), ("char", None)]
OFFSETS = {"output_char_offsets": True, "output_word_offsets": True}
SYLLABLES = ("BA", "KO", "LI", "TRU", "N", "SHE", "'S", "OU", "GH", "A", "EX", "QUI")


def sentences(number, seed):
    source = random.Random(seed)

    def word():
        return "".join(source.choice(SYLLABLES) for _ in range(source.randint(1, 4)))

    return [" ".join(word() for _ in range(source.randint(1, 12))) for _ in range(number)]


@pytest.fixture(scope="module", params=MODELS, ids=[name for name, _ in MODELS])
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param[0])
    tokenizer = train_tokenizer(sentences(400, 0), *request.param, folder=folder)
    return tokenizer, sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model")), folder


def test_ids_are_those_of_sentencepiece(trained):
    tokenizer, pieces, _ = trained
    odd = ["", " ", "A", "'", "  A   BA ", "XYZ BA", "BAXXBA", "hello", "Z"]
    for text in [*sentences(200, 1), *odd]:
        assert tokenizer(text).input_ids == pieces.encode(text), text
    names = tokenizer.convert_ids_to_tokens([*range(len(tokenizer))])
    assert names == [pieces.id_to_piece(place) for place in range(pieces.get_piece_size())]
    assert names[:3] == ["<pad>", "</s>", "<unk>"]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)


def test_decoding_is_that_of_ctc(trained):
    tokenizer, pieces, _ = trained
    source = random.Random(3)
    paths = [[source.choice((0, 0, 3, 4, 5, 6)) for _ in range(30)] for _ in range(50)]
    expected = [pieces.decode([token for token, _ in itertools.groupby(path) if token]) for path in paths]
    assert [tokenizer.decode(path) for path in paths] == expected
    assert tokenizer.batch_decode(torch.tensor(paths)) == expected
    assert tokenizer.decode(np.array(paths[0]), skip_special_tokens=True) == expected[0]
    repeated = [4, 4, 0, 4, 5]
    assert tokenizer.decode(repeated) == pieces.decode([4, 4, 5])
    assert tokenizer.decode(repeated, group_tokens=False) == pieces.decode([4, 4, 4, 5])
    assert tokenizer.decode([]) == tokenizer.decode([0, 0]) == ""
    assert tokenizer.decode(4) == pieces.decode([4])
    for text in sentences(50, 2):
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids, group_tokens=False) == text
        assert tokenizer.decode([token for one in ids for token in (0, one, one, 0)]) == text


def test_offsets_of_characters_are_those_of_wav2vec2(tmp_path):
    tokenizer = train_tokenizer(sentences(100, 0), "char")
    names = {name.replace("▁", "|"): number for name, number in tokenizer.get_vocab().items()}
    (tmp_path / "vocab.json").write_text(json.dumps(names))
    other = Wav2Vec2CTCTokenizer(tmp_path / "vocab.json", do_lower_case=False, bos_token=None)
    source, space, paths = random.Random(5), tokenizer.convert_tokens_to_ids("▁"), []
    # A space first of all or after a space is a matter of taste: none here.
    letters = sorted({*range(3, len(tokenizer))} - {space})
    for _ in range(40):
        words = [[source.choice((0, 0, *letters)) for _ in range(8)] + [source.choice(letters)] for _ in range(4)]
        paths.append([token for word in words for token in (*word, space, space, 0)][:-3])
    for grouped in (True, False):
        rows = [[one for one in path if grouped or one] for path in paths]
        found, expected = (one.batch_decode(rows, group_tokens=grouped, **OFFSETS) for one in (tokenizer, other))
        assert dict(found) == dict(expected)
    assert set(tokenizer.batch_decode(paths[:3], output_word_offsets=True)) == {"text", "word_offsets"}


def test_words_of_pieces_have_the_frames_of_their_tokens(trained):
    """Every text as one token a frame, with a blank after it, at known places."""
    tokenizer, _, _ = trained
    for text in sentences(30, 6):
        spread, expected = [0, 0], []
        for number, token in enumerate(tokenizer(text).input_ids):
            place, name = len(spread), tokenizer.convert_ids_to_tokens(token)
            spread += [token] * (1 + number % 3) + [0]
            if name.startswith("▁"):
                expected.append([])
            if name != "▁":
                expected[-1] = [*(expected[-1] or [place])[:1], len(spread) - 1]
        found = tokenizer.decode(spread, **OFFSETS)
        assert "".join(one["char"] for one in found.char_offsets) == found.text == text
        assert [one["word"] for one in found.word_offsets] == text.split()
        assert [[one["start_offset"], one["end_offset"]] for one in found.word_offsets] == expected
    for ids in ([], [0, 0]):
        found = tokenizer.decode(ids, **OFFSETS)
        assert (found.text, found.char_offsets, found.word_offsets) == ("", [], [])
    for skip, places in ((False, [0, 3]), (True, [3])):
        found = tokenizer.decode([2, 2, 0, 4], skip_special_tokens=skip, **OFFSETS)
        assert [one["start_offset"] for one in found.char_offsets] == places


def test_saved_and_loaded(trained, tmp_path):
    tokenizer, _, folder = trained
    tokenizer.save_pretrained(tmp_path)
    copies = [ConformerTokenizer.from_pretrained(path) for path in (tmp_path, folder)]
    for copy in [*copies, pickle.loads(pickle.dumps(tokenizer))]:
        assert (type(copy), copy.get_vocab()) == (ConformerTokenizer, tokenizer.get_vocab())
        assert copy.special_tokens_map == tokenizer.special_tokens_map
        for text in sentences(20, 4):
            ids = copy(text).input_ids
            assert ids == tokenizer(text).input_ids
            assert copy.decode([0, *ids, ids[-1]]) == tokenizer.decode(ids)


def test_training_depends_on_the_texts_alone_and_takes_long_ones():
    texts = [*sentences(100, 5), " ".join(["BA"] * 5000 + ["ZE"])]
    first, second = (train_tokenizer(texts, "unigram", 60) for _ in range(2))
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()
    assert "Z" in first.get_vocab()


@pytest.mark.parametrize("model_type", ["unigram", "bpe", "char"])
def test_a_vocabulary_has_a_largest_and_a_smallest_size(model_type):
    texts = sentences(3, 6)
    for asked, limit in ((5000, "most"), (3, "least")):
        with pytest.raises(ValueError, match=rf"vocab_size must be at {limit} \d+") as raised:
            train_tokenizer(texts, model_type, asked)
        size = int(str(raised.value).split(f"at {limit} ")[1].split()[0])
        assert len(train_tokenizer(texts, model_type, size)) == size
        with pytest.raises(ValueError, match=f"vocab_size must be at {limit} {size}"):
            train_tokenizer(texts, model_type, size + (1 if limit == "most" else -1))


def test_refusals():
    for texts, kind, message in (([" ", ""], "bpe", "at least one transcript"), (["A"], "word", "model_type must be")):
        with pytest.raises(ValueError, match=message):
            train_tokenizer(texts, kind, 10)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("HE'S ALREADY THERE", "HE'S ALREADY THERE"),
        ("Mr. Smith-Jones,\tsaid: \u201cno\u201d!", "MR SMITH JONES SAID NO"),
        ("don\u2019t", "DON'T"),
        ("Br\u00f6nte \u00e9t\u00e9 stra\u00dfe", "BRONTE ETE STRASSE"),
        ("in 1999 a", "IN A"),
        ("\u4f60\u597d 42 -- ...", ""),
        ("", ""),
    ],
)
def test_normalized_transcripts(text, expected):
    assert normalize_transcript(text) == expected
    assert normalize_transcript(expected) == expected
