"""The samples of the attacker `images`: as the model takes them, or one sentence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import small_vit
from PIL import Image

from situs.backbones import create_backbone
from situs.errors import SitusError
from situs.locks.attacks.samples import read_samples
from situs.locks.folder import write_model


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("vit")
    dict(embed_dim=16, depth=2, num_heads=2)
    backbone = small_vit(8, num_classes=2)
    write_model(backbone, folder)
    return folder, backbone


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "boat", "on", "the", "sea"]
    (folder / "vocab.txt").write_text("\n".join(words))
    sizes = dict(vocab_size=10, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    config = transformers.BertConfig(**sizes, max_position_embeddings=6)
    backbone = create_backbone(transformers.BertModel(config))
    write_model(backbone, folder)
    return folder, backbone


@pytest.fixture
def pictures(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(5):
        Image.fromarray(np.full((20, 30, 3), 40 * number, dtype="uint8")).save(folder / f"{number}.png")
    return folder


def test_images_come_as_the_model_takes_them(vit: Any, pictures: Path) -> None:
    folder, backbone = vit
    samples = read_samples(folder, backbone, {"images": pictures}, 3)
    assert samples.description == "3 unlabelled images"
    batches = list(samples.batches)
    assert all(batch.shape == (3, 3, 8, 8) for batch in batches)
    assert torch.equal(torch.cat(samples.inputs), batches[0])
    assert read_samples(folder, backbone, {"images": pictures}, 9).description == "5 unlabelled images"
    again = list(read_samples(folder, backbone, {"images": pictures}, 3).batches)
    assert all(torch.equal(a, b) for a, b in zip(batches, again, strict=True))


def test_mean_and_deviation_are_the_models_own(vit: Any, pictures: Path, tmp_path: Path) -> None:
    _, backbone = vit
    own = {"mean": [0.0, 0.25, 0.5], "std": [0.5, 1.0, 2.0]}
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_cfg": own | {"crop_pct": 0.5}}))
    first = next(iter(read_samples(tmp_path, backbone, {"images": pictures}, 5).batches))
    grey = torch.arange(5) * 40 / 255
    for channel, (mean, std) in enumerate(zip(own["mean"], own["std"], strict=True)):
        expected = ((grey - mean) / std)[:, None, None].expand(-1, 8, 8)
        assert torch.allclose(first[:, channel], expected, atol=1e-3)


def test_texts_become_the_models_words(bert: Any, tmp_path: Path) -> None:
    folder, backbone = bert
    file = tmp_path / "texts.txt"
    file.write_text("A boat\n\n   \nthe sea on the sea on the sea\n")
    samples = read_samples(folder, backbone, {"texts": file}, 24)
    assert samples.description == "2 unlabelled texts"
    assert [batch.tolist() for batch in samples.batches] == [[[2, 5, 6, 3]], [[2, 8, 9, 7, 8, 3]]]  # cut at the longest
    assert read_samples(folder, backbone, {"texts": file}, 1).description == "1 unlabelled texts"


def test_of_a_long_text_the_first_words_are_taken(bert: Any, tmp_path: Path) -> None:
    from types import SimpleNamespace

    from situs.backbones.base import InputSpec

    file = tmp_path / "texts.txt"
    file.write_text("sea " * 300)
    model: Any = SimpleNamespace(input=InputSpec(), num_tokens=512, name="long")
    [ids] = read_samples(bert[0], model, {"texts": file}, 1).batches
    assert ids.shape == (1, 128)


def test_wrong_samples_are_one_sentence(vit: Any, bert: Any, pictures: Path, tmp_path: Path) -> None:
    empty, deep, text = tmp_path / "empty", tmp_path / "deep", tmp_path / "texts.txt"
    empty.mkdir()
    deep.mkdir()
    np.save(deep / "five.npy", np.zeros((5, 8, 8), dtype="uint8"))
    text.write_text("a boat\n")
    blank, binary, bare = tmp_path / "blank.txt", tmp_path / "binary", tmp_path / "bare"
    blank.write_text(" \n\n")
    binary.write_bytes(b"\xff\xfe\x00\xd8")
    bare.mkdir()
    sealed, table = tmp_path / "sealed", tmp_path / "table.csv"
    sealed.mkdir()
    (sealed / "tokenizer.json.sealed").write_bytes(b"x")
    table.write_text("sentence,label\na boat,1\n")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((bert[0] / "config.json").read_text())
    (broken / "tokenizer.json").write_text("{")
    cases: list[tuple[Path, Any, dict[str, Path], str]] = [
        (*vit, {"images": empty}, str(empty)),
        (*vit, {"images": tmp_path / "nowhere"}, "no such folder"),
        (*vit, {"images": deep}, "5 channels"),
        (*vit, {"texts": text}, "takes images, not texts"),
        (*bert, {"images": pictures}, "takes texts, not images"),
        (*bert, {"texts": tmp_path / "none.txt"}, "no such file or directory"),
        (*bert, {"texts": tmp_path}, "is a directory"),
        (*bert, {"texts": binary}, "it is not text"),
        (*bert, {"texts": blank}, "has no text"),
        (bare, bert[1], {"texts": text}, "has no tokenizer.json"),
        (sealed, bert[1], {"texts": text}, "its tokenizer.json is sealed (situs unlock opens the folder)"),
        (*bert, {"texts": table}, "is a table file; give a plain text file"),
        (broken, bert[1], {"texts": text}, "its tokeniser cannot be read"),
    ]
    for folder, backbone, given, said in cases:
        with pytest.raises(SitusError) as caught:
            list(read_samples(folder, backbone, given, 4).batches)
        assert said in str(caught.value), str(caught.value)
        assert "\n" not in str(caught.value)
