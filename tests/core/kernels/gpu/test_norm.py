"""The Triton kernels of `add_norm` against float64, run by Triton's interpreter, so that no GPU is needed."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from launch import BUILD, interpreted, triton

TYPES = """
import torch
half, brain = torch.float16, torch.bfloat16
"""
FEW = TYPES + "cases = (2, 5, 300, half, 2),\n"
ALL = f"""{TYPES}
cases = (3, 5, 48, half, 0), (3, 5, 96, brain, 2), (2, 5, 100, half, 5), (3, 5, 768, brain, 1), (1, 3, 1200, half, 3)
"""
COMPARE = """
import torch
from torch.nn import functional as F
from situs.core.kernels.gpu import norm as norm_kernel

def near(value, exact, relative, absolute):
    assert ((value.double() - exact).abs() <= relative * exact.abs() + absolute).all()

torch.manual_seed(0)
for batch, seq, width, dtype, keys in cases:
    for much in (False, True):
        z, branch, *grads = (torch.randn(batch, seq, width).to(dtype) for _ in range(4))
        bias, scale = (torch.randn(width), 2 * torch.rand(batch)) if much else (None, None)
        weight, shift = torch.randn(width), torch.randn(width)
        total, normed, first, mean, rstd = norm_kernel.forward(z, branch, bias, scale, weight, shift, 1e-3, keys)
        # Rounding is half a unit in the last place, but the interpreter cuts bf16 off, which is up to a whole one.
        unit = torch.finfo(dtype).eps * (1.01 if dtype is brain else 0.51)
        exact = branch.double() + (bias if much else 0)
        near(total, z.double() + exact * (scale.view(-1, 1, 1) if much else 1), unit, 1e-6)
        x, w, b = (part.double().requires_grad_() for part in (total, weight, shift))
        right = F.layer_norm(x, (width,), w, b, 1e-3)
        near(normed, right, unit, 5e-6)
        assert torch.equal(first, normed[:, :keys])
        near(mean, x.mean(-1).view(-1), 0, 1e-6)
        near(rstd, (x.var(-1, unbiased=False) + 1e-3).rsqrt().view(-1), 1e-6, 0)
        to_first = torch.randn(batch, keys, width).to(dtype) if keys else None
        to_total = grads[0] if much or keys else None
        given = (mean, rstd, scale, weight, keys, much)
        dz, dbranch, sums = norm_kernel.backward(to_total, grads[1], to_first, total, *given)
        grad = grads[1].double()
        if keys:
            grad[:, :keys] += to_first
        right.backward(grad)
        dx = x.grad + (0 if to_total is None else to_total)
        near(dz, dx, unit, 1e-5)
        to_branch = dx * (scale.double().view(-1, 1, 1) if much else 1)
        assert dbranch.shape == (dz.shape if much else (0,))
        if much:
            near(dbranch, to_branch, unit, 1e-5)
        near(sums, torch.stack([to_branch.sum((0, 1)) * much, w.grad, b.grad]), 0, 1e-5 * batch * seq)
print("same function")
"""


COMPILE = (
    BUILD
    + """
from situs.core.kernels.gpu import norm as norm_kernel

numbers = dict.fromkeys(("count", "seq", "keys"), "i32")

for half, width, much in (("*bf16", 768, True), ("*fp16", 384, False)):
    some = {name: half if name in ("first", "to_total", "to_first", "dbranch") else "*fp32"
            for name in ("bias", "scale", "first", "to_total", "to_first", "dbranch")}
    def made(kernel, names, more, constants):
        types = {name: some[name] if name in some else half for name in names} | more
        nothing = {} if much else dict.fromkeys((name for name in names if name in some), None)
        return build(kernel, types, nothing | constants)
    floats = dict.fromkeys(("weight", "shift", "means", "rstds", "sums"), "*fp32")
    names = ("z", "branch", "bias", "scale", "weight", "shift", "total", "normed", "first", "means", "rstds")
    more = {name: floats[name] for name in names if name in floats} | numbers | {"eps": "fp32"}
    shape = norm_kernel._tiles(width)
    del shape["num_warps"]
    assert "st.global" in made(norm_kernel._forward, names, more, shape)
    names = ("to_total", "to_normed", "to_first", "total", "means", "rstds", "scale", "weight", "dz", "dbranch", "sums")
    more = {name: floats[name] for name in names if name in floats} | numbers | {"chunk": "i32"}
    constants = {"biased": much, "width": width, "tile": 1024, "rows": 2, "stages": 3}
    code = made(norm_kernel._backward, names, more, constants)
    assert "st.global" in code and "atom" not in code
print("built")
"""
)


pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this torch comes without Triton")


def test_the_kernels_are_layernorm_of_the_sum_and_its_gradients():
    assert interpreted(FEW + COMPARE) == "same function"


@pytest.mark.parametrize("width", [8, 24, 48, 96, 192, 320, 384, 768, 1000, 1024, 1152, 1280, 1536, 3072, 4096])
def test_tiles_cover_a_row_with_little_beside_it_and_a_program_reads_about_as_much(width: int) -> None:
    shape = import_module("situs.core.kernels.gpu.norm")._tiles(width)
    tile, parts, rows = shape["tile"], shape["parts"], shape["rows"]
    assert (shape["width"], tile & (tile - 1)) == (width, 0) and tile <= 512
    assert (parts - 1) * tile < width <= parts * tile and parts <= max(4, -(-width // 256))
    assert tile >= 16 or width < 16
    assert rows * tile == 4 * 256
    exact = {48: (16, 3), 320: (256, 2), 1024: (256, 4), 1152: (512, 3), 1536: (512, 3)}
    assert exact.get(width, (tile, parts)) == (tile, parts)


@pytest.mark.slow
def test_the_kernels_are_layernorm_of_the_sum_and_its_gradients_in_all_cases():
    assert triton(ALL + COMPARE, TRITON_INTERPRET="1") == "same function"


class Launches:
    """In the place of a kernel: the options of each launch."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *_, **options: self.options.append({"grid": grid, **options})


@pytest.mark.parametrize(("width", "tile", "warps"), [(8, 16, 1), (200, 256, 1), (768, 1024, 4), (1536, 2048, 8)])
def test_a_warp_of_the_backward_has_256_columns(
    width: int, tile: int, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter has no warps."""
    kernels = import_module("situs.core.kernels.gpu.norm")
    launches = Launches()
    monkeypatch.setattr(kernels, "_backward", launches)
    monkeypatch.setattr(kernels, "on_device_of", lambda _: nullcontext())
    monkeypatch.setattr(kernels, "multiprocessors", lambda _: 3)
    monkeypatch.setattr(kernels, "add", lambda sums: sums)
    total, rows = torch.zeros(2, 500, width), torch.zeros(1000)
    kernels.backward(None, total, None, total, rows, rows, None, torch.ones(width), 0, False)
    (options,) = launches.options
    assert (options["tile"], options["num_warps"]) == (tile, warps)
    # Four programs of four warps for each multiprocessor, each with the same even number of rows.
    most = 3 * 16 // warps
    assert options["grid"] == (-(-1000 // (2 * -(-500 // most))),)


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu_that_is_not_here(tmp_path):
    """The interpreter runs what the compiler refuses."""
    assert triton(COMPILE, TRITON_CACHE_DIR=str(tmp_path)) == "built"
