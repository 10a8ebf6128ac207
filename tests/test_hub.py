"""Models of the hub by address: what is fetched, what is checked, and one sentence for whatever goes wrong.

A stand-in server on this machine speaks the hub's protocol; the client is the real one.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_vit
from hub_server import COMMIT, Hub
from safetensors.torch import load, save

from situs.backbones import create_backbone
from situs.errors import SitusError
from situs.hub import fetch, hub_address, local_folder
from situs.locks import lock, new_key, unlock
from situs.methods import Supervised, SupervisedConfig
from situs.models import open_model
from situs.models.start import finetune_source, initialise
from situs.train.export import ModelProvenance, write_export

NAME = f"hf:someone/small@{COMMIT}"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("made") / "small"
    method = Supervised(small_vit(8, num_classes=3), SupervisedConfig())
    write_export(method, folder, ModelProvenance(method="supervised"))
    return folder


@pytest.fixture
def hub(exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    hub.files = {file.name: file.read_bytes() for file in exported.iterdir()}
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # conftest.py has set it
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 10)  # so that a small file has several
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    yield hub
    hub.close()


def refused(source: str = NAME, act: Callable[[str], Any] = open_model) -> str:
    """The one sentence of a refusal."""
    with pytest.raises(SitusError) as caught:
        act(source)
    sentence = str(caught.value)
    assert "\n" not in sentence and len(sentence) < 330, sentence
    return sentence


# --- what works -----------------------------------------------------------------------------------------------------


def test_an_address_opens_as_the_folder_it_was_made_from(hub: Hub, exported: Path) -> None:
    hub.files |= {"pytorch_model.bin": b"pickle", "modeling_evil.py": b"raise SystemExit", "nested/config.json": b"{}"}
    model, local = open_model(NAME), open_model(exported)
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(model.backbone(images), local.backbone(images))
    assert model.name == "small" and model.facts["hub"] == NAME and model.samples == local.samples
    fetched = {path.rpartition("/")[2] for method, path, _ in hub.seen if method == "GET" and "/api/" not in path}
    assert fetched == {"config.json", "model.safetensors"}  # no pickle, no code, no card


def test_a_fetched_commit_needs_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_model(NAME)
    hub.seen.clear()
    second = open_model(NAME)
    assert hub.seen == []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    third = open_model(NAME)
    states = [model.backbone.state_dict() for model in (first, second, third)]
    assert all(torch.equal(states[0][name], other[name]) for other in states for name in states[0])


def test_a_start_and_a_backbone_keep_the_address(hub: Hub) -> None:
    target = small_vit(8, num_classes=3)
    lines = initialise(target, NAME)
    assert lines[0].startswith(f"started from {NAME}: ")
    assert finetune_source(NAME).init == NAME
    assert torch.equal(create_backbone(NAME).model.pos_embed, target.model.pos_embed)


def test_a_connection_that_is_cut_once_is_resumed(hub: Hub) -> None:
    hub.fault, hub.where = "cut once", "model.safetensors"
    assert open_model(NAME).backbone.num_classes == 3
    assert hub.fault == ""


def test_the_token_goes_to_the_hub_and_not_to_another_host(hub: Hub) -> None:
    other = Hub()
    other.files, other.url = hub.files, other.url.replace("127.0.0.1", "localhost")
    hub.fault, hub.where, hub.redirect = "elsewhere", "model.safetensors", other.url
    try:
        open_model(NAME)
        assert [path for method, path, _ in other.seen if method == "GET"] == ["/cdn/model.safetensors"]
        assert {token for *_, token in other.seen} == {""}
        assert "Bearer hf_secret" in {token for *_, token in hub.seen}
    finally:
        other.close()


def shard(hub: Hub) -> dict[str, Any]:
    """Splits the weights into two shards, and gives their index."""
    state = load(hub.files.pop("model.safetensors"))
    names = [f"model-{number:05d}-of-00002.safetensors" for number in (1, 2)]
    index = {"metadata": {}, "weight_map": {name: names[number % 2] for number, name in enumerate(state)}}
    for file in names:
        hub.files[file] = save({name: value for name, value in state.items() if index["weight_map"][name] == file})
    hub.files["model.safetensors.index.json"] = json.dumps(index).encode()
    return index


def test_shards_open_as_one_file(hub: Hub, exported: Path) -> None:
    shard(hub)
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(open_model(NAME).backbone(images), open_model(exported).backbone(images))


@pytest.mark.parametrize("name", ["../model-00001-of-00002.safetensors", "/x", "model-00009-of-00009.safetensors", 3])
def test_an_index_names_shards_of_its_own_folder(hub: Hub, name: object) -> None:
    index = shard(hub)
    index["weight_map"] = dict.fromkeys(index["weight_map"], name)
    hub.files["model.safetensors.index.json"] = json.dumps(index).encode()
    assert "its model.safetensors.index.json names" in refused()


@pytest.mark.slow
def test_a_model_of_transformers_opens_and_is_locked(hub: Hub, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit", max_shard_size="8KB")
    hub.files = {file.name: file.read_bytes() for file in (tmp_path / "vit").iterdir()}
    assert sum(name.startswith("model-") for name in hub.files) > 1
    images = torch.randn(2, 3, 8, 8)
    local = open_model(tmp_path / "vit").backbone(images)
    assert torch.equal(open_model(NAME).backbone(images), local)
    assert finetune_source(NAME).backbone.name == NAME
    locked = lock(NAME, new_key(tmp_path / "key"), tmp_path / "locked").path
    unlocked = unlock(locked, tmp_path / "key", tmp_path / "opened").path
    assert torch.equal(open_model(unlocked).backbone(images), local)


def test_a_local_folder_goes_before_the_hub(hub: Hub, exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(exported.parent.parent)
    near = f"{exported.parent.name}/small"
    assert hub_address(f"hf:{near}") is None and local_folder(f"hf:{near}") == Path(near)
    open_model(f"hf:{near}")
    assert hub.seen == []


# --- pinned revisions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("revision", ["", "@main", "@", f"@{COMMIT[:12]}"])
def test_a_revision_that_can_change_is_refused_with_the_commit_of_today(hub: Hub, revision: str) -> None:
    sentence = refused(f"hf:someone/small{revision}")
    short = revision == f"@{COMMIT[:12]}"  # the stand-in does not know it
    assert sentence.endswith("the hub has no such commit" if short else f"; give {NAME}")
    assert not any("/resolve/" in path for _, path, _ in hub.seen)
    hub.close()
    assert refused(f"hf:someone/small{revision}").endswith("@COMMIT (40 hexadecimal digits)")


# --- what goes wrong ----------------------------------------------------------------------------------------------


def relist(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    return {"change": change}


def without(name: str, **files: bytes) -> Callable[[Hub], None]:
    def change(hub: Hub) -> None:
        hub.files.pop(name)
        hub.files |= {name.replace("__", "."): data for name, data in files.items()}

    return change


def config(**entries: Any) -> Callable[[Hub], None]:
    def change(hub: Hub) -> None:
        hub.files["config.json"] = json.dumps(entries).encode()

    return change


LISTED = "model.safetensors"
FAULTS: dict[str, tuple[dict[str, Any] | Callable[[Hub], None], str]] = {
    "no such model": (
        {"fault": "status", "status": 404, "redirect": "RepoNotFound"},
        "is not on the hub, or is",
    ),
    "unauthorised": ({"fault": "status", "status": 401}, "is not on the hub, or is private"),
    "token refused": (
        {"fault": "status", "status": 401, "message": "Invalid credentials in Authorization header"},
        "is private and needs a login",
    ),
    "forbidden": ({"fault": "status", "status": 403}, "needs a login"),
    "gated": (
        {"fault": "status", "status": 403, "redirect": "GatedRepo", "where": LISTED},
        "is gated: accept",
    ),
    "no such commit": (
        {"fault": "status", "status": 404, "redirect": "RevisionNotFound"},
        "has no such commit",
    ),
    "too many requests": ({"fault": "status", "status": 429, "where": "api"}, "for now (429)"),
    "server error, list": ({"fault": "status", "status": 500, "where": "api"}, "the hub answers 500"),
    "server error, file": ({"fault": "status", "status": 503, "where": LISTED}, "the hub answers 503"),
    "list is no JSON": ({"fault": "garbage", "where": "api"}, "cannot be fetched (JSONDecodeError"),
    "redirects for ever": ({"fault": "loop", "where": "api"}, "redirects without end"),
    "file redirects for ever": ({"fault": "loop", "where": "config.json"}, "redirects without end"),
    "failed repeatedly": ({"fault": "cut", "where": LISTED}, "failed repeatedly"),
    "one bit differs": ({"fault": "flip", "where": LISTED}, "its model.safetensors differs in its SHA-256"),
    "small file differs": ({"fault": "flip", "where": "config.json"}, "its config.json differs from its hash in git"),
    "file is too short": ({"fault": "short", "where": LISTED}, "bytes instead of 32,732"),
    "file is too long": ({"fault": "long", "where": LISTED}, "bytes instead of 32,732"),
    "size in the list": (
        relist(lambda answer: [entry.update(size=7) for entry in answer["siblings"]]),
        "bytes instead of 7",
    ),
    "size is a word": (
        relist(lambda answer: [entry.update(size="many") for entry in answer["siblings"]]),
        "cannot be fetched (ValueError",
    ),
    "huge description": (
        relist(lambda answer: [entry.update(size=1 << 40) for entry in answer["siblings"]]),
        "its config.json has 1,099,511,627,776 bytes",
    ),
    "other commit": (relist(lambda answer: answer.update(sha="f" * 40)), "answers with another commit"),
    "name above its folder": (
        relist(lambda answer: answer["siblings"].append({"rfilename": "../../x.safetensors", "size": 1})),
        "a file outside of its own folder ('../../x.safetensors')",
    ),
    "absolute name": (
        relist(lambda answer: answer["siblings"].append({"rfilename": "/etc/x.json", "size": 1})),
        "a file outside of its own folder",
    ),
    "listed and missing": (
        relist(lambda answer: answer["siblings"].append({"rfilename": "tokenizer.json", "size": 3})),
        "a file that the hub lists is not there",
    ),
    "no files": (relist(lambda answer: answer.update(siblings=None)), "has no config.json"),
    "no weights": (without(LISTED), "has no model.safetensors"),
    "pickle alone": (without(LISTED, pytorch_model__bin=b"x"), "only as pytorch_model.bin, a pickle"),
    "no config": (without("config.json"), "has no config.json"),
    "words and no config": (
        without("config.json", vocab__txt=b"a"),
        "has no config.json, so it is not a model of timm",
    ),
    "index of nothing": (
        without(LISTED, model__safetensors__index__json=b'{"weight_map": 3}'),
        "its model.safetensors.index.json is not an index of shards",
    ),
    "config is no JSON": (lambda hub: hub.files.update({"config.json": b"{"}), "config.json: is not valid JSON"),
    "config is a list": (lambda hub: hub.files.update({"config.json": b"[]"}), "must contain a table"),
    "config has a text for a table": (config(architecture="vit_tiny_patch16_224", model_args="x"), "do not describe"),
    "config is too deep": (lambda hub: hub.files.update({"config.json": b"[" * 200_000}), "is not valid JSON"),
    "unknown architecture": (config(architecture="vit_of_tomorrow"), "vit_of_tomorrow"),
    "unknown model type": (config(model_type="whale"), "whale"),
    "weights of another model": (lambda hub: hub.files.update({LISTED: b"\0" * 80}), "not a readable safetensors file"),
}


SLOW = {"unknown model type"}
"""It imports transformers."""


@pytest.mark.parametrize("fault", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in FAULTS])
def test_every_fault_is_one_sentence_and_leaves_nothing_half_open(hub: Hub, tmp_path: Path, fault: str) -> None:
    change, expected = FAULTS[fault]
    if callable(change):
        change(hub)
    else:
        for name, value in change.items():
            setattr(hub, name, value)
    sentence = refused()
    assert sentence.startswith(NAME) or fault in ("unknown architecture", "unknown model type"), sentence
    assert expected in sentence
    assert str(tmp_path) not in sentence
    if fault in ("one bit differs", "small file differs", "failed repeatedly", "size in the list"):
        hub.fault, hub.change = "", lambda answer: None
        with contextlib.suppress(SitusError):  # nothing of the fault is kept: what is right now opens
            assert open_model(NAME).backbone.num_classes == 3
            return
        raise AssertionError("does not open once the hub is right")


def test_no_network_and_no_cache_are_one_sentence(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert refused().endswith("is not in the cache here, and HF_HUB_OFFLINE forbids fetching it")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub.close()
    assert refused().endswith("is not in the cache here, and the hub cannot be reached")


def test_offline_opens_what_another_program_fetched_whole(hub: Hub, tmp_path: Path, monkeypatch) -> None:
    open_model(NAME)
    shutil.rmtree(tmp_path / "own")  # the record of Situs
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert open_model(NAME).backbone.num_classes == 3
    folder = fetch(hub_address(NAME))
    (folder / "model.safetensors").unlink()
    assert "HF_HUB_OFFLINE" in refused()


@pytest.mark.parametrize("lost", [None, "model-00001-of-00002.safetensors", "model.safetensors.index.json"])
def test_offline_shards_must_all_be_there(hub: Hub, tmp_path: Path, monkeypatch, lost: str | None) -> None:
    shard(hub)
    folder = fetch_at(NAME)
    shutil.rmtree(tmp_path / "own")  # the record of Situs
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if lost is None:
        assert fetch_at(NAME) == folder
        (folder / "model.safetensors.index.json").write_text("{}")
    else:
        (folder / lost).unlink()
    assert refused(act=fetch_at).endswith("is not in the cache here, and HF_HUB_OFFLINE forbids fetching it")


def fetch_at(source: str) -> Path:
    address = hub_address(source)
    assert address is not None
    return fetch(address)


def test_the_command_line_prints_the_sentence(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    from situs.cli.main import main

    assert main(["info", NAME]) == 0
    assert "private split learning" in capsys.readouterr().out
    assert main(["info", "hf:someone/small@main"]) == 2
    assert NAME in capsys.readouterr().err
