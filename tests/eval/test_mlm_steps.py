"""Losses of masked words against steps: the curves, their common start, and what is refused."""

import json

import pytest
from launching import Forked

from favor.eval import mlm_steps
from favor.train.common import checkpoint


def test_curves_begin_where_each_attention_takes_the_same_weights(bert_folder, text, tmp_path, monkeypatch):
    """Exact attention and landmarks, which are exact here, have one curve; features begin higher or lower."""
    words = [str(bert_folder), "--train_file", str(text), "--max_length", "32", "--max_train_samples", "24"]
    words += ["--per_device_train_batch_size", "8", "--max_train_steps", "5", "--num_features", "32"]
    words += ["--exact_below", "0", "--output_dir", str(tmp_path / "runs"), "--results_dir", str(tmp_path)]
    backends = ["sdpa", "landmark", "favor+"]
    monkeypatch.setattr(mlm_steps.launch, "subprocess", Forked)
    assert mlm_steps.main([*words, "--backends", *backends]) == 0
    content = json.loads((tmp_path / "mlm_steps.json").read_text())
    assert list(content["curves"]) == backends
    exact, landmark, random = (content["curves"][name] for name in backends)
    assert list(exact) == list(random) == ["0", "3", "5"]
    assert landmark == pytest.approx(exact, abs=1e-3)
    assert abs(random["0"] - exact["0"]) > 1e-4
    for name, curve in zip(("sdpa", "favor_plus"), (exact, random), strict=True):
        results = json.loads((tmp_path / "runs" / name / checkpoint.RESULTS).read_text())
        assert results["metrics"]["loss"] == curve["5"]
    report = (tmp_path / "mlm_steps.md").read_text()
    assert f"| favor+ | {random['0']:.3f} |" in report
    assert str(tmp_path) not in report
    assert (tmp_path / "mlm_steps.png").read_bytes()[1:4] == b"PNG"
    # Finished runs are not trained again, and not taken for other ones. The report names the machine of their training.
    monkeypatch.setattr(mlm_steps.launch, "train", None)
    cell = tmp_path / "runs" / "sdpa" / "cell.json"
    cell.write_text(json.dumps(json.loads(cell.read_text()) | {"machine": "another machine"}))
    assert mlm_steps.main([*words, "--backends", *backends]) == 0
    assert "another machine" in json.loads((tmp_path / "mlm_steps.json").read_text())["machine"]
    with pytest.raises(ValueError, match="holds a finished run with other arguments"):
        mlm_steps.main([*words, "--seed", "7"])


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--features is set by favor"):
        mlm_steps.main(["start", "--features", "sderf"])
    with pytest.raises(ValueError, match="backend must be one of"):
        mlm_steps.main(["start", "--backends", "linear"])
