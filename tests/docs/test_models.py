"""docs/models.json says what applies to every model of the contract tests, and docs/models.md shows it as a table.

python docs/make_reference.py models > docs/models.json makes it (minutes), models_table prints the table.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from situs.audit.attacks import ATTACKS
from situs.methods import METHODS

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    return json.loads((DOCS / "models.json").read_text(encoding="utf-8"))


def kind_of(written: dict[str, Any], library: str, name: str) -> dict[str, Any]:
    [kind] = [kind for kind in written["kinds"] if kind["library"] == library and name in kind["names"]]
    return without_sentences(kind)


def without_sentences(kind: dict[str, Any]) -> dict[str, Any]:
    """What applies, and what does not, without the words of the reasons."""
    facts = {key: value for key, value in kind.items() if key not in ("library", "names")}
    return {**facts, "reasons": sorted(kind["reasons"])}


def test_every_method_and_attack_is_answered_for_every_kind(written: dict[str, Any]) -> None:
    methods = {name for name in METHODS if METHODS[name].__module__.startswith("situs.")}
    passive = {name for name, attack in ATTACKS.items() if not attack.active}
    for kind in written["kinds"]:
        answered = {*kind["methods"], *kind["attacks"], *kind["reasons"]}
        images = not {"sentences"} & answered
        assert methods <= answered and (not images or passive <= answered), kind["names"][0]
        assert {*kind["locks"], *kind["reasons"]} >= {"rows", "columns"}


def test_every_model_of_the_contract_tests_is_in_it(maker: ModuleType, written: dict[str, Any]) -> None:
    named = {(kind["library"], name) for kind in written["kinds"] for name in kind["names"]}
    assert named == set(maker.contract_models())


FRESH = [("timm", "vit_tiny_patch16_224"), ("transformers", "BertModel"), ("transformers", "GPT2LMHeadModel")]


@pytest.mark.parametrize(("library", "name"), FRESH)
def test_the_file_is_fresh_for(library: str, name: str, maker: ModuleType, written: dict[str, Any]) -> None:
    assert kind_of(written, library, name) == without_sentences(maker.model_entry(library, name))


@pytest.mark.slow
def test_the_file_is_fresh(maker: ModuleType, written: dict[str, Any]) -> None:
    import timm

    if timm.__version__ != written["timm"]:
        pytest.skip("made with another version of timm")
    for library, name in maker.contract_models():
        assert kind_of(written, library, name) == without_sentences(maker.model_entry(library, name)), name


def test_no_language_model_is_said_to_have_no_attack(written: dict[str, Any]) -> None:
    """A causal model is attacked with its head; bare, or as a classifier, the entry says why not."""
    causal = [kind for kind in written["kinds"] if "language" in kind["methods"]]
    assert len(causal) >= 6 and all(kind["attacks"] == ["sentences"] for kind in causal)
    texts = [kind for kind in written["kinds"] if not kind["attacks"]]
    assert texts and all("sentences" in kind["reasons"] for kind in texts)


def test_the_page_has_the_table(maker: ModuleType) -> None:
    assert maker.models_page().strip() in (DOCS / "models.md").read_text(encoding="utf-8")
