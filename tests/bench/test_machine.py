"""What a measurement was made on."""

from __future__ import annotations

import torch

from situs.bench.machine import describe_machine


def test_a_machine_is_told_by_device_and_versions() -> None:
    found = describe_machine(torch.device("cpu"))
    assert found["kind"] == "cpu" and found["device"].startswith("CPU, ")
    assert found["torch"] == torch.__version__.partition("+")[0] or found["torch"] == torch.__version__
    assert found["cuda"] is None and found["cores"] >= 1
