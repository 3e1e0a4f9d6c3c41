"""All kernels compile for GPUs, with all their configurations, on a machine that has none.

This needs a process of its own: in the others, kernels are defined for Triton's interpreter. To compile all takes
minutes, so compiled.json keeps what came of it, by a hash of the source, the types, the constants and the release of
Triton: only what changed is compiled again. Started as a program with `--record`, this file writes compiled.json anew,
and compiled.md: what each kernel takes in the first of its configurations, which runs untimed for small work.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
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
from favor.kernels.gpu import bidirectional, causal, chosen, decode, fits, moments, nodes, parameters, sections, window
from favor.kernels.gpu import tokens as triton_tokens
from favor.kernels.operands import ChosenOperands, Geometry, NodeOptions, Operands, SectionOptions, SectionTables

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
SHARED = {80: 163, 90: 227, 100: 227}  # memory of a program, in KB
# Type, width and whether sequences are packed, for the first configuration of all kernels.
BFLOAT16 = tuple(("bfloat16", width, False) for width in (32, 64, 128, 256))
FIRST = {80: (*BFLOAT16, ("float32", 128, False)), 90: (*BFLOAT16, ("float16", 64, True)), 100: BFLOAT16}
# Bytes that the first configuration spills nevertheless, of its variants the most. _chunk_keys holds a square of a
# chunk twice: chunks of half the size spill less, and double the states in memory. decode._step, _newton_schulz and
# fits hold whole matrices: one program for a head, where one more launch takes longer. More warps spill as much there,
# or more. Products of float32 are sums of three.
SPILLED = {
    "80 bfloat16 64 causal._chunk_keys": 40,
    "80 float32 128 causal._chunk_keys": 2616,
    "80 float32 128 causal._chunk_output": 3224,
    "80 float32 128 causal._chunk_queries": 944,
    "80 bfloat16 256 decode._step": 96,
    "80 bfloat16 32 fits.whole": 8,
    "80 bfloat16 64 fits.whole": 3648,
    "80 float32 128 reading._gradients": 80,
    "80 float32 128 steep.steep_queries": 104,
    "80 bfloat16 64 tokens._newton_schulz": 64,
    "80 bfloat16 128 tokens._newton_schulz": 64,
    "80 float32 128 tokens._newton_schulz": 64,
    "80 float32 128 window._key_gradients": 72,
    "80 float32 128 window._query_gradients": 8,
    "90 bfloat16 64 causal._chunk_keys": 120,
    "90 bfloat16 128 causal._chunk_keys": 192,
    "90 float16 64 causal._chunk_keys": 224,
    "90 bfloat16 256 decode._step": 72,
    "90 bfloat16 32 fits.whole": 8,
    "90 bfloat16 64 fits.whole": 680,
    "90 float16 64 fits.whole": 680,
    "90 bfloat16 64 reading._read": 8,
    "90 float16 64 reading._read": 8,
    "100 bfloat16 64 causal._chunk_keys": 64,
    "100 bfloat16 32 chunks._chunk_states": 40,
    "100 bfloat16 256 decode._step": 112,
    "100 bfloat16 32 reading._gradients": 8,
    "100 bfloat16 128 tokens._form": 8,
    "100 bfloat16 32 window._key_gradients": 8,
}


# The kernels of each kind; the tensor cores of Hopper run at full speed only with the instruction wgmma.
PLAIN = {"_part:wgmma", "_read:wgmma", "_query_gradients:wgmma", "_key_gradients:wgmma"}
NAMES = {
    "plain": PLAIN
    | {"_join", "_step", "_form", "_sums", "_newton_schulz", "_chunk_output", "steep_output", "_cleaned"}
    | {"_pieces", "_attention", "_directions", "isotropic", "whole"},
    "windowed": {"_block_states:wgmma", "_read:wgmma", "_query_gradients:wgmma", "_key_gradients:wgmma", "_outside"},
    "chosen": {"_read:wgmma", "_gradients:wgmma", "_search:wgmma"},
    "landmarks": {"_centres", "_nearest", "_starts", "_place", "_sum_up", "_choose", "_put_back", "_read:wgmma"}
    | {"_gradients:wgmma", "_search:wgmma", "_find_coordinates", "_collect_votes", "_count_left", "_append"},
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
        names = [name.split(".")[1].split(":") for name in found[f"{kind} {capability}"]]
        assert expected <= {":".join(name[:parts]) for name in names for parts in (1, 2)}
    spilled, text = table(found)
    assert spilled == SPILLED
    assert text == TABLE.read_text()


RECORD, TABLE = Path(__file__).with_name("compiled.json"), Path(__file__).with_name("compiled.md")
recorded = json.loads(RECORD.read_text())
POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}
POINTERS |= {torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1"}


def _type_of(value):
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compile_one(source, capability, options):
    """Name of a compiled kernel, its instruction, registers, spilled and shared bytes; it has to fit."""
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert kernel.asm["cubin"]
    assert kernel.metadata.shared <= SHARED[capability] * 1024, kernel.metadata
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        program = triton.knobs.nvidia.cuobjdump.path
        said = subprocess.check_output([program, "--dump-resource-usage", file.name], text=True)
    registers, spills = (int(re.search(rf"{word}:(\d+)", said)[1]) for word in ("REG", "STACK"))
    name = f"{source.fn.fn.__module__.split('.')[-1]}.{kernel.metadata.name}"
    instruction = "wgmma" if "wgmma" in kernel.asm["ptx"] else "other"
    return f"{name}:{instruction}:{registers}:{spills}:{kernel.metadata.shared}"


@contextmanager
def compiling(capability, every):
    """Compiles what is launched, in all configurations or the first: gives, by hash, what `compile_one` says."""
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

    few_rows = patch("favor.kernels.gpu.common.FEW_ROWS", 0 if every else 2**16)
    with few_rows, patch.object(JITFunction, "run", launch), patch.object(Autotuner, "run", tune):
        yield compiled


def compile_chosen(kind, width, rows, section):
    """Compiles the kernels of chosen keys: the search of blocks, the search of each query, and attention."""

    def places(*shape):
        return torch.zeros(shape, dtype=torch.int32)

    def tokens(*shape):
        return torch.zeros(*shape, width, dtype=getattr(torch, kind))

    query, key, shared = tokens(2, 2, rows), tokens(1, 512), places(2, 2, 32)
    marks = (shared, places(2, 2, rows, 4), places(2, 2))
    far = (tokens(1, 2), tokens(1, 2), torch.zeros(2, 2, 2))
    given = ChosenOperands(query, key, key, *marks, *far, places(2), places(2) + 1, section, 32, width**-0.5)
    out, lse = chosen.forward(given)
    chosen.backward(out, given, out, lse)
    chosen.choose(query, key, given.seen, None, 64)
    chosen.choose(query[..., : width // 4], key[..., : width // 4], given.seen, shared, 64)


def compile_landmarks(kind, width, packed):
    """Compiles the kernels of landmarks: encoders, whole causal sequences, and one token."""

    def tokens(heads):
        return torch.zeros(1, 2048, heads, width, dtype=getattr(torch, kind)).transpose(1, 2)

    inputs = query, key, value = tokens(4), tokens(2), tokens(2)
    lengths = torch.tensor([2000]) if packed else None
    for block, selected in ((16, 768), (64, 0)):
        own, given = (*inputs, lengths, lengths), NodeOptions(256, selected, block, True, packed, 2.0, width**-0.5)
        results = nodes.forward(*own, given)
        nodes.backward(results[0], *own, results, given)
    given = SectionOptions(1024, 256, 64, 16, 4, 16, 4, width**-0.5)
    out, coordinates, index, *sums, _, _, shared, _ = results = sections.forward(*inputs, given)
    sections.backward(out, *inputs, results, given)
    rows = (key.contiguous(), value.contiguous(), *sums, query[:, :, :129].contiguous(), coordinates, index)
    tables = SectionTables(*rows, torch.tensor([100]), shared[:, :, :1].contiguous(), True)
    sections.step(*(tensor[:, :, :1] for tensor in inputs), lengths, tables, given)


def compile_windowed(kind, width, packed, is_causal):
    """Compiles the kernels of windowed attention."""
    inputs, grad = make(kind, width, packed)
    operands = Operands(*inputs[:7], torch.zeros(1, 4, 256))
    bundles = operands, Geometry(*inputs[7:], is_causal, 64, width**-0.5)
    window.backward(grad, *bundles, window.forward(*bundles))


def compile_plain(kind, width, packed):
    """Compiles the other kernels."""
    inputs, grad = make(kind, width, packed)
    for module in (bidirectional, causal):
        bundles = Operands(*inputs[:7]), Geometry(*inputs[7:])
        module.backward(grad, *bundles, module.forward(*bundles))
    tokens, (*parameters, bias) = [tensor[:, :, :1] for tensor in inputs[:3]], inputs[3:7]
    offset, value = parameters[2], inputs[2]
    state = (offset.clone(), value.new_zeros(*offset.shape, value.shape[3], dtype=offset.dtype))
    decode.decode(*tokens, *parameters, bias[:, :, :1].contiguous(), *state)
    if width > 128:
        return
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


def compile_every_kind(*case):
    """Compiles all kernels."""
    compile_plain(*case)
    compile_windowed(*case, False)
    compile_windowed(*case, True)
    compile_chosen(*case[:2], 64, 256)
    compile_landmarks(*case)


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


KINDS = {"plain": compile_plain, "windowed": compile_windowed, "chosen": compile_chosen}
KINDS |= {"landmarks": compile_landmarks, "first": compile_every_kind}
ALL = {"plain": CASES, "windowed": WINDOWED, "chosen": CHOSEN, "landmarks": CASES, "first": FIRST}
PLACES = [(kind, *place) for kind, cases in ALL.items() for place in cases.items()]
PLACES = [(kind, capability, case) for kind, capability, cases in PLACES for case in cases]


def compile_place(place):
    """Compiles the kernels of a kind for one GPU and one case: gives them by hash."""
    kind, capability, case = place
    with compiling(capability, every=kind != "first") as kernels:
        fitting = {name: row for name, row in fits.KINDS.items() if fits.compiles(name, capability)}
        with patch.object(fits, "KINDS", fitting):
            KINDS[kind](*case)
    return kernels


TITLE = """# First configurations

Registers, spilled bytes and KB of shared memory of each kernel in the first of its configurations, which runs untimed
for small work; of several variants the most of each. Written by
`python tests/kernels/gpu/test_triton_compile.py --record`.
"""


def table(found):
    """Gives the spilled bytes of first configurations that spill, and the text of compiled.md."""
    spilled, text = {}, TITLE
    for capability, cases in FIRST.items():
        rows, columns = {}, [f"{kind} {width}" for kind, width, _ in cases]
        for column, one in ((name, one) for name in columns for one in found[f"first {capability} {name}"]):
            name, _, *numbers = one.split(":")
            own = rows.setdefault(name, {})
            own[column] = tuple(map(max, own.get(column, (0, 0, 0)), map(int, numbers)))
        text += f"\n## sm_{capability}\n\n| kernel | {' | '.join(columns)} |\n| --- |{' ---: |' * len(columns)}\n"
        for name, own in sorted(rows.items()):
            cells = [f"{own[c][0]}, {own[c][1]}, {own[c][2] / 1024:.0f}" if c in own else "" for c in columns]
            text += f"| {name} | {' | '.join(cells)} |\n"
            spilled |= {f"{capability} {column} {name}": numbers[1] for column, numbers in own.items() if numbers[1]}
    return spilled, text


if __name__ == "__main__":
    found, everything = {}, {}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for (kind, capability, case), kernels in zip(PLACES, pool.map(compile_place, PLACES), strict=True):
            place = " ".join(map(str, (kind, capability, *(case[:2] if kind == "first" else ()))))
            found[place] = sorted({*found.get(place, ()), *kernels.values()})
            everything |= kernels
    if "--record" in sys.argv:
        RECORD.write_text(json.dumps(everything, indent=0, sort_keys=True) + "\n")
        spilled, text = table(found)
        TABLE.write_text(text)
        print("\n".join(f"{place} spills {number} bytes" for place, number in spilled.items()))
    else:
        print(json.dumps(found))
