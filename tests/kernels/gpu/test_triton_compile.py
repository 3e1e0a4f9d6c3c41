"""All kernels compile for GPUs, with all their configurations, on a machine that has none.

This needs a process of its own: in the others, kernels are defined for Triton's interpreter. To compile all takes
minutes, so compiled.json keeps what came of it, by a hash of the source, the types, the constants and the release of
Triton: only what changed is compiled again. Started as a program with `--record`, this file writes compiled.json anew.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from favor.features import Parameters
from favor.kernels.gpu import bidirectional, causal, chosen, decode, fits, moments, parameters, window
from favor.kernels.gpu import tokens as triton_tokens
from favor.kernels.operands import ChosenOperands, Geometry, Operands

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
    "plain": PLAIN
    | {"_join", "_step", "_form", "_sums", "_newton_schulz", "_chunk_output", "steep_output", "_cleaned"}
    | {"_pieces", "_attention", "_directions", "isotropic", "symmetric", "asymmetric", "centred"},
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


RECORD = Path(__file__).with_name("compiled.json")
recorded = json.loads(RECORD.read_text())
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int32: "*i32"}
POINTERS[torch.bool] = "*i1"


def _type_of(value):
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compile_one(source, capability, options):
    """Name of a compiled kernel, its instruction, registers and spilled bytes; it has to fit into shared memory."""
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert kernel.asm["cubin"]
    assert kernel.metadata.shared <= {80: 163, 90: 227}[capability] * 1024, kernel.metadata
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        program = triton.knobs.nvidia.cuobjdump.path
        said = subprocess.check_output([program, "--dump-resource-usage", file.name], text=True)
    registers, spills = (int(re.search(rf"{word}:(\d+)", said)[1]) for word in ("REG", "STACK"))
    return f"{kernel.metadata.name}:{'wgmma' if 'wgmma' in kernel.asm['ptx'] else 'other'}:{registers}:{spills}"


@contextmanager
def compiling(capability):
    """Compiles what is launched, in all configurations: gives, by the hash of each kernel, what `compile_one` says."""
    compiled = {}

    def launch(self, *args, grid, warmup, **kwargs):
        values = dict(zip(self.arg_names, args, strict=False))
        values.update({name: kwargs.pop(name) for name in self.arg_names if name in kwargs})
        signature, constants, hints = {}, {}, {}
        for index, parameter in enumerate(self.params):
            value = values[parameter.name]
            if parameter.is_constexpr or value is None:
                signature[parameter.name], constants[(index,)] = "constexpr", value
                continue
            signature[parameter.name] = _type_of(value)
            if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
                hints[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self, signature, constants, hints)
        facts = f"{triton.__version__} {capability} {source.hash()} {sorted(kwargs.items())}"
        case = hashlib.sha256(facts.encode()).hexdigest()[:16]
        compiled[case] = recorded.get(case) or compile_one(source, capability, kwargs)

    def tune(self, *args, **kwargs):
        for config in self.configs:
            self.fn.run(*args, **kwargs, **config.all_kwargs())

    every = patch("favor.kernels.gpu.common.FEW_ROWS", 0)
    with every, patch.object(JITFunction, "run", launch), patch.object(Autotuner, "run", tune):
        yield compiled


def compile_chosen(capability):
    """Compiles the kernels of chosen keys: the search of blocks, the search of each query, and attention."""

    def places(*shape):
        return torch.zeros(shape, dtype=torch.int32)

    for kind, width, rows, section in CHOSEN[capability]:

        def tokens(*shape, width=width, kind=kind):
            return torch.zeros(*shape, width, dtype=getattr(torch, kind))

        query, key, shared = tokens(2, 2, rows), tokens(1, 512), places(2, 2, 32)
        marks = (shared, places(2, 2, rows, 4), places(2, 2))
        far = (tokens(1, 2), tokens(1, 2), torch.zeros(2, 2, 2))
        given = ChosenOperands(query, key, key, *marks, *far, places(2), places(2) + 1, section, 32, width**-0.5)
        out, lse = chosen.forward(given)
        chosen.backward(out, given, out, lse)
        chosen.choose(query, key, given.seen, None, 64)
        chosen.choose(query[..., : width // 4], key[..., : width // 4], given.seen, shared, 64)


def compile_windowed(capability):
    """Compiles the kernels of windowed attention."""
    for kind, width, packed, is_causal in WINDOWED[capability]:
        inputs, grad = make(kind, width, packed)
        operands = Operands(*inputs[:7], torch.zeros(1, 4, 256))
        bundles = operands, Geometry(*inputs[7:], is_causal, 64, width**-0.5)
        window.backward(grad, *bundles, window.forward(*bundles))


def compile_all(capability):
    """Compiles the other kernels."""
    for kind, width, packed in CASES[capability]:
        inputs, grad = make(kind, width, packed)
        for module in (bidirectional, causal):
            bundles = Operands(*inputs[:7]), Geometry(*inputs[7:])
            module.backward(grad, *bundles, module.forward(*bundles))
        tokens, (*parameters, bias) = [tensor[:, :, :1] for tensor in inputs[:3]], inputs[3:7]
        offset, value = parameters[2], inputs[2]
        state = (offset.clone(), value.new_zeros(*offset.shape, value.shape[3], dtype=offset.dtype))
        decode.decode(*tokens, *parameters, bias[:, :, :1].contiguous(), *state)
        if width > 128:
            continue
        rows, matrix = inputs[0], inputs[3][..., :width, :].repeat_interleave(2, 1)
        seen = torch.ones(1, 1, 256, dtype=torch.bool)
        terms = (matrix, matrix[..., 0], matrix[..., 1], (0.5, 0.5, 0.5), matrix, seen)
        triton_tokens.form(rows, *terms)
        triton_tokens.form(rows, *terms, rows[..., 0].float())
        triton_tokens.cleaned(rows, seen[:, 0], rows)
        _, covariance = triton_tokens.moments(rows, rows[..., 0].float())
        triton_tokens.newton_schulz(covariance[..., :64, :64], 14)
        compile_fits(rows, inputs[1], inputs[3][0], seen[:, 0])


def compile_fits(query, key, omega, seen):
    """Compiles what makes parameters and directions."""
    width, eye = omega.shape[-1], torch.eye(omega.shape[-1])
    shift, log_weights = omega[:, 0].contiguous(), omega[:, :, 0].contiguous()
    params = Parameters(eye, eye, eye, shift=shift, log_weights=log_weights)
    parameters.directions(omega, params, 0.5, query.dtype)
    for kind in fits.KINDS:
        if width <= 64 or kind in ("isotropic", "diagonal"):
            is_full = kind not in ("isotropic", "diagonal")
            found = moments.pieces(query, key, seen, seen, 0.5, 16 if kind == "centred" else 0, is_full)
            fits.fit(kind, found, omega, eye, query.dtype, 0.5, 0.01, 0.01)


def make(kind, width, packed):
    def tokens(heads):
        return torch.zeros(1, 256, heads, width, dtype=getattr(torch, kind)).transpose(1, 2)

    def per_head(*shape):
        return torch.zeros(1, 2, 256, *shape)

    lengths = torch.tensor([0, 100, 256], dtype=torch.int32) if packed else None
    longest = 156 if packed else 256
    directions = (per_head(width), per_head(width), per_head())
    inputs = (tokens(4), tokens(2), tokens(2), *directions, torch.zeros(1, 2, 256), lengths, lengths, longest, longest)
    return inputs, tokens(4)


if __name__ == "__main__":
    kinds = {"plain": compile_all, "windowed": compile_windowed, "chosen": compile_chosen}
    found = {}
    for (kind, compile_kind), capability in product(kinds.items(), CASES):
        with compiling(capability) as found[f"{kind} {capability}"]:
            compile_kind(capability)
    if "--record" in sys.argv:
        everything = {case: name for kernels in found.values() for case, name in kernels.items()}
        RECORD.write_text(json.dumps(everything, indent=0, sort_keys=True) + "\n")
        for place, kernels in found.items():
            for name in sorted(set(kernels.values())):
                print("{:14} {:22} {:6} registers {:>4}, spilled bytes {:>5}".format(place, *name.split(":")))
    else:
        print(json.dumps({place: sorted(set(kernels.values())) for place, kernels in found.items()}))
