"""The Triton kernel of `uniform` against the tensor version, run by Triton's interpreter, so that no GPU is needed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

COMPARE = """
import torch
from situs.core.random import shared_hash, uniform
from situs.core.random_kernel import draw_uniform

for dtype, ids in ((torch.int64, [0, 1, 5, 10**12, -3]), (torch.int32, [4, -9])):
    ids = torch.tensor(ids, dtype=dtype)
    for count in (1, 9, 1500):
        for seed, epoch, stream in ((0, 0, ""), (-7, 3, "mp3.context"), (2**70, 10**9, "ü")):
            drawn = draw_uniform(ids, shared_hash(seed, epoch, stream), count)
            assert torch.equal(drawn, uniform(seed, epoch, ids, stream, (count,))), (dtype, count, seed)
strided = torch.arange(8)[::2]
assert torch.equal(draw_uniform(strided, 5, 3)[1], draw_uniform(torch.tensor([2]), 5, 3)[0])
print("same numbers")
"""


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from situs.core.random_kernel import _uniform

def build(kernel, types, constants):
    signature = types | dict.fromkeys(constants, "constexpr")
    places = {(list(signature).index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    return triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["ptx"]

for ids in ("*i64", "*i32"):
    types = {"ids": ids, "numbers": "*fp32", "shared": "i64", "count": "i32"}
    assert "xor" in build(_uniform, types, {"size": 1024})
print("built")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this torch comes without Triton")
@pytest.mark.slow
def test_the_kernel_gives_the_numbers_of_the_tensor_version():
    """In its own process: Triton reads the variable when it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", COMPARE]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.stdout.strip() == "same numbers", run.stderr


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this torch comes without Triton")
@pytest.mark.slow
def test_the_kernel_compiles_for_a_gpu_that_is_not_here(tmp_path):
    """The interpreter runs what the compiler refuses, such as two types of one variable."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.stdout.strip() == "built", run.stderr
