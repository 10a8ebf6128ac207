"""Position as a teacher in sentences: padding changes nothing, [CLS] is never asked, and losses are what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_vit
from sentences import write_plain, write_set
from tiny_texts import write_folder

from situs.backbones import create_backbone
from situs.backbones.base import Backbone
from situs.core.masking import SPAN_ROUNDS, span_mask
from situs.core.random import uniform
from situs.core.when import When
from situs.data.batch import Batch
from situs.errors import SitusError
from situs.methods import MJP, MP3, DropPos, DropPosConfig, MJPConfig, MP3Config, Offsets, OffsetsConfig
from situs.methods.base import Method
from situs.methods.measured import SolvesPuzzles

pytest.importorskip("transformers")
LENGTHS = (6, 14, 9, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("order") / "bert", "bert", width=16, num_attention_heads=2)


@pytest.fixture(scope="module")
def bert(folder: Path) -> Backbone:
    return create_backbone(folder, num_classes=2).double().eval()


def sentences(lengths: tuple[int, ...] = LENGTHS, width: int = 16) -> Batch:
    """[CLS], words and [SEP], filled up to a width."""
    ids = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        words = torch.randint(5, 60, (length - 2,), generator=torch.Generator().manual_seed(length))
        ids[row, :length] = torch.cat([torch.tensor([2]), words, torch.tensor([3])])
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    return Batch(ids, torch.tensor(lengths), {"label": torch.arange(len(lengths)) % 2}, mask)


METHODS: dict[str, Any] = {
    "mp3": lambda b: MP3(b, MP3Config(mask_ratio=0.5)),
    "hints": lambda b: MP3(b, MP3Config(mask_ratio=0.25, anchor_ratio=0.3)),
    "window": lambda b: Offsets(b, OffsetsConfig(mask_ratio=0.25, window=3)),
    "droppos": lambda b: DropPos(b, droppos("full")),
    "visible": lambda b: DropPos(b, droppos("visible")),
    "mjp": lambda b: MJP(b, MJPConfig(mask_ratio=0.5)),
    "mjp-pca": lambda b: MJP(b, MJPConfig(mask_ratio=0.5, dal="pca")),
}


def droppos(affinity: Any) -> DropPosConfig:
    size = {"decoder_width": 16, "decoder_heads": 2, "decoder_depth": 1}
    return DropPosConfig(mask_ratio=0.25, position_mask_ratio=0.6, affinity=affinity, **size)


def made(name: str, bert: Backbone) -> Method:
    torch.manual_seed(1)
    return METHODS[name](bert).double().eval()


@pytest.mark.parametrize("name", METHODS)
def test_padding_changes_no_sentence(name: str, bert: Backbone) -> None:
    method, losses = made(name, bert), []
    together = method(sentences(), method.draw(sentences(), When(seed=3, epoch=1)))
    for row, length in enumerate(LENGTHS):
        alone = sentences((length,), width=length)
        alone = alone._replace(targets={"label": torch.tensor([row % 2])})
        found = method(alone, method.draw(alone, When(seed=3, epoch=1)))
        count = found.extras["logits"].shape[1]
        mine = together.extras["logits"][row] if name[:3] == "mjp" else together.extras["logits"][row, :count]
        assert torch.allclose(mine, found.extras["logits"][0], atol=1e-10, rtol=0)
        losses.append(float(found.loss.detach()))
    if name in ("droppos", "visible", "mjp", "mjp-pca"):  # each sentence counts alike
        spread = sum(losses) / len(losses)
        assert float(together.loss.detach()) == pytest.approx(spread, rel=1e-5)


def test_a_pair_is_a_sentence_that_tells_its_halves_apart(bert: Backbone) -> None:
    method, one = made("mjp", bert), sentences((9, 9), 9)._replace(mask=None)
    types = torch.zeros_like(one.inputs)
    first, second = (torch.stack([one.inputs, kind], 1) for kind in (types, (types + (torch.arange(9) > 4))))
    found = [method(each, method.draw(each, When(seed=3, epoch=1))) for each in (one, one._replace(inputs=first))]
    assert torch.equal(found[0].loss, found[1].loss)
    other = one._replace(inputs=second)
    assert not torch.isclose(found[0].loss, method(other, method.draw(other, When(seed=3, epoch=1))).loss, rtol=1e-6)


@pytest.mark.parametrize("name", ["mp3", "hints", "window", "droppos", "visible"])
def test_a_batch_of_cls_alone_asks_nothing(name: str, bert: Backbone) -> None:
    method = made(name, bert)
    batch = Batch(torch.tensor([[2], [2]]), torch.arange(2), {}, torch.ones(2, 1, dtype=torch.bool))
    found = method(batch, method.draw(batch, When(seed=3, epoch=1)))
    assert float(found.loss.detach()) == 0 and float(found.metrics["position_accuracy"]) == 0


def test_one_word_alone_is_not_far_from_itself(bert: Backbone) -> None:
    """A sentence of [CLS] and one more token has no second token to be apart from, and adds nothing."""
    method = made("window", bert)
    with torch.no_grad():
        method.position_head.bias[3] = 50.0  # pyright: ignore[reportAttributeAccessIssue,reportIndexIssue]
    batch = sentences((2, 6), 16)
    found = method(batch, method.draw(batch, When(seed=3, epoch=1)))
    assert float(found.metrics["position_accuracy"]) == 0  # two places are never the same


def test_puzzles_are_not_solved_over_padding(bert: Backbone) -> None:
    for name in ("mp3", "droppos"):
        with pytest.raises(SitusError, match="sentences, for example"):
            made(name, bert).solve(sentences(), seed=0)


@pytest.mark.parametrize(("name", "hints"), [("mp3", 0.0), ("hints", 0.3), ("droppos", 0.0)])
def test_chance_knows_the_hints_and_is_not_known_of_sentences(name: str, hints: float, bert: Backbone) -> None:
    """Of 16 patches, those without a hint are guessed right once in 16 times; sentences differ in length."""
    assert made(name, bert).chance == {}
    method = METHODS[name](small_vit())
    assert method.chance == {"position_accuracy": pytest.approx(hints + (1 - hints) / 16)}


def test_how_far_apart_two_words_are(bert: Backbone) -> None:
    method, batch = made("window", bert), sentences()
    draws = method.draw(batch, When(seed=0, epoch=0))
    found = method(batch, draws)
    assert found.extras["logits"].shape[-1] == 7
    losses = []
    for row, length in enumerate(LENGTHS):
        order = draws["order"][row].tolist()
        for slot in range(1, length):
            other = order[slot + 1] if slot + 1 < length else order[1]
            truth = max(-3, min(3, order[slot] - other)) + 3
            assert found.extras["places"][row, slot] == truth
            losses.append(
                float(torch.nn.functional.cross_entropy(found.extras["logits"][row, slot], torch.tensor(truth)))
            )
    assert float(found.loss.detach()) == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert not isinstance(method, SolvesPuzzles)


def test_span_masks_are_exact_and_mostly_whole() -> None:
    lengths = torch.tensor([1, 2, 9, 40, 64])
    real = torch.arange(64) < lengths[:, None]
    runs, total = 0, 0
    for seed in range(40):
        noise = uniform(seed, 0, lengths, "x", (2 * SPAN_ROUNDS + 64,))
        mask = span_mask(noise, real, 0.3, num_special_tokens=1)
        assert mask.sum(1).tolist() == [int(0.3 * (n - 1)) for n in lengths.tolist()]
        assert not (mask & ~real).any() and not mask[:, 0].any()
        narrow = span_mask(noise[:3, : 2 * SPAN_ROUNDS + 9], real[:3, :9], 0.3, num_special_tokens=1)
        assert torch.equal(narrow, mask[:3, :9])  # the width of the batch decides nothing
        long = mask[4].int()
        runs, total = runs + int((long.diff(prepend=long[:1]) == 1).sum()) + int(long[0]), total + int(long.sum())
    assert total / runs > 3


def test_who_cannot_learn_from_order(tmp_path: Path) -> None:
    gpt2 = create_backbone(write_folder(tmp_path / "gpt2", "gpt2", width=16), num_classes=2)
    for kind, config in ((MJP, MJPConfig()), (MP3, MP3Config()), (DropPos, DropPosConfig())):
        with pytest.raises(SitusError, match="causal"):
            kind(gpt2, config)  # pyright: ignore[reportArgumentType]
    bert = create_backbone(write_folder(tmp_path / "bert", "bert", width=16), num_classes=2)
    with pytest.raises(SitusError, match="has no patches of a fixed size"):
        MJP(bert, MJPConfig(shuffle="spp", unknown=False))


@pytest.mark.thin(2)
@pytest.mark.parametrize("method", [{"name": "mp3", "mask_ratio": 0.5}, {"name": "droppos", "mask_ratio": 0.0}])
def test_pretraining_on_tables_and_plain_text_and_tuning_behind_it(folder: Path, tmp_path: Path, method: Any) -> None:
    import situs
    from situs.train.run import load_run

    data = write_set(tmp_path / "set", train=20)
    write_plain(data, 100)
    size = {"decoder_width": 16, "decoder_heads": 2} if method["name"] == "droppos" else {}
    told = {"method": {**method, **size}, "quiet": True, "device": "cpu", "batch": 4, "steps": 3}
    pretrained = situs.pretrain(data, backbone=str(folder), out=tmp_path / "run", **told)
    text = load_run(pretrained).config.data.text
    assert text.unlabelled and text.longest == 16
    log = (pretrained / "metrics.jsonl").read_text()
    assert "position_accuracy" in log
    tuned = situs.finetune(
        pretrained, data=data, out=tmp_path / "tuned", batch=4, steps=2, quiet=True, device="cpu", validate_every=0
    )
    loaded = load_run(tuned)
    assert not loaded.config.data.text.unlabelled and loaded.classes is not None
    with pytest.raises(SitusError, match="mae learns from images and clips"):
        situs.pretrain(data, backbone=str(folder), out=tmp_path / "x", **{**told, "method": "mae"})


def test_long_lines_become_several_samples(folder: Path, tmp_path: Path) -> None:
    from situs.data.modalities.text import TextSource
    from situs.data.open import open_source
    from situs.data.text import TextConfig

    (tmp_path / "a.txt").write_text(" ".join(f"w{n % 50}" for n in range(40)) + "\n\nw1 w2\n")
    told = TextConfig(tokeniser=str(folder), longest=16, unlabelled=True)
    source = open_source(tmp_path / "a.txt", kind="text", text=told)
    assert isinstance(source, TextSource) and source.classes is None
    assert [source.length(row) for row in range(len(source))] == [16, 16, 14, 4]
    words = [int(word) for row in range(3) for word in source.read(row)["ids"][1:-1]]
    assert words == [5 + n % 50 for n in range(40)] and not source.notes
