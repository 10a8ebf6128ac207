"""`situs evaluate attention --kind correlation` on tiny runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from situs.cli.main import main
from situs.train.assemble import make_eval_loader
from situs.train.run import load_run


def test_a_run_on_its_own_images(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            ["evaluate", "attention", "--kind", "correlation", str(trained.one), "--batch", "4", "--out", str(tmp_path)]
        )
        == 0
    )
    printed = capsys.readouterr().out.rstrip().splitlines()
    assert printed[-1].startswith(str(tmp_path / "correlation.html"))
    assert printed[-2].startswith("After the final norm, the mean correlation")
    numbers = json.loads((tmp_path / "correlation.json").read_text())
    assert numbers["images"] == 15
    assert list(numbers["depths"]) == ["embedding", "1", "2", "norm"]
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "correlation-maps.png", "correlation-distance.png", "correlation-layers.png",
    }  # fmt: skip
    # The run's own images, slowly.
    loaded = load_run(trained.one, ema=None)
    backbone = loaded.method.backbone.eval()
    with torch.no_grad():
        features = torch.cat(
            [
                backbone.encode(backbone.embed(b.inputs), backbone.positions()).patches
                for b in make_eval_loader(loaded.config)
            ]
        )
    expected = np.mean([np.corrcoef(image) for image in features.double().numpy()], axis=0)
    np.testing.assert_allclose(numbers["within"], expected, atol=2e-5)


def test_mp3_is_looked_at_without_positions(trained: Any, tmp_path: Path) -> None:
    words = [str(trained.mp3), "--count", "6", "--depth", "1", "--out", str(tmp_path)]
    assert main(["evaluate", "attention", "--kind", "correlation", *words]) == 0
    assert json.loads((tmp_path / "correlation.json").read_text())["positions"] == "left out, as in its training"
    assert "After block 1" in (tmp_path / "correlation.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--count", "1"], "at least two samples (--count, --data)"),
        (["--depth", "7"], "unknown depth '7'; choose one of: 1, 2, embedding, norm"),
        (["--data", "nowhere"], "nowhere: no such folder or file (--data)"),
    ],
)
def test_mistakes_are_one_sentence(
    trained: Any, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", "attention", "--kind", "correlation", str(trained.one), *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
