"""`situs info --verify`: the table, the JSON, and that a refusal is no error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from situs.cli.main import main

NAME = "test_vit"  # timm's own tiny model for tests


def printed_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["info", "--verify", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def findings(shown: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["part"], each["law"]): each for each in shown["findings"]}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bert")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(**sizes, vocab_size=40, max_position_embeddings=12)
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def test_json_of_a_vit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown = printed_json(capsys, NAME, "--img-size", "32,48", "--steps", "1", "--out", str(tmp_path))
    assert json.loads((tmp_path / "verify.json").read_text()) == shown and (tmp_path / "verify.html").is_file()
    assert (shown["model"], shown["dtype"], shown["steps"]) == (NAME, "float32", 1)
    assert shown["worst"] < shown["tolerance"] == 1e-10
    assert shown["control"] > 1e-3
    found = findings(shown)
    assert found["blocks", "row"]["status"] == "holds"
    assert found["blocks", "column"]["status"] == "needs keyed weights"
    assert set(found["blocks", "column"]["errors"]) == {"forward", "backward", "steps"}
    assert found["blocks.*.mlp.fc1", "column"]["status"] == "needs keyed weights"


def test_the_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--verify", NAME, "--img-size", "32", "--steps", "0"]) == 0
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == NAME
    assert lines[1] == "part law verdict forward backward 0 steps float32 why"
    assert any(line.startswith("blocks column needs keyed weights") for line in lines)
    assert any(line.startswith("blocks.*.attn.proj holds needs keyed weights") for line in lines)
    assert "tolerance: 1e-10" in text
    assert "Negative control" in text


def test_refused_parts_are_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    found = findings(printed_json(capsys, "test_resnet"))
    assert {each["status"] for each in found.values()} == {"refused"}
    assert "convolution" in found["blocks", "column"]["reason"]


def test_the_folder_of_a_text_model(capsys: pytest.CaptureFixture[str], bert: Path) -> None:
    shown = printed_json(capsys, str(bert))
    assert findings(shown)["blocks", "row"]["status"] == "holds"
    assert shown["worst"] < 1e-10


def test_a_config_alone_is_a_model_with_fresh_weights(
    capsys: pytest.CaptureFixture[str], bert: Path, tmp_path: Path
) -> None:
    """As the help says: a folder, or its config.json, of either library."""
    shown = printed_json(capsys, str(bert / "config.json"), "--steps", "0")
    assert shown["model"] == "BertModel" and findings(shown)["blocks", "row"]["status"] == "holds"
    sizes = {"depth": 1, "embed_dim": 12, "num_heads": 2, "img_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224", "model_args": sizes}))
    shown = printed_json(capsys, str(tmp_path / "config.json"), "--steps", "0")
    assert shown["model"] == "vit_tiny_patch16_224" and findings(shown)["blocks", "column"]["errors"]
    assert main(["info", "--verify", str(tmp_path), "--steps", "0"]) == 2  # the folder itself wants weights
    error = capsys.readouterr().err
    assert "safetensors" in error and len(error.splitlines()) == 1


def test_heads_of_a_grouped_model_are_tested(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two key heads: the identity is half of all keys, and was the one that seed 0 drew."""
    config = {"model_type": "llama", "architectures": ["LlamaModel"], "hidden_size": 24, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 31, "max_position_embeddings": 16}))
    for seed in range(2):
        shown = printed_json(capsys, str(tmp_path / "config.json"), "--steps", "0", "--seed", str(seed))
        assert findings(shown)["blocks, heads", "column"]["errors"]["backward"] > 0


def test_mistakes_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["no_such_model"], "neither a timm model nor a folder"),
        ([NAME, "--steps", "-1"], "steps=-1: must be at least 0 (--steps)"),
        ([NAME, "--tokens", "1"], "tokens=1: must be at least 2"),
    ):
        assert main(["info", "--verify", *words]) == 2
        shown = capsys.readouterr()
        assert said in shown.err
        assert len(shown.err.splitlines()) == 1
        assert shown.out == ""
