"""Every example runs as it stands and does what its first line says; the shortest stays short."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))


def code_lines(path: Path) -> set[int]:
    """The lines that hold code: no blanks, no comments, no docstring."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    nodes = [node for statement in body for node in ast.walk(statement)]
    spans = [(n.lineno, n.end_lineno or n.lineno) for n in nodes if isinstance(n, ast.expr | ast.stmt)]
    return {line for first, last in spans for line in range(first, last + 1)}


def test_every_example_opens_with_its_command() -> None:
    assert EXAMPLES, "no example found: this test looks in the wrong place"
    for path in EXAMPLES:
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        assert f"python examples/{path.name}" in text.splitlines()[0], path.name


def test_extra_loss_is_short_and_both_losses_fall(capsys: pytest.CaptureFixture[str]) -> None:
    path = next(path for path in EXAMPLES if path.name == "extra_loss.py")
    assert len(code_lines(path)) <= 20
    torch.manual_seed(0)
    names = runpy.run_path(str(path))
    losses = torch.tensor(names["losses"])
    assert losses.shape == (20, 2)
    first, last = losses[:4].mean(0), losses[-4:].mean(0)
    assert (last < first).all()
    head = names["mp3"].position_head.weight
    assert head.grad is not None
    assert head.grad.abs().sum() > 0
    classifier = names["model"].model.head.weight
    assert classifier.grad.abs().sum() > 0
    assert capsys.readouterr().out.count("of which position") == 5
