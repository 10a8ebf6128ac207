from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from builders import small_vit
from torch import Tensor, nn
from torch.func import functional_call

from situs.backbones import create_backbone
from situs.backbones.base import Backbone
from situs.config import from_dict
from situs.core.jigsaw import move_patches
from situs.core.tokens import take
from situs.core.when import When
from situs.errors import SitusError
from situs.methods import MJP, Batch, MJPConfig
from situs.methods.mjp import VARIANTS
from situs.methods.official import OfficialMJP, OfficialMJPConfig
from situs.presets import load_preset
from situs.train.optim import OptimConfig, groups
from situs.train.run import RunConfig

WIDTH = 16


def vit(name: str = "vit_tiny_patch16_224", **fields: Any) -> Backbone:
    torch.manual_seed(0)
    return small_vit((12, 16), name=name, width=WIDTH, num_classes=5, **fields)


def make(backbone: Backbone | None = None, **config: Any) -> MJP:
    backbone = vit() if backbone is None else backbone
    method = MJP(backbone, MJPConfig(**(dict(mask_ratio=0.5) | config))).double()
    for parameter in method.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.4)  # so that every patch, place and weight shows in the logits
    return method


def batch(size: tuple[int, int] = (12, 16), count: int = 4) -> Batch:
    torch.manual_seed(1)
    images = torch.randn(count, 3, *size, dtype=torch.float64)
    return Batch(images, torch.tensor([5, 900, 31, 7])[:count], {"label": torch.tensor([0, 4, 2, 2])[:count]})


# --- the whole method against timm's own forward on shuffled images -----------------------------------------------


def slow_mjp(method: MJP, data: Batch, mask: Tensor, index: Tensor, weight: float) -> Tensor:
    """MJP from the paper's text: patches cut and laid by slicing, each sample its own table, DAL place by place."""
    model = method.backbone.model
    table = model.pos_embed[0]
    first, _, second, _, third = method.dal.layers  # type: ignore[union-attr]
    losses = []
    for b, image in enumerate(data.inputs):
        shuffled = torch.zeros_like(image)
        rows, errors = [table[0]], []
        for place in range(12):
            r, c = 4 * (place // 4), 4 * (place % 4)
            source = int(index[b, place])
            fr, fc = 4 * (source // 4), 4 * (source % 4)
            shuffled[:, r : r + 4, c : c + 4] = image[:, fr : fr + 4, fc : fc + 4]
            if mask[b, place]:
                rows.append(method.unknown)
                continue
            rows.append(table[1 + place])
            hidden = torch.clamp(first.weight @ table[1 + place] + first.bias, min=0)
            hidden = torch.clamp(second.weight @ hidden + second.bias, min=0)
            guess = third.weight @ hidden + third.bias
            errors.append((guess[0] - place // 4).abs() + (guess[1] - place % 4).abs())
        logits = functional_call(model, {"pos_embed": torch.stack(rows)[None]}, shuffled[None])[0]
        log_p = logits - logits.exp().sum().log()
        smooth = [0.9 * (k == int(data.targets["label"][b])) + 0.02 for k in range(5)]  # type: ignore[index]
        losses.append(-sum(s * p for s, p in zip(smooth, log_p, strict=True)) + weight * sum(errors) / len(errors))
    return torch.stack(losses).mean()


def test_loss_and_gradients_match_an_independent_slow_mjp() -> None:
    method = make(dal_weight=0.7)
    data = batch()
    draws = method.draw(data, When(seed=3, epoch=7))
    assert draws["mask"].sum(1).tolist() == [6] * 4
    ours = method(data, draws).loss
    slow = slow_mjp(method, data, draws["mask"], draws["index"], 0.7)
    assert ours.item() == pytest.approx(slow.item(), abs=1e-6)
    parameters = dict(method.named_parameters())
    ours_grads = torch.autograd.grad(ours, list(parameters.values()))
    slow_grads = torch.autograd.grad(slow, list(parameters.values()))
    for name, a, b in zip(parameters, ours_grads, slow_grads, strict=True):
        assert torch.allclose(a, b, atol=1e-6), name
        assert a.abs().max() > 1e-9, name


@torch.no_grad()
def test_unknown_stands_at_masked_places_and_nowhere_else() -> None:
    for name in ("vit_tiny_patch16_224", "vit_small_patch16_224"):
        backbone = vit(name)
        method = make(backbone)
        mask = torch.tensor([[i in (1, 5, 6) for i in range(12)], [i == 11 for i in range(12)]])
        streams = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backbone, "embed", lambda _: torch.zeros(2, 12, WIDTH, dtype=torch.float64))
            patch.setattr(backbone, "blocks", lambda stream, _, seen=streams: seen.append(stream) or stream)
            method.encode(torch.zeros(2, 3, 1, 1), mask)
        (stream,), table = streams, backbone.model.pos_embed[0]
        for b in range(2):
            assert torch.equal(stream.z[b, 0], backbone.model.cls_token[0, 0] + table[0])  # prefix untouched
            for place in range(12):
                row = method.unknown if mask[b, place] else table[1 + place]
                assert torch.equal(stream.z[b, 1 + place], row)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("vit_tiny_patch16_224", dict(img_size=(12, 16), patch_size=4)),
        ("vit_small_patch16_rope_224", dict(img_size=(48, 64))),
        ("swin_tiny_patch4_window7_224", dict(img_size=(32, 64))),
    ],
)
@torch.no_grad()
def test_moving_tokens_is_moving_patches(name: str, fields: dict[str, Any]) -> None:
    torch.manual_seed(0)
    args = {"depths": (1, 1, 1, 1)} if "swin" in name else {"depth": 1}
    backbone = create_backbone(name, model_args=args, **fields).double().eval()
    images = torch.randn(2, 3, *fields["img_size"], dtype=torch.float64)
    index = torch.stack([torch.randperm(backbone.num_tokens), torch.randperm(backbone.num_tokens)])
    moved = backbone.embed(move_patches(images, backbone.grid, index))
    assert torch.allclose(moved, take(backbone.embed(images), index), atol=1e-12)


# --- Table 4 ------------------------------------------------------------------------------------------------------


def test_the_variants_are_the_papers_rows() -> None:
    assert list(VARIANTS) == list("ABCDEFGHIJ")
    parts = {name: (c.positions, c.shuffle, c.index != "none", c.unknown, c.dal) for name, c in VARIANTS.items()}
    assert parts["A"] == (True, "none", False, False, "none")
    assert parts["B"] == (False, "none", False, False, "none")
    assert parts["C"] == (True, "spp", False, False, "none")
    assert parts["D"] == (True, "none", False, False, "nonlinear")
    assert parts["E"] == (True, "jigsaw", False, False, "none")
    assert parts["F"] == (True, "jigsaw", True, False, "none")
    assert parts["G"] == (True, "jigsaw", False, True, "none")
    assert [parts[name] for name in "HIJ"] == [(True, "jigsaw", False, True, k) for k in ("pca", "linear", "nonlinear")]
    assert VARIANTS["J"] == MJPConfig()


@torch.no_grad()
def test_row_b_does_not_see_the_order_and_row_g_not_inside_a_told_mask() -> None:
    data, index = batch(), torch.stack([torch.randperm(12) for _ in range(4)])
    moved = move_patches(data.inputs, (3, 4), index)
    none = make(**vars(VARIANTS["B"]))
    a, b = none(data, {}).extras["logits"], none(data._replace(inputs=moved), {}).extras["logits"]
    assert torch.allclose(a, b, atol=1e-10)
    told = make(dal="none")
    draws = told.draw(data, When(seed=0, epoch=0))
    same = draws | {"index": torch.arange(12).expand(4, -1)}
    assert not torch.equal(draws["index"], same["index"])
    assert torch.allclose(told(data, draws).extras["logits"], told(data, same).extras["logits"], atol=1e-10)
    untold = make(dal="none", unknown=False)
    assert not torch.allclose(untold(data, draws).extras["logits"], untold(data, same).extras["logits"], atol=1e-4)


@torch.no_grad()
def test_spp_moves_every_patch_and_the_pixels_in_it() -> None:
    method = make(**vars(VARIANTS["C"]))
    data = batch()
    draws = method.draw(data, When(seed=0, epoch=0))
    assert draws["index"].shape == (4, 12) and draws["pixels"].shape == (4, 16)
    assert len({tuple(row) for row in draws["index"].tolist()}) == 4
    seen = torch.zeros_like(data.inputs)
    for b in range(4):
        for place in range(12):
            source = int(draws["index"][b, place])
            r, c, fr, fc = 4 * (place // 4), 4 * (place % 4), 4 * (source // 4), 4 * (source % 4)
            pixels = data.inputs[b, :, fr : fr + 4, fc : fc + 4].flatten(1)[:, draws["pixels"][b]]
            seen[b, :, r : r + 4, c : c + 4] = pixels.view(3, 4, 4)
    logits = method(data, draws).extras["logits"]
    assert torch.allclose(logits, method.backbone.model(seen), atol=1e-10)


@torch.no_grad()
def test_without_e_unk_every_place_keeps_its_vector_and_dal_counts_it() -> None:
    method = make(unknown=False, dal="linear")
    data = batch()
    draws = method.draw(data, When(seed=0, epoch=0))
    assert draws["mask"].any()
    [linear] = method.dal.layers  # type: ignore[union-attr]
    errors = []
    for place, row in enumerate(method.backbone.model.pos_embed[0, 1:]):
        guess = linear.weight @ row + linear.bias
        errors.append(float((guess[0] - place // 4).abs() + (guess[1] - place % 4).abs()))
    assert float(method(data, draws).metrics["dal"]) == pytest.approx(sum(errors) / 12, rel=1e-9)
    assert float(method.localise(draws["mask"])) == float(method.localise(None))


@torch.no_grad()
def test_a_network_without_tokens_reads_an_image_whose_blocks_are_shuffled() -> None:
    resnet = create_backbone("test_resnet", num_classes=5).eval()
    shuffled_alone: dict[str, Any] = dict(unknown=False, dal="none", index="none", pixel_grid=(3, 4))
    for more in (dict(unknown=True), dict(dal="linear"), dict(index="place")):
        with pytest.raises(SitusError, match=r"^test_resnet has no positions to hide or to predict: choose unknown="):
            MJP(resnet, MJPConfig(**shuffled_alone | more))
    data = batch((48, 64))._replace(inputs=torch.randn(4, 3, 48, 64))
    puzzle = MJP(resnet, MJPConfig(**shuffled_alone, mask_ratio=0.5))
    draws = puzzle.draw(data, When(seed=0, epoch=0))
    assert draws["index"].shape == (4, 12)
    shuffled = move_patches(data.inputs, (3, 4), draws["index"])
    assert torch.equal(puzzle(data, draws).extras["logits"], resnet.model(shuffled))
    plain = MJP(resnet, MJPConfig(**shuffled_alone, shuffle="none"))
    assert torch.equal(plain(data, plain.draw(data, When())).extras["logits"], resnet.model(data.inputs))


@pytest.mark.parametrize("kind", ["place", "origin"])
@torch.no_grad()
def test_a_number_goes_with_the_place_or_with_the_patch(kind: str) -> None:
    """As if the convolution had added it to the shuffled tokens, or to those before the shuffle."""
    method, plain = (make(index=index, unknown=False, dal="none") for index in (kind, "none"))
    plain.backbone.load_state_dict(method.backbone.state_dict())
    data = batch()
    draws = method.draw(data, When(seed=0, epoch=0))
    index = draws["index"]
    embed = plain.backbone.embed
    with pytest.MonkeyPatch.context() as patch:
        rows = method.index_table if kind == "origin" else torch.empty_like(take(method.index_table[None], index))
        if kind == "place":  # the number of the place to which each patch will go
            rows.scatter_(1, index[..., None].expand_as(rows), method.index_table.expand_as(rows))
        patch.setattr(plain.backbone, "embed", lambda x: embed(x) + rows)
        expected = plain(data, draws).extras["logits"]
    assert torch.allclose(method(data, draws).extras["logits"], expected, atol=1e-10)
    assert not torch.allclose(plain(data, draws).extras["logits"], expected, atol=1e-3)


def test_without_dal_no_loss_is_of_the_table_alone() -> None:
    hidden = torch.arange(12).expand(1, -1) < 5
    assert make(dal="none").table_loss(hidden, When()) is None
    method = make(dal_weight=0.3)
    loss = method.table_loss(hidden, When())
    assert loss is not None
    assert float(loss) == pytest.approx(0.3 * float(method.localise(hidden)))


# --- draws and schedules ------------------------------------------------------------------------------------------


def test_the_mask_and_the_order_know_nothing_of_each_other() -> None:
    ids, error = torch.arange(8000), 1 / math.sqrt(8000)
    whole = make(mask_ratio=0.3).draw(Batch(ids, ids), When(seed=0, epoch=0))
    mask = whole["mask"]
    assert mask.sum(1).tolist() == [3] * 8000
    places = mask.nonzero()[:, 1].view(8000, 3)
    ranks = (whole["index"].gather(1, places)[:, :, None] > places[:, None]).sum(-1)
    both = torch.corrcoef(torch.cat([mask, ranks], dim=1).T.double())[:12, 12:]
    assert float(both.abs().max()) < 5 * error


def official(**fields: Any) -> MJP:
    """On 14x14 patches, without values: draws need none."""
    with torch.device("meta"):
        backbone = create_backbone("vit_tiny_patch16_224", num_classes=5, model_args={"depth": 1})
        return OfficialMJP(backbone, OfficialMJPConfig(mask_ratio=0.15, **fields))


def test_official_draws_one_puzzle_a_batch_on_half_of_them_after_the_warmup() -> None:
    method = official()
    ids = torch.arange(8)
    assert not method.draw(Batch(ids, ids), When(seed=0, epoch=19))["mask"].any()
    fired = 0
    for first in range(60):
        draws = method.draw(Batch(ids, ids + 8 * first), When(seed=0, epoch=20))
        assert (draws["mask"] == draws["mask"][0]).all() and (draws["index"] == draws["index"][0]).all()
        fires = bool(draws["mask"].any())
        fired += fires
        if not fires:
            assert torch.equal(draws["index"][0], torch.arange(196))
        assert int(draws["mask"][0].sum()) <= 29
    assert 20 <= fired <= 40


def test_official_weight_rises_and_then_falls_to_half() -> None:
    method = official()
    weights = {
        e: float(method.draw(Batch(torch.zeros(1), torch.arange(1)), When(epoch=e, epochs=300))["dal_weight"])
        for e in (0, 10, 19, 20, 100, 299)
    }
    assert weights[0] == 0 and weights[19] == pytest.approx(0.01) and weights[10] == pytest.approx(0.01 * 10 / 19)
    for epoch in (20, 100, 299):
        slow = 0.005 + 0.5 * 0.005 * (1 + math.cos(math.pi * (epoch - 20) / 280))
        assert weights[epoch] == pytest.approx(slow, rel=1e-6)
    assert method.dal_weight(When(epoch=30)) == 0.01  # outside of a run, where its length is not known
    paper = make()
    constant = [
        float(paper.draw(Batch(torch.zeros(1), torch.arange(1)), When(epoch=e))["dal_weight"]) for e in (0, 7, 1000)
    ]
    assert constant == pytest.approx([0.01] * 3)


def test_official_starts_from_wide_tables() -> None:
    method = OfficialMJP(vit())
    table = method.backbone.positions().table
    assert (
        table is not None
        and 0.8 < float(table.detach().std()) < 1.2
        and 0.5 < float(method.unknown.detach().std()) < 1.6
    )
    assert 0.5 < float(method.backbone.model.pos_embed.detach()[0, 0].std()) < 1.6  # CLS's own row
    assert float(method.backbone.model.cls_token.detach().std()) < 0.1  # and nothing that is no place
    paper = MJP(vit())
    assert torch.equal(paper.backbone.model.pos_embed, vit().model.pos_embed)
    before = vit().positions().table
    after = paper.backbone.positions().table
    assert before is not None and after is not None and torch.equal(before, after)
    assert float(paper.unknown.detach().std()) < 0.04
    assert paper.no_decay() == {"unknown"} and paper.decayed() == set()
    assert method.decayed() == {"unknown", "backbone.model.pos_embed"}
    decayed = {name for group in groups(method, OptimConfig()) if group["weight_decay"] for name in group["names"]}
    assert method.decayed() <= decayed and "backbone.model.cls_token" not in decayed
    assert not {name for group in groups(paper, OptimConfig()) if group["weight_decay"] for name in group["names"]} & (
        method.decayed()
    )


@pytest.mark.slow
def test_firing_or_not_is_one_graph() -> None:
    method = OfficialMJP(vit(), OfficialMJPConfig(mask_ratio=0.8, start_epoch=0)).eval()
    data = batch()
    data = data._replace(inputs=data.inputs.float())
    torch.compiler.reset()  # what other tests compiled would make shapes dynamic, which takes longer
    compiled = torch.compile(method, fullgraph=True, backend="eager")
    fired = set()
    for first in range(9):
        draws = method.draw(data._replace(ids=data.ids + first), When(seed=0, epoch=0))
        fired.add(bool(draws["mask"].any()))
        with torch.compiler.set_stance("fail_on_recompile" if first else "default"):
            assert compiled(data, draws).loss.item() == pytest.approx(method(data, draws).loss.item(), abs=1e-5)
    assert fired == {True, False}


# --- other backbones ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vit_small_patch16_rope_224", "rotations of queries and keys"),
        ("vit_relpos_small_patch16_224", "biases between pairs"),
        ("swin_tiny_patch4_window7_224", "no position table"),
    ],
)
def test_dal_needs_a_table(name: str, reason: str) -> None:
    args = {"depths": (1, 1, 1, 1), "embed_dim": 24} if "swin" in name else {"depth": 1}
    backbone = create_backbone(name, img_size=64, num_classes=5, model_args=args)
    with pytest.raises(SitusError, match=f"{name} does not support the loss DAL: .*{reason}"):
        MJP(backbone, MJPConfig())
    method = MJP(backbone, MJPConfig(dal="none", mask_ratio=0.5)).double().eval()
    data = batch((64, 64))
    draws = method.draw(data, When(seed=0, epoch=0))
    method(data, draws).loss.backward()
    assert method.unknown.grad is not None and method.unknown.grad.abs().max() > 0


def test_presets_are_the_methods() -> None:
    for name, config in (("imagenet-mjp", MJPConfig()), ("imagenet-mjp-official", OfficialMJPConfig())):
        run = from_dict(RunConfig, load_preset(name), name)
        assert run.method == config
        assert (run.backbone.drop_path == 0) == isinstance(config, OfficialMJPConfig)


def test_mistakes_are_sentences() -> None:
    with pytest.raises(SitusError, match=r"mask_ratio=1.2: must be in \[0, 1\]$"):
        MJPConfig(mask_ratio=1.2)
    for kind in (MJPConfig, OfficialMJPConfig):
        with pytest.raises(SitusError, match="unknown=True: must be off if positions are"):
            kind(positions=False, dal="none")
    with pytest.raises(SitusError, match="dal='linear': must be 'none' without positions"):
        MJPConfig(positions=False, unknown=False, dal="linear")
    with pytest.raises(SitusError, match="its position table is fixed"):
        make(vit(positions="sincos"))
    with pytest.raises(SitusError, match="needs labels"):
        make()(batch()._replace(targets={}), {})
    with pytest.raises(SitusError, match=r"must be 'jigsaw' or 'none' \('spp' exists only in the method mjp\)"):
        OfficialMJPConfig(shuffle="spp", unknown=False)


def test_a_line_of_frames_is_masked_exactly_by_the_papers_rule_and_refused_by_the_published_one() -> None:
    """No block is smaller than a line both ways: the published rule would train without a puzzle and say nothing."""
    fields: dict[str, Any] = dict(width=WIDTH, num_classes=5, patch_size=(1, 5), in_chans=1)
    mask = make(small_vit((98, 5), **fields)).draw(Batch(torch.zeros(6), torch.arange(6)), When(seed=0, epoch=0))[
        "mask"
    ]
    assert mask.sum(dim=1).tolist() == [49] * 6 and len({tuple(row) for row in mask.tolist()}) == 6
    with pytest.raises(SitusError, match=r"only one row or column \(98 positions\)"):
        OfficialMJP(small_vit((98, 5), **fields))
