"""A family in a user's own file is a backend after one call: it runs, calibrates, learns weights, saves and loads."""

import pytest
import torch
from architectures import BERT, LLAMA, padding_mask, tokens
from own_family import OppositeGERF, OppositePairs, registered
from transformers import AutoModel

import favor

OPTIONS = {"num_features": 16, "exact_below": 0}


@pytest.fixture(autouse=True)
def _registered():
    with registered(OppositePairs, OppositeGERF):
        yield


def run(model, is_padded=True):
    with torch.no_grad():
        return model(**tokens(is_padded))[0][padding_mask().bool()]


def test_it_is_a_backend_of_its_own():
    assert {"favor_opposite", "favor_pairs"} <= set(favor.BACKENDS)
    found, exact = run(BERT.build("favor_opposite", **OPTIONS)), run(BERT.build("sdpa"))
    assert not torch.allclose(found, run(BERT.build("favor+", **OPTIONS)))
    many = run(BERT.build("favor_opposite", num_features=4096, exact_below=0))
    assert (many - exact).norm() < 0.3 * (found - exact).norm()


@pytest.mark.filterwarnings("ignore:.*parameters from this sequence:UserWarning")
@pytest.mark.parametrize("make", [BERT, LLAMA], ids=["bert", "llama"])
@pytest.mark.parametrize(
    ("backend", "more"), [("favor_pairs", {}), ("favor_opposite", {"feature_weights": True})], ids=["fitted", "weights"]
)
def test_it_calibrates_and_comes_back_from_a_folder(make, backend, more, tmp_path):
    model = make.build(backend, **OPTIONS)
    before = run(model)
    favor.calibrate(model, [tokens(True)], attn_implementation=backend, **more, **OPTIONS)
    after = run(model)
    assert not torch.allclose(before, after)
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, attn_implementation=backend).eval()
    base = getattr(model, model.base_model_prefix, model)
    assert torch.equal(run(loaded), run(base))


def test_what_it_is_not_able_to_do_is_refused():
    with pytest.raises(ValueError, match="opposite features have no parameters to fit"):
        favor.calibrate(BERT.build("favor_opposite"), [tokens(True)], attn_implementation="favor_opposite")
    more = {"feature_weights": True, "refine_steps": 3, "attn_implementation": "favor_opposite"}
    with pytest.raises(ValueError, match="refine_steps must be 0 for opposite features"):
        favor.calibrate(BERT.build("favor_opposite"), [tokens(True)], **more)


def test_a_family_without_backends_of_its_own_gets_one_and_leaves_those_of_its_base_alone():
    class Mine(favor.features.PosRF):
        name = "mine"

    class Weighted(favor.features.WDERF):
        name = "weighted"

    with registered(Mine, Weighted):
        assert {"favor_mine", "favor_weighted"} <= set(favor.BACKENDS)
        assert favor.config.feature_family("favor+", favor.FavorConfig())[0] == "pos"
        assert favor.config.feature_family("favor#", favor.FavorConfig())[0] == "wderf"
        with pytest.raises(ValueError, match="features must be one of"):
            favor.FavorConfig(features="mine")


def test_names_cannot_be_taken_twice():
    class Another(OppositePairs):
        name = "pos"

    with pytest.raises(ValueError, match="the name 'pos' belongs to PosRF"):
        favor.register_features(Another)
    with pytest.raises(TypeError, match="a family must be a class with a name"):
        favor.register_features(OppositePairs())
