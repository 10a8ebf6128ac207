"""What the whole suite shares: one thread a process, repeatable hypothesis, the place of the big data."""

from __future__ import annotations

import compileall
import copy
import gc
import io
import json
import logging
import os
import re
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

# Before torch is imported: the suite's tensors are small, and two test processes share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Every process that a test starts, and each of two workers, would else compile Situs and the tests anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Figures are files here, never windows.
os.environ.setdefault("MPLBACKEND", "Agg")
# A test that would fetch a model from the network is wrong; let it fail at once and say so.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest  # noqa: E402
from _pytest.assertion import rewrite  # noqa: E402
from hypothesis import settings  # noqa: E402

try:
    from hypothesis.internal.conjecture import providers
except ImportError:  # the oldest version that is allowed has none
    providers = None

ROOT = Path(__file__).resolve().parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"

# No deadline: the first example pays for an import or a compilation, and a busy machine is no failure.
settings.register_profile("situs", deadline=None, derandomize=True, max_examples=20)
settings.load_profile("situs")
# Constants of all modules that are imported by then would be tried as examples: Situs is parsed for them, and what is
# drawn would differ with the tests before.
if hasattr(providers, "_get_local_constants"):
    setattr(providers, "_get_local_constants", lambda: getattr(providers, "_local_constants"))  # noqa: B009, B010


LONG = ("train/test_distributed.py", "train/test_loop_kill.py", "train/test_export.py", "cli/demo/test_run.py")
"""Files with a long test or fixture. At the end of a run one of two processes would wait for them, or make it twice."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Takes the long tests first, and skips those marked `shared_data` where the data is absent."""
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONG))
    if SHARED_DATA.is_dir():
        return
    skip = pytest.mark.skip(reason="../shared/data is not beside this checkout")
    for item in items:
        if item.get_closest_marker("shared_data"):
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(name: str) -> Iterator[Any]:
    """`thin(3)`: each third case of a law is in the default suite, the others are slow. Which third it is differs from
    law to law, so that every architecture, method or defence still meets some of the laws."""
    cases = yield
    if isinstance(cases, list) and cases and (mark := cases[0].get_closest_marker("thin")):
        (each,) = mark.args
        quick = [case for case in cases if not any(map(case.get_closest_marker, ("slow", "gpu")))]
        first = zlib.crc32(name.encode()) % max(min(each, len(quick)), 1)
        for case in (case for number, case in enumerate(quick) if number % each != first):
            case.add_marker(pytest.mark.slow)
    return cases


def pytest_sessionstart(session: pytest.Session) -> None:
    """In a new checkout each worker would compile every file, in the same order: each compiles a part for all."""
    if (worker := getattr(session.config, "workerinput", None)) is None:
        return
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for path in sorted((ROOT / "src").rglob("*.py"))[number::count]:
        compileall.compile_file(path, quiet=2)
    state = session.config.stash[rewrite.assertstate_key]
    for path in sorted((ROOT / "tests").rglob("test_*.py"))[number::count]:
        cached = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if not cached.exists() and rewrite.try_makedirs(cached.parent):
            source, code = rewrite._rewrite_test(path, session.config)
            rewrite._write_pyc(state, code, source, cached)


def pytest_configure() -> None:
    """What libraries log stays out of the streams that tests look at; no disk is waited for: nobody pulls the plug."""
    logging.getLogger().addHandler(logging.NullHandler())
    os.fsync = lambda _: None


PROBED = ("tests/measure/", "tests/golden/", "tests/docs/")
"""Where the weights of a linear probe are looked at; elsewhere a quarter of its iterations is enough."""


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A fine-tuning of few images begins with a probe, which takes longer than the steps of a small run. What needs a
    GPU is skipped where there is none: `-m slow` asks for it too."""
    if item.get_closest_marker("gpu") and not import_module("torch").cuda.is_available():
        pytest.skip("no CUDA device")
    if (probe := sys.modules.get("situs.measure.probe.linear")) is not None:
        setattr(probe, "STEPS", 200 if item.nodeid.startswith(PROBED) else 50)  # noqa: B010


def pytest_runtest_teardown() -> None:
    """Where a CPU has no bfloat16, torch turns oneDNN off for good at the first product of two: other bits from then
    on, in this process alone."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.backends.mkldnn.enabled = True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """What is imported stays to the end: to look through a million objects again and again costs a tenth of a run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 10, 10)
        gc.enable()


def _copied(module: Any, memo: dict[int, Any]) -> Any:
    """`deepcopy` of a module, in a fifth of the time: most of what one has are numbers and empty dicts of hooks."""
    kind = type(module)
    memo[id(module)] = made = object.__new__(kind)
    for name, value in module.__dict__.items():
        if isinstance(value, bool | int | float | str | None):
            made.__dict__[name] = value
        elif not value and type(value) in (dict, OrderedDict, set):
            made.__dict__[name] = type(value)()
        else:
            made.__dict__[name] = copy.deepcopy(value, memo)
    return made


def _created_once(create: Callable[..., Any]) -> Callable[..., Any]:
    """timm's `create_model`, which makes the same model of the same name, arguments and random state: a copy of that
    takes a tenth of the time. Large ones and those with values from elsewhere are made each time."""
    import torch

    kept: dict[str, tuple[Any, torch.Tensor]] = {}

    def created(name: str, **more: Any) -> Any:
        here = torch.get_default_device().type == "cpu" and not more.get("pretrained") and ":" not in name
        if not here or not all(isinstance(each, bool | int | float | str | tuple | None) for each in more.values()):
            return create(name, **more)
        before = hash(torch.get_rng_state().numpy().tobytes())
        key = f"{name} {sorted(more.items())} {before} {torch.get_default_dtype()}"
        if key not in kept:
            model = create(name, **more)
            if sum(each.numel() for each in model.parameters()) > 2**20:
                return model
            kept[key] = model, torch.get_rng_state()
            return copy.deepcopy(model)
        torch.set_rng_state(kept[key][1])
        return copy.deepcopy(kept[key][0])

    return created


def pytest_collection_finish() -> None:
    """For devices that are not here torch notes each seed with the whole stack, a hundred times the work of seeding.

    Of timm's first weights the large ones are drawn evenly, in a tenth of the time, with the same mean and, but for
    tails cut at two deviations, the same deviation: half a second of each model of full size.
    """
    import timm
    import torch
    from timm.layers import weight_init

    timm.create_model = _created_once(timm.create_model)
    exactly, wide = weight_init._trunc_normal_, 3**0.5

    def drawn(tensor: torch.Tensor, mean: float, std: float, a: float, b: float) -> torch.Tensor:
        if tensor.numel() < 2**17:
            return exactly(tensor, mean, std, a, b)
        return tensor.uniform_(mean - wide * std, mean + wide * std).clamp_(a, b)

    weight_init._trunc_normal_ = drawn
    torch.nn.Module.__deepcopy__ = _copied  # pyright: ignore[reportAttributeAccessIssue]
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = lambda seed: None  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The data beside the checkout; only for tests marked `shared_data`."""
    return SHARED_DATA


@pytest.fixture(scope="session")
def run_python_blocks() -> Callable[[Path], dict[str, Any]]:
    """Runs the python blocks of a Markdown page in order, as a reader would; gives their names back."""

    from readme import run_blocks

    return run_blocks


@pytest.fixture(scope="session")
def undrawing() -> Callable[[pytest.MonkeyPatch], None]:
    """Lets figures be made and not drawn, which takes most of a page's time: for tests of something else on it.

    All panels of a grid of images, of attention, of a puzzle are one: to make a panel takes as long as a small test.
    """
    from PIL import Image

    from situs.report import figures, html, puzzles

    dot, canvas = io.BytesIO(), figures.canvas
    drawers = {name: getattr(figures, name) for name in ("image_rows", "attention_over_images", "relative_maps")}
    Image.new("L", (2, 2)).save(dot, "PNG")

    def one_panel(rows: int, columns: int, *size: float, tight: bool = False) -> Any:
        figure, axes = canvas(1, 1, *size, tight=tight)
        return figure, axes * (rows * columns)

    def on_one_panel(draw: Callable[..., Any], *given: Any, **more: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(figures, "canvas", one_panel)
            return draw(*given, **more)

    def undraw(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(figures, "png", lambda _: dot.getvalue())
        for name, draw in drawers.items():
            patch.setattr(figures, name, partial(on_one_panel, draw))
        patch.setattr(puzzles, "canvas", one_panel)
        patch.setattr(html, "_smaller", lambda picture: ("image/png", picture))

    return undraw


@pytest.fixture
def undrawn(undrawing: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """`undrawing` for a test."""
    undrawing(monkeypatch)


@pytest.fixture(scope="session")
def outline() -> Callable[[str], list[str]]:
    """What a page is made of: of each section its title, and how much of what stands in it."""
    parts = {"text": "<p>", "note": '<p class="note">', "figure": "<figure>", "row": "<tr><td", "fold": "<details>"}
    first = r'<div class="opening">(.*?)</div>\s*(?=<div class="strip"|<nav|<section|<details|</main>)'

    def outline(page: str) -> list[str]:
        found = []
        opens = r'<(?:section|details class="section")'
        sections = rf"{opens}.*?<h2[^>]*>(.*?)</h2>(.*?)(?={opens}|</main>)"
        shown = [("First screen", body) for body in re.findall(first, page, flags=re.DOTALL)]
        for title, body in shown + re.findall(sections, page, flags=re.DOTALL):
            if title == "Words on this page":
                continue
            counts = {name: body.count(mark) for name, mark in parts.items()}
            counts = [f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items() if count]
            found.append(
                ", ".join([title, *counts, *["bars"] * ("<figure class" in body), *["facts"] * ("<dt>" in body)])
            )
        return found

    return outline


# --- JSON Schema (draft 2020-12), as much of it as the schemas in docs/ use -----------------------------------

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}
_WORDS = {
    *("$ref", "$schema", "$id", "$defs", "title", "description", "type", "const", "enum", "anyOf", "pattern"),
    *("minimum", "required", "properties", "additionalProperties", "items"),
}


def _is_a(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and isinstance(value, bool) == (kind == "boolean")


def _breaks(value: Any, schema: Any, root: Any, path: str) -> list[str]:
    """Where a value breaks a schema; a keyword that is not known here is a mistake of the schema."""
    assert set(schema) <= _WORDS, f"{path}: {set(schema) - _WORDS}"
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is_a(value, kind) for kind in kinds):
        return [f"{path}: {value!r} is no {kinds}"]
    found = []
    if "$ref" in schema:
        found += _breaks(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, path)
    if "anyOf" in schema:
        each = [_breaks(value, one, root, path) for one in schema["anyOf"]]
        found += [] if [] in each else [f"{path}: none of {each}"]
    for word, holds in {
        "const": lambda asked: value == asked and type(value) is type(asked),
        "enum": lambda asked: value in asked,
        "pattern": lambda asked: re.search(asked, value) is not None,
        "minimum": lambda asked: value >= asked,
    }.items():
        if word in schema and not holds(schema[word]):
            found.append(f"{path}: {value!r} breaks {word} {schema[word]!r}")
    return found + _members(value, schema, root, path)


def _members(value: Any, schema: Any, root: Any, path: str) -> list[str]:
    if isinstance(value, list):
        return [x for i, one in enumerate(value) for x in _breaks(one, schema.get("items", {}), root, f"{path}/{i}")]
    if not isinstance(value, dict):
        return []
    found = [f"{path}: lacks {name}" for name in schema.get("required", []) if name not in value]
    for name, one in value.items():
        other = schema.get("properties", {}).get(name, schema.get("additionalProperties", {}))
        said = [f"{path}: {name} is not allowed"] if other is False else _breaks(one, other, root, f"{path}/{name}")
        found += said
    return found


@pytest.fixture(scope="session")
def schema_breaks() -> Callable[[Any], list[str]]:
    """Where a gradients.json breaks the schema in the docs."""
    schema = json.loads((ROOT / "docs" / "methods" / "gradients.schema.json").read_text(encoding="utf-8"))
    return lambda told: _breaks(json.loads(json.dumps(told, allow_nan=False)), schema, schema, "")
