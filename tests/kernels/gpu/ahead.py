"""Compiles Triton kernels without a GPU: every launch inside `compiling` is compiled, and none is run.

To compile all kernels takes minutes. So the file compiled.json keeps what came of it, by a hash of the source, the
types, the constants and the release of Triton: only what changed is compiled again.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

RECORD = Path(__file__).with_name("compiled.json")
recorded = json.loads(RECORD.read_text())
_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


def _type_of(value):
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def compile_one(source, capability, options):
    """Compiles a kernel, checks that it fits into shared memory, and gives its name, instruction, registers and spills.

    Spills are the bytes of a thread's registers that lie in memory.
    """
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert kernel.asm["cubin"]
    assert kernel.metadata.shared <= {80: 163, 90: 227}[capability] * 1024, kernel.metadata
    registers, spills = _resources(kernel.asm["cubin"])
    return f"{kernel.metadata.name}:{'wgmma' if 'wgmma' in kernel.asm['ptx'] else 'other'}:{registers}:{spills}"


def _resources(cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        program = triton.knobs.nvidia.cuobjdump.path
        said = subprocess.check_output([program, "--dump-resource-usage", file.name], text=True)
    return (int(re.search(rf"{word}:(\d+)", said)[1]) for word in ("REG", "STACK"))


@contextmanager
def compiling(capability):
    """Replaces launches by ahead-of-time compilation for `capability` (80, 90).

    All configurations of an autotuned kernel are compiled. Outputs of the host functions hold nothing meaningful.

    Yields:
        A dictionary: for each kernel, by its hash, its name, the instruction that multiplies matrices, the registers
        of a thread, and the bytes that it spills.
    """
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
