"""Models in programs that other engines run: one file for every length, equal to the model itself."""

from functools import partial

import pytest
import torch
from test_readme import ROOT, run_page
from transformers import BertConfig, BertModel

import favor
from favor.features.linalg import inverse
from favor.features.moments import places_of
from favor.kernels import exported
from favor.kernels.naive import naive_linear_attention
from favor.kernels.operands import Geometry, Operands

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SIZES |= {"vocab_size": 99, "initializer_range": 0.5}  # large weights, so that attention matters
# Without parameters, and with parameters from the sequence; favor+ is exported below.
METHODS = [
    ("favor_relu", True, {"num_features": 16}),
    ("favor#", False, {"num_features": 16, "features": "sderf", "factorization": "newton_schulz"}),
]
of_exporters = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def model_of(backend, **options):
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SIZES)).eval()
    return favor.configure(model, backend, **{"exact_below": 0, **options})


def batch_of(length, padding="right"):
    generator = torch.Generator().manual_seed(length)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length // 2 :] = 0
    mask = mask if padding == "right" else mask.flip(1)
    return {"input_ids": torch.randint(0, 99, (2, length), generator=generator), "attention_mask": mask}


def shapes(**limits):
    length = torch.export.Dim("length", **{"max": 512, **limits})  # BERT has so many positions
    return {"input_ids": {1: length}, "attention_mask": {1: length}}


def program_of(model, **options):
    with torch.no_grad():
        return torch.export.export(model, (), batch_of(40), dynamic_shapes=shapes(), **options)


def largest_difference(model, run, lengths, padding="right"):
    """Between the model and a program, over real tokens."""
    found = []
    for length in lengths:
        batch = batch_of(length, padding)
        with torch.no_grad():
            wanted = model(**batch).last_hidden_state
        real = batch["attention_mask"].bool()
        found.append((run(batch) - wanted)[real].abs().max().item())
    return max(found)


def operators_of_favor(program):
    graphs = [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    return [node for graph in graphs for node in graph.graph.nodes if "favor" in str(node.target)]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("backend", "strict", "options"), METHODS)
def test_exported_program_takes_every_length(backend, strict, options):
    model = model_of(backend, **options)
    program = program_of(model, strict=strict)
    run = program.module()
    assert largest_difference(model, lambda batch: run(**batch).last_hidden_state, (40, 64, 7, 100)) < 1e-5
    assert not operators_of_favor(program)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_program_selects_keys_if_they_were_asked_for(caplog, monkeypatch):
    """By operators of favor; by default it selects none, and says so."""
    model = model_of("landmark", num_features=8, selected_keys=6)
    program = program_of(model, strict=False)
    run = program.module()
    assert operators_of_favor(program)
    assert largest_difference(model, lambda batch: run(**batch).last_hidden_state, (40, 64, 7, 100)) < 1e-5
    assert "select none" not in caplog.text
    without = model_of("landmark", num_features=8, selected_keys=0)
    wanted = without(**batch_of(40)).last_hidden_state
    monkeypatch.setattr(torch.compiler, "_is_exporting_flag", True)
    favor.configure(model, selected_keys=None)
    torch.testing.assert_close(model(**batch_of(40)).last_hidden_state, wanted, atol=1e-5, rtol=1e-5)
    assert "its landmarks select none" in caplog.text


@of_exporters
def test_onnx_runtime_gives_what_the_model_gives_at_every_length(tmp_path, monkeypatch):
    """Landmarks as the recipe exports them, and calibrated features."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.BertConfig", partial(BertConfig, initializer_range=0.5))
    recipe = {}
    torch.manual_seed(0)
    assert run_page(ROOT / "docs/recipes/onnx.md", recipe) == 1
    model, run = recipe["model"], partial(answer, recipe["session"])
    assert largest_difference(model, run, (40, 64, 7)) < 1e-4
    assert largest_difference(model, run, (33,), padding="left") < 1e-4
    favor.configure(model, num_features=2)
    assert largest_difference(model, run, (64,)) > 1e-3
    fitted = model_of("favor#", num_features=16)  # with parameters, which favor+ runs without
    favor.calibrate(fitted, [batch_of(64)])
    with torch.no_grad():
        form = {"dynamic_shapes": shapes(), "dynamo": True, "verbose": False}
        program = torch.onnx.export(fitted, (), kwargs=batch_of(40), **form)
    program.save("fitted.onnx")
    session = recipe["onnxruntime"].InferenceSession("fitted.onnx", providers=["CPUExecutionProvider"])
    assert largest_difference(fitted, partial(answer, session), (40, 23)) < 1e-4


def test_what_onnx_does_not_have_is_named(monkeypatch):
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises(ValueError, match=r"Cholesky factors or determinants, which ONNX does not have"):
        model_of("favor#", num_features=16)(**batch_of(40))


def answer(session, batch):
    """Runs a batch in onnxruntime."""
    return torch.from_numpy(session.run(None, {name: tensor.numpy() for name, tensor in batch.items()})[0])


def test_exact_below_is_no_choice_of_a_program():
    with pytest.raises(Exception, match="exact_below=50 chooses exact or linear attention by the number of keys"):
        program_of(model_of("favor+", exact_below=50))


@pytest.mark.parametrize("limits", [{"max": 49}, {"min": 50}])
def test_lengths_on_one_side_of_exact_below_are_exported(limits, caplog):
    favor.config.warn_once.cache_clear()
    model, length = model_of("favor+", exact_below=50), 40 if "max" in limits else 100
    with torch.no_grad():
        run = torch.export.export(model, (), batch_of(length), dynamic_shapes=shapes(**limits)).module()
    assert ("not the keys of each row" in caplog.text) == ("min" in limits)
    lengths = (40, 45) if "max" in limits else (100, 121)  # half of one row is padding
    assert largest_difference(model, lambda batch: run(**batch).last_hidden_state, lengths) < 1e-5


def operands_of(groups, window, hidden):
    torch.manual_seed(groups)
    key_heads, length, width, features, dtype = 2, 29, 4, 8, torch.float64
    query = torch.randn(2, groups * key_heads, length, width, dtype=dtype)
    key, value = torch.randn(2, key_heads, length, width, dtype=dtype), torch.randn(2, key_heads, length, 3)
    directions = torch.randn(2, 1, key_heads, features, width, dtype=dtype)
    offset, bias = torch.randn(1, key_heads, features, dtype=dtype), torch.randn(2, key_heads, length, dtype=dtype)
    if hidden:
        bias[0, :, 11:] = -torch.inf
        bias[1] = -torch.inf  # nothing at all
        key[0, :, 12:] = torch.nan
    query_bias = torch.randn(2, groups * key_heads, length, dtype=dtype) if window else None
    return Operands(query, key, value.to(dtype), *directions, offset, bias, query_bias)


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("window", [0, 5, 40])
def test_plain_operations_are_the_formula(window, groups, hidden):
    given = operands_of(groups, window, hidden)
    form = {"window": window, "scale": 0.7}
    found = exported.attention(given, Geometry.of(given.query, given.key, given.query_bias, **form))
    wanted = naive_linear_attention(*given[:7], query_bias=given.query_bias, **form)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_inverse_by_products_is_the_inverse(monkeypatch):
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(3, 32, 32, dtype=torch.float64)).Q
    matrix = basis * torch.logspace(-3, 3, 32, dtype=torch.float64) @ basis[[1, 2, 0]]
    wanted = inverse(matrix)
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    torch.testing.assert_close(inverse(matrix), wanted, rtol=1e-6, atol=1e-8)


def test_places_of():
    mask = torch.tensor([[False, True, True, False, True], [False] * 5])
    assert places_of(mask, torch.tensor([[1, 2, 3, 4], [1, 2, 3, 5]])).tolist() == [[1, 2, 4, 4], [4, 4, 4, 4]]
