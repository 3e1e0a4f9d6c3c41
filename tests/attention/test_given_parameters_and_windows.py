"""What favor_attention refuses of given parameters and windows, and NaN that has to stay visible."""

import pytest
import torch
from reference import attend, inputs

import favor
from favor import features


def test_parameters_are_checked():
    tensors = inputs(12)
    given = features.Parameters.identity(8, dtype=torch.float32, device="cpu")
    # In the type of the inputs, whatever they are given in.
    torch.testing.assert_close(attend(*tensors, name="gerf", parameters=given), attend(*tensors, name="pos"))
    wrong = features.Parameters.identity(7, dtype=torch.float64, device="cpu")
    with pytest.raises(ValueError, match=r"parameters must be \[2, 8, 8\], got \(7, 7\)"):
        attend(*tensors, name="gerf", parameters=wrong)
    torch.testing.assert_close(attend(*tensors, name="pos", parameters=given), attend(*tensors, name="pos"))
    for name in ("relu", "landmark"):
        with pytest.raises(ValueError, match=f"{name} features have no parameters"):
            attend(*tensors, name=name, parameters=given)


@pytest.mark.parametrize("name", ["packing", "key_mask", "windows"])
def test_arguments_that_there_are_not_are_refused(name):
    with pytest.raises(TypeError, match=f"unknown argument {name}; its options are correction"):
        favor.favor_attention(*inputs(12), features="pos", **{name: None})


@pytest.mark.parametrize("padded", [False, True])
def test_nan_in_a_query_is_seen(padded):
    """Also beside keys that are hidden, and in a block that is cut short."""
    query, key, value = inputs(40)
    query[0, 0, 3] = torch.nan
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[0, 35:] = False
    for name in ("pos", "pos@16"):
        out = attend(query, key, value, name=name, mask=mask if padded else None)
        assert out[0, 0, 3].isnan().all()
        assert out[1].isfinite().all()


def test_windows_are_refused_where_there_are_none():
    query, key, value = inputs(12)
    with pytest.raises(ValueError, match="a window needs positive features"):
        favor.favor_attention(query, key, value, features="relu", window=4)
    with pytest.raises(ValueError, match="a window needs positive features of the softmax kernel"):
        favor.favor_attention(query, key, value, features=features.SDERF(alpha=-0.5), window=4)
    with pytest.raises(ValueError, match="got 5 queries and 12 keys; use window=0"):
        favor.favor_attention(query[:, :, :5], key, value, features="pos", window=4)
    packed = [t[:1] for t in (query, key, value)]
    lengths = {"cu_seqlens_q": torch.tensor([0, 3, 12]), "cu_seqlens_k": torch.tensor([0, 8, 12])}
    with pytest.raises(ValueError, match="packed queries and keys of the same lengths"):
        favor.favor_attention(*packed, features="pos", window=4, **lengths)
