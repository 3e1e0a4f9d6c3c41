"""All kernels compile for GPUs, with all their configurations, on a machine that has none.

This needs a process of its own: in the others, kernels are defined for Triton's interpreter. Started as a program with
`--record`, this file writes compiled.json anew, so that tests compile only what changes later (see ahead.py).
"""

import importlib
import json
import os
import subprocess
import sys
from itertools import product

import pytest

# Modules of favor.kernels with `forward` and `backward`.
MODULES = ("bidirectional", "causal")
# Type, width, whether sequences are packed.
CASES = {
    80: (("float16", 64, True), ("float32", 128, False)),
    90: (("bfloat16", 64, False), ("bfloat16", 256, True)),
}
# Type, width, whether sequences are packed and whether attention is causal, for a window.
WINDOWED = {
    80: (("float16", 64, True, False), ("float32", 128, False, True)),
    90: (("bfloat16", 64, False, True), ("bfloat16", 128, True, False)),
}
# Type and width of keys that are chosen, queries of a block, and tokens of a section (0: no near keys).
CHOSEN = {
    80: (("bfloat16", 256, 64, 256), ("float32", 128, 16, 0)),
    90: (("bfloat16", 64, 64, 256), ("float16", 256, 1, 256)),
}


# The kernels of each kind; the tensor cores of Hopper run at full speed only with the instruction wgmma.
PLAIN = {"_part:wgmma", "_read:wgmma", "_query_gradients:wgmma", "_key_gradients:wgmma"}
NAMES = {
    "plain": PLAIN | {"_join", "_step", "_form", "_sums", "_newton_schulz", "_chunk_output", "steep_output"},
    "windowed": {"_block_states:wgmma", "_read:wgmma", "_query_gradients:wgmma", "_key_gradients:wgmma", "_outside"},
    "chosen": {"_read:wgmma", "_gradients:wgmma", "_search:wgmma"},
}


@pytest.mark.slow
def test_kernels_compile():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    for (kind, expected), capability in product(NAMES.items(), CASES):
        if capability == 80:
            expected = {name.split(":")[0] for name in expected}
        names = [name.split(":") for name in found[f"{kind} {capability}"]]
        assert expected <= {":".join(name[:parts]) for name in names for parts in (1, 2)}


def compile_chosen(capability):
    """Compiles the kernels of chosen keys: the search of blocks, the search of each query, and attention."""
    import torch
    from ahead import compiling

    from favor.kernels.gpu import chosen
    from favor.kernels.operands import ChosenOperands

    def places(*shape):
        return torch.zeros(shape, dtype=torch.int32)

    for kind, width, rows, section in CHOSEN[capability]:

        def tokens(*shape, width=width, kind=kind):
            return torch.zeros(*shape, width, dtype=getattr(torch, kind))

        query, key, shared = tokens(2, 2, rows), tokens(1, 512), places(2, 2, 32)
        marks = (shared, places(2, 2, rows, 4), places(2, 2))
        far = (tokens(1, 2), tokens(1, 2), torch.zeros(2, 2, 2))
        given = ChosenOperands(query, key, key, *marks, *far, places(2), places(2) + 1, section, 32, width**-0.5)
        with compiling(capability) as kernels:
            out, lse = chosen.forward(given)
            chosen.backward(out, given, out, lse)
            chosen.choose(query, key, given.seen, None, 64)
            chosen.choose(query[..., : width // 4], key[..., : width // 4], given.seen, shared, 64)
        yield from kernels.items()


def compile_windowed(capability):
    """Compiles the kernels of windowed attention."""
    import torch
    from ahead import compiling

    from favor.kernels.gpu import window as triton_window
    from favor.kernels.operands import Geometry, Operands

    for kind, width, packed, is_causal in WINDOWED[capability]:
        inputs, grad = make(kind, width, packed)
        operands = Operands(*inputs[:7], torch.zeros(1, 4, 256))
        bundles = operands, Geometry(*inputs[7:], is_causal, 64, width**-0.5)
        with compiling(capability) as kernels:
            triton_window.backward(grad, *bundles, triton_window.forward(*bundles))
        yield from kernels.items()


def compile_all(capability):
    """Compiles the other kernels."""
    from ahead import compiling

    from favor.kernels.operands import Geometry, Operands

    for kind, width, packed in CASES[capability]:
        inputs, grad = make(kind, width, packed)
        for name in MODULES:
            module = importlib.import_module(f"favor.kernels.gpu.{name}")
            with compiling(capability) as kernels:
                bundles = Operands(*inputs[:7]), Geometry(*inputs[7:])
                module.backward(grad, *bundles, module.forward(*bundles))
            yield from kernels.items()
        with compiling(capability) as kernels:
            one_step(*inputs[:7])
            if width <= 128:
                passes(inputs[0], inputs[3][..., :width, :])
        yield from kernels.items()


def make(kind, width, packed):
    import torch

    def tokens(heads):
        return torch.zeros(1, 256, heads, width, dtype=getattr(torch, kind)).transpose(1, 2)

    def per_head(*shape):
        return torch.zeros(1, 2, 256, *shape)

    lengths = torch.tensor([0, 100, 256], dtype=torch.int32) if packed else None
    longest = 156 if packed else 256
    directions = (per_head(width), per_head(width), per_head())
    inputs = (tokens(4), tokens(2), tokens(2), *directions, torch.zeros(1, 2, 256), lengths, lengths, longest, longest)
    return inputs, tokens(4)


def one_step(query, key, value, query_directions, key_directions, offset, bias):
    from favor.kernels.gpu.decode import decode

    tokens = (tensor[:, :, :1] for tensor in (query, key, value))
    state = (offset.clone(), value.new_zeros(*offset.shape, value.shape[3], dtype=offset.dtype))
    decode(*tokens, query_directions, key_directions, offset, bias[:, :, :1].contiguous(), *state)


def passes(rows, matrix):
    from favor.kernels.gpu import tokens as triton_tokens

    matrix = matrix.repeat_interleave(2, 1)
    triton_tokens.form(rows, matrix, matrix[..., 0], matrix[..., 1], 0.5, None)
    triton_tokens.form(rows, matrix, matrix[..., 0], matrix[..., 1], 0.5, None, rows[..., 0].float())
    _, covariance = triton_tokens.moments(rows, rows[..., 0].float())
    triton_tokens.newton_schulz(covariance[..., :64, :64], 14)


if __name__ == "__main__":
    from ahead import RECORD

    kinds = {"plain": compile_all, "windowed": compile_windowed, "chosen": compile_chosen}
    found = {
        f"{kind} {capability}": dict(compile_kind(capability))
        for (kind, compile_kind), capability in product(kinds.items(), CASES)
    }
    if "--record" in sys.argv:
        everything = {case: name for kernels in found.values() for case, name in kernels.items()}
        RECORD.write_text(json.dumps(everything, indent=0, sort_keys=True) + "\n")
        for place, kernels in found.items():
            for name in sorted(set(kernels.values())):
                print("{:14} {:22} {:6} registers {:>4}, spilled bytes {:>5}".format(place, *name.split(":")))
    else:
        print(json.dumps({place: sorted(set(kernels.values())) for place, kernels in found.items()}))
