"""The playground's page: what is in its file, and in a real browser that it runs, obeys and says what Python says."""

from __future__ import annotations

import io
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from playing import CASES, Case, asked_of, playing

from situs.errors import SitusError
from situs.models.model import Model
from situs.play import write_playground
from situs.play.pack import described, packed
from situs.play.page import _images

CLOTHES = Case("mp3", {"class_token": False, "global_pool": "avg"}, {"mask_ratio": 0.5}, channels=1)


def test_a_page_holds_all_it_needs_and_fetches_nothing(tmp_path: Path) -> None:
    model = replace(playing(CLOTHES), name="</script><b>mine")
    made = write_playground(model, tmp_path / "deep" / "play.html", count=11)
    text = made.path.read_text()
    assert (made.images, made.bits, made.error) == (11, 32, 0.0)
    assert made.megabytes == made.path.stat().st_size / 1e6 < 0.2
    assert not re.search(r"(src|href|url\()\s*=?\s*[\"']?(https?:)?//", text)
    assert "default-src 'none'" in text
    assert "</script><b>mine" not in text
    assert text.count("</script>") == 4


def test_rounding_is_for_what_does_not_fit_and_refused_where_it_shows(tmp_path: Path) -> None:
    model = playing(CASES["supervised"], width=64)
    about, tensors = described(model)
    long, short = (len(packed(tensors, short=each)[0]) / 1e6 for each in (False, True))
    rest = write_playground(model, tmp_path / "a.html", count=2).megabytes - long
    made = write_playground(model, tmp_path / "b.html", count=2, most_mb=rest + short + 0.01)
    assert (made.bits, made.weights) == (16, about["weights"])
    assert 0 < made.error <= 1e-3
    with pytest.raises(SitusError, match="smaller model"):
        write_playground(model, tmp_path / "c.html", count=2, most_mb=rest + short - 0.01)
    with torch.no_grad():
        model.backbone.model.head.weight.mul_(1000)
    with pytest.raises(SitusError, match="changes the logits"):
        write_playground(model, tmp_path / "d.html", count=2, most_mb=rest + short + 0.01)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html"]


def test_a_classifier_without_a_run_is_asked_itself(tmp_path: Path) -> None:
    """Rounded to 16 bits, its answers are compared with its own."""
    model = playing(CASES["supervised"], width=64)
    bare = replace(model, method=None)
    about, tensors = described(bare)
    assert about["kind"] == "classes"
    long, short = (len(packed(tensors, short=each)[0]) / 1e6 for each in (False, True))
    rest = write_playground(bare, tmp_path / "a.html", count=2).megabytes - long
    made = write_playground(bare, tmp_path / "b.html", count=2, most_mb=rest + short + 0.01)
    beside = write_playground(model, tmp_path / "c.html", count=2, most_mb=rest + short + 0.01)
    assert made.bits == beside.bits == 16 and 0 < made.error == beside.error


@pytest.mark.parametrize("labels", [None, [2, 0, 0, 2, 0, 2, 1, 0]])
def test_pictures_are_bytes_the_inputs_their_own_and_the_classes_take_turns(labels: list[int] | None) -> None:
    chance = torch.Generator().manual_seed(0)
    mean, std = torch.tensor([0.5, 0.25]), torch.tensor([0.25, 0.5])
    images = torch.rand(8, 2, 3, 4, generator=chance) * 1.2 - 0.1  # rounding leaves some outside
    targets = {} if labels is None else {"label": torch.tensor(labels)}
    batches = [
        SimpleNamespace(inputs=images[part], targets={name: each[part] for name, each in targets.items()})
        for part in (slice(5), slice(5, 8))
    ]
    loader: Any = type("Loaded", (), {"__iter__": lambda _: iter(batches)})()
    loader.shown, loader.mean, loader.std = lambda inputs: inputs, mean, std
    pixels, inputs, named = _images(loader)
    bytes_ = torch.floor(images.clamp(0, 1) * 255 + 0.5)
    turns = range(8) if labels is None else [
        [at for at, label in enumerate(labels) if label == each][turn] for turn in range(4) for each in range(3)
        if turn < labels.count(each)
    ]  # fmt: skip
    order = list(turns)
    assert pixels.dtype == torch.uint8 and torch.equal(pixels.float(), bytes_[order].permute(0, 2, 3, 1))
    slow = (bytes_[order] / 255 - mean[:, None, None]) / std[:, None, None]
    torch.testing.assert_close(inputs, slow)
    assert named == ([0] * 8 if labels is None else [labels[at] for at in order])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )
    if found is None:
        pytest.skip("there is no Chromium")
    with api.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


def show(browser: Any, model: Model, tmp_path: Path, **context: Any) -> tuple[Any, list[str]]:
    """The model's page in a window, and the list of what goes wrong in it."""
    made = write_playground(model, tmp_path / "play.html", count=20)
    page, wrong = browser.new_page(**context), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    page.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith(("file:", "data:")) else None)
    page.goto(made.path.as_uri())
    until(page, "play.found !== undefined")
    return page, wrong


def until(page: Any, holds: str, seconds: float = 30.0) -> None:
    """Waits; playwright's own way of waiting for a word of JavaScript is what the page forbids (eval)."""
    end = time.monotonic() + seconds
    while not page.evaluate(holds):
        assert time.monotonic() < end, holds
        page.wait_for_timeout(20)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_browser_gives_pythons_logits(name: str, browser: Any, tmp_path: Path) -> None:
    model = playing(CASES[name])
    page, wrong = show(browser, model, tmp_path)
    for number in (0, 7):
        pixels = torch.tensor(page.evaluate(f"Array.from(play.pictures[{number}])"), dtype=torch.uint8)
        for asked in asked_of(model, pixels.view(12, 16, -1)):
            run = f"(given) => Array.from(play.model.{asked.call}(play.pictures[{number}], ...given))"
            found = torch.tensor(page.evaluate(run, asked.arguments), dtype=torch.float64)
            torch.testing.assert_close(found, asked.logits.flatten(), atol=1e-3, rtol=0)
    assert wrong == []
    page.close()


@pytest.mark.slow
def test_pieces_move_by_mouse_keys_and_touch(browser: Any, tmp_path: Path) -> None:
    page, wrong = show(browser, playing(CASES["droppos"]), tmp_path, has_touch=True)
    page.click("#reset")
    order = "play.board.order.join()"
    home = ",".join(map(str, range(12)))
    assert page.evaluate(order) == home
    box = [piece.bounding_box() for piece in page.query_selector_all(".piece")]
    middle = [(each["x"] + each["width"] / 2, each["y"] + each["height"] / 2) for each in box]
    page.mouse.move(*middle[1])
    page.mouse.down()
    page.mouse.move(*middle[10], steps=5)
    page.mouse.up()
    assert page.evaluate(order) == "0,10,2,3,4,5,6,7,8,9,1,11"
    assert page.evaluate("play.board.at") == 10
    page.keyboard.press("Space")  # the piece that was moved has the focus: up by a row, then to the right
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    assert page.evaluate(order) == "0,10,2,3,4,5,7,1,8,9,6,11"
    page.keyboard.press("ArrowRight")  # the row ends there
    assert page.evaluate("document.activeElement.ariaLabel").startswith("row 2, column 4: piece from row 1, column 2")
    page.keyboard.press("Space")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Escape")
    assert page.evaluate(order) == "0,10,2,3,4,5,7,1,8,9,6,11"
    touch = """([from, to]) => {
      const piece = document.querySelectorAll(".piece")[0];
      piece.setPointerCapture = () => {};
      for (const [kind, [x, y]] of [["pointerdown", from], ["pointermove", to], ["pointerup", to]])
        piece.dispatchEvent(new PointerEvent(kind, {pointerId: 5, pointerType: "touch", clientX: x, clientY: y}));
    }"""
    page.evaluate(touch, [middle[0], middle[5]])
    assert page.evaluate(order) == "5,10,2,3,4,0,7,1,8,9,6,11"
    page.wait_for_timeout(100)
    seen = page.evaluate(
        "play.visible()[0].slice(0, play.visible()[1]).map((patch) => play.board.order.indexOf(patch))"
    )
    assert len(seen) == 5  # of 9 that are seen; told the places where they stand now
    assert wrong == []
    page.close()


@pytest.mark.slow
def test_sliders_change_what_the_model_is_told(browser: Any, tmp_path: Path) -> None:
    page, wrong = show(browser, playing(CASES["mp3"]), tmp_path)
    before = page.evaluate("Array.from(play.guesses.get(3).shares)")
    page.click("#shuffle")
    page.wait_for_timeout(200)
    assert page.evaluate("Array.from(play.guesses.get(3).shares)") == before  # MP3 sees no positions
    page.fill("#hidden", "11")
    page.wait_for_timeout(200)
    assert page.evaluate("play.context().length") == 1
    assert "1 of 12 seen" in page.inner_text("#hidden-out")
    assert page.evaluate("Array.from(play.guesses.get(3).shares)") != before
    said = page.inner_text("#headline")
    right = page.evaluate("[...play.guesses].filter(([patch, guess]) => patch === guess.place).length")
    assert said.startswith(f"{right} of 12")
    page.click("#follow")
    page.wait_for_timeout(200)
    assert sorted(page.evaluate("play.board.order")) == list(range(12))
    assert wrong == []
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mp3", "mjp"])
def test_a_lock_falls_to_its_key_alone(name: str, browser: Any, tmp_path: Path) -> None:
    page, wrong = show(browser, playing(CASES[name]), tmp_path)
    asked = "play.answer(play.model, play.pixels, play.board.order, 3).shares"
    rows = f"[...{asked}].map((row) => row.length ? [...row] : row)"
    before = page.evaluate(rows)
    page.click("#lock")
    until(page, "play.lock.sums.keyed?.seen === 20")
    locked = page.evaluate(rows)
    sums = page.evaluate("play.lock.sums")
    assert sums["open"] == sums["keyed"]
    if name == "mjp":  # without labels: how many keep their class
        assert sums["open"]["right"] == 20
        assert sums["locked"]["right"] < 20
    assert page.inner_text("#measured").count("%") == 3
    page.click("#key")
    keyed, first = np.array(page.evaluate(rows)), np.array(before)
    np.testing.assert_allclose(keyed, first, atol=1e-5)
    assert np.abs(np.array(locked) - first).max() > 1e-2
    page.click("#lock")
    assert page.evaluate(rows) == before
    assert wrong == []
    page.close()


@pytest.mark.slow
def test_a_picture_of_ones_own(browser: Any, tmp_path: Path) -> None:
    page, wrong = show(browser, playing(CASES["supervised"]), tmp_path)
    quarters = np.zeros((240, 400, 3), dtype="uint8")  # the middle 240 × 320 is kept
    quarters[:120, :200], quarters[120:, 200:] = (250, 0, 0), (0, 0, 250)
    file = io.BytesIO()
    Image.fromarray(quarters).save(file, "PNG")
    page.set_input_files("#file", {"name": "own.png", "mimeType": "image/png", "buffer": file.getvalue()})
    until(page, "play.label === null && play.pixels[0] > 200")
    pixels = np.array(page.evaluate("Array.from(play.pixels)")).reshape(12, 16, 3)
    for (row, column), colour in {(0, 0): (250, 0, 0), (11, 15): (0, 0, 250), (0, 15): (0, 0, 0)}.items():
        assert np.abs(pixels[row, column] - colour).max() <= 1
    page.set_input_files("#file", {"name": "no.png", "mimeType": "image/png", "buffer": b"no picture"})
    page.wait_for_selector("#own.failed")
    assert "cannot be read" in page.inner_text("#say")
    assert wrong == []
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mp3", "droppos", "mjp"])
@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (800, "dark"), (1600, "dark")])
def test_it_fits_every_screen_and_can_be_read(name: str, width: int, scheme: Any, browser: Any, tmp_path: Path) -> None:
    page, wrong = show(
        browser, playing(CASES[name]), tmp_path, viewport={"width": width, "height": 800}, color_scheme=scheme
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    named = "[...document.querySelectorAll('button, canvas[role=img], input')].filter((each) => "
    named += "!(each.ariaLabel || each.textContent.trim() || each.labels?.length)).length"
    assert page.evaluate(named) == 0
    contrast = """() => {
      const light = (text) => { const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map((v) => v / 255)
        .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
      const below = (node) => { for (; node; node = node.parentElement) {
        const colour = getComputedStyle(node).backgroundColor; if (!/, 0\\)$/.test(colour)) return colour; } };
      return Math.min(...[...document.querySelectorAll("h1, h2, p, button, label, output, dd, dt")]
        .filter((each) => each.textContent.trim() && each.offsetHeight > 1).map((each) => {
          const pair = [light(getComputedStyle(each).color), light(below(each))].sort((a, b) => b - a);
          return (pair[0] + 0.05) / (pair[1] + 0.05); })); }"""
    assert page.evaluate(contrast) >= 4.5
    assert wrong == []
    page.close()
