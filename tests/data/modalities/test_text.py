"""Batches of sentences: every one once an epoch, like lengths together, the same from any step and on any ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sentences import lines, write_pairs, write_plain, write_set
from tiny_texts import WORDS, write_folder

from situs.data.augment.recipes import AugmentConfig
from situs.data.batch import Batch
from situs.data.config import DataConfig
from situs.data.loader import make_loader, resolve
from situs.data.text import TextConfig
from situs.data.tokeniser import Tokeniser
from situs.errors import SitusError

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    base = tmp_path_factory.mktemp("texts")
    text = TextConfig(tokeniser=str(write_folder(base / "bert", "bert", width=8, num_attention_heads=2)), longest=16)
    return resolve(DataConfig(str(write_set(base / "set", train=100)), text=text, batch=8, seed=5))


def same(a: Batch, b: Batch) -> bool:
    assert a.mask is not None and b.mask is not None
    pairs = ((a.inputs, b.inputs), (a.ids, b.ids), (a.mask, b.mask), (a.targets["label"], b.targets["label"]))
    return all(torch.equal(x, y) for x, y in pairs)


def test_a_batch_is_padded_to_its_own_longest_and_masked(config: DataConfig) -> None:
    assert config.kind == "text" and config.size == (1, 16)
    loader = make_loader(config, None)
    rows = lines(20, 2)
    seen, widths = 0, set()
    for batch in loader:
        assert batch.mask is not None and batch.inputs.dtype == torch.int64
        for ids, mask, label in zip(batch.inputs, batch.mask, batch.targets["label"], strict=True):
            text, wanted = rows[seen]
            assert ids[mask].tolist() == [2, *(WORDS.index(word) for word in text.split()), 3]
            assert not ids[~mask].any() and mask.sum() == mask.int().argmin() % len(mask) + len(mask) * bool(mask.all())
            assert int(label) == wanted
            seen += 1
        widths.add(batch.inputs.shape[1])
    assert seen == 20 and widths <= {8, 16}


def test_what_fills_a_pair_up_stands_in_the_first_sentence(
    config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokeniser, "_special", lambda *_: 9)  # more than BERT has kinds of sentences
    text = replace(config.text, column="a", pair="b")
    loader = make_loader(replace(config, path=str(write_pairs(tmp_path)), text=text), None)
    assert loader.pipeline.row_bytes == 2 * 16 * 8
    rows = zip(lines(20, 2), lines(20, 12), strict=True)
    for batch in loader:
        assert batch.mask is not None and batch.inputs.shape[1] == 2 and not batch.mask.all()
        for (ids, types), mask in zip(batch.inputs, batch.mask, strict=True):
            (first, _), (second, _) = next(rows)
            assert bool((ids[~mask] == 9).all()) and not types[~mask].any()
            if mask.sum() < 16:  # whole
                lengths = [len(each.split()) for each in (first, second)]
                assert types[mask].tolist() == [0] * (lengths[0] + 2) + [1] * (lengths[1] + 1)
    assert next(rows, None) is None


def test_an_epoch_has_every_sentence_once_and_another_order_each_time(config: DataConfig) -> None:
    loader = make_loader(replace(config, batch=4), AugmentConfig())
    epochs = [list(loader.iterate(epoch)) for epoch in (0, 1)]
    orders = [torch.cat([batch.ids for batch in batches]) for batches in epochs]
    assert all(torch.equal(order.sort().values, torch.arange(100)) for order in orders)
    assert not torch.equal(*orders)
    spread = [batch.mask.sum(1).max() - batch.mask.sum(1).min() for batch in epochs[0] if batch.mask is not None]
    assert torch.stack(spread).float().mean() < 2  # words, where they vary by 11


def test_words_are_their_own_targets(config: DataConfig, tmp_path: Path) -> None:
    told = replace(config, path=str(write_plain(tmp_path, 50)), target="words", text=replace(config.text, longest=12))
    batches = list(make_loader(replace(told, batch=3), None))
    assert [batch.inputs.shape for batch in batches] == [(3, 12), (2, 12)]
    last = batches[-1]
    assert last.mask is not None and last.mask.sum(1).tolist() == [12, 2] and "label" not in last.targets
    assert torch.equal(last.targets["words"], torch.where(last.mask, last.inputs, -1))


def test_what_is_for_images_is_refused(config: DataConfig) -> None:
    with pytest.raises(SitusError, match="repeated=2: does not apply to sentences"):
        make_loader(config, AugmentConfig(repeated=2))
    for fields, said in (
        ({"multi_label": True}, "multi_label=True: does not apply to sentences"),
        ({"target": "mask"}, "class or words"),
    ):
        with pytest.raises(SitusError, match=said):
            replace(config, **fields)
    with pytest.raises(SitusError, match="target='words': must be class or mask or objects"):
        DataConfig("x", kind="image", target="words")
