"""How long a GPU is busy: the union of its kernels, told from a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from situs.bench import clock
from situs.bench.clock import covered, kernels_of, kind_of, profile_kernels

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], sum(pair))), max_size=12)


@given(SPANS)
def test_the_union_of_intervals_is_what_counting_gives(spans: list[tuple[int, int]]) -> None:
    assert covered(spans) == len({unit for start, end in spans for unit in range(start, end)})


def test_a_trace_becomes_ms_a_step() -> None:
    def event(name: str, ts: float, dur: float, cat: str = "kernel") -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}

    events = [
        event("nvjet_tst_256x128", 0.0, 3000.0),
        event("triton_poi_fused_gelu_0", 2000.0, 2000.0),  # beside the matmul, on another stream
        event("Memcpy DtoD", 6000.0, 1000.0, "gpu_memcpy"),
        event("ProfilerStep#3", 0.0, 9000.0, "gpu_user_annotation"),
        event("cudaGraphLaunch", 0.0, 9000.0, "cuda_runtime"),
        {"ph": "i", "cat": "kernel", "name": "no duration", "ts": 0.0},
    ]
    found = kernels_of(events, steps=2, top=1)
    assert found.busy_ms == 2.5
    assert found.kinds == {"matmul": 1.5, "elementwise": 1.0, "copies": 0.5}
    assert found.top == {"nvjet_tst_256x128": 1.5}
    assert found.launches == 1.5
    assert found.counts == {"matmul": 0.5, "elementwise": 0.5, "copies": 0.5}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, cutlass::bfloat16_t>",
         "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3", "attention"),
        ("nvjet_sm90_tst_192x192_64x3_2x1_v_bz_coopA_bias_TNN", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x256_32x3_nn_align8>", "matmul"),
        ("void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float, 4>", "optimiser"),
        ("triton_red_fused_native_layer_norm_native_layer_norm_backward_5", "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>", "elementwise"),
        ("void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>", "copies"),
        ("triton_poi_fused__to_copy_3", "casts"),
        ("triton_poi_fused__to_copy_t_12", "casts"),
        ("triton_poi_fused__to_copy_clone_slice_t_2", "casts"),
        ("triton_poi_fused__to_copy_gelu_view_6", "elementwise"),
        ("triton_poi_fused_add_view_6", "elementwise"),
        ("triton_red_fused__to_copy_sum_6", "elementwise"),
        ("something_new", "other"),
    ],
)  # fmt: skip
def test_kernels_are_told_by_their_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize("kernels", [0, 3])
def test_a_profile_holds_the_steps_and_all_that_they_started(kernels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is waited for on both sides; where no kernel is seen there is no profile."""
    done: list[str] = []

    class Profile:
        def __init__(self, **_: Any) -> None:
            pass

        def __enter__(self) -> Self:
            done.append("begin")
            return self

        def __exit__(self, *_: object) -> None:
            done.append("end")

        def export_chrome_trace(self, path: str) -> None:
            event = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 0.0, "dur": 4000.0}
            Path(path).write_text(json.dumps({"traceEvents": [event] * kernels}))

    for name in ("TEARDOWN_CUPTI", "DISABLE_CUPTI_LAZY_REINIT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(clock, "profile", Profile)
    monkeypatch.setattr(clock, "wait", lambda _: done.append("wait"))
    found = profile_kernels(lambda: done.append("step"), torch.device("cpu"), 2)
    assert done == ["wait", "begin", "step", "step", "wait", "end"]
    assert (found is None) == (kernels == 0)
    assert found is None or (found.busy_ms, found.launches, found.kinds) == (2.0, 1.5, {"matmul": 6.0})
