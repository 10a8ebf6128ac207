"""What a step of split training costs: counted in this process, against formulas."""

from __future__ import annotations

import json
from concurrent.futures import Future

import pytest

from situs.cli.main import main
from situs.split import cost
from situs.split.cost import MIB, CostConfig, measure

ASKED = CostConfig("vit_tiny_patch16_224", 32, 8, 2, 3, 5)
TOKENS, WIDTH = 17, 192


@pytest.fixture(scope="module")
def rows():
    return {permute: measure(ASKED, permute, "cpu") for permute in (None, (), ("rows", "columns"))}


def test_operations_are_those_of_the_products(rows) -> None:
    """Two for each weight and token forward, and twice as many backward; attention's two products likewise."""
    block = 12 * WIDTH * WIDTH * TOKENS + 2 * TOKENS * TOKENS * WIDTH
    embed, head = 3 * 8 * 8 * WIDTH * (TOKENS - 1), WIDTH * 5
    products = 3 * 2 * (3 * (2 * block + head) + 2 * embed)  # pixels need no gradient
    assert rows[None].gflop * 1e9 == pytest.approx(products)
    assert rows[()].gflop == rows[("rows", "columns")].gflop == pytest.approx(rows[None].gflop)


def test_four_messages_hold_every_token(rows) -> None:
    values = 4 * 3 * TOKENS * WIDTH * 4 / MIB
    assert rows[None].mib_sent == 0
    assert values < rows[()].mib_sent < 1.05 * values
    assert rows[("rows", "columns")].mib_sent == pytest.approx(rows[()].mib_sent, rel=1e-3)


def test_permutations_keep_a_few_orders_more(rows) -> None:
    plain, moved = rows[()].mib_kept, rows[("rows", "columns")].mib_kept
    tokens = 3 * TOKENS * WIDTH * 4 / MIB
    assert plain == pytest.approx(rows[None].mib_kept, rel=0.05)
    assert plain <= moved < plain + 4 * tokens


@pytest.mark.slow
def test_the_verb_writes_every_row(tmp_path, monkeypatch, capsys) -> None:
    class Here:
        """A pool whose work is done at once."""

        def __init__(self, *_: object) -> None:
            pass

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda self, *_: None  # noqa: E731

        def submit(self, work, *given):
            done = Future()
            done.set_result(work(*given))
            return done

    monkeypatch.setattr(cost, "ProcessPoolExecutor", Here)
    shape = ["--model", "vit_tiny_patch16_224", "--img-size", "32", "--patch-size", "8", "--depth", "1"]
    words = [*shape, "--batch", "2", "--device", "cpu"]
    (tmp_path / "split-cost.json").touch()
    assert main(["split", "cost", *words, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "Permuted rows and columns add +0.00 % operations" in printed.out
    assert "split-cost.html and .json are there, and what this finds replaces them" in printed.err
    written = json.loads((tmp_path / "split-cost.json").read_text())
    assert list(written["rows"]) == list(cost.CASES) and written["batch"] == 2
    assert (tmp_path / "split-cost.html").exists()
