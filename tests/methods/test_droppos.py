from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import small_swin, small_vit
from torch import Tensor, nn

from situs.backbones import create_backbone
from situs.backbones.base import Features
from situs.config import from_dict
from situs.core.position import cut_targets
from situs.core.when import When
from situs.errors import SitusError
from situs.methods import Batch, DropPos, DropPosConfig
from situs.methods.droppos import cls_likeness
from situs.methods.official import OfficialDropPos, OfficialDropPosConfig
from situs.presets import load_preset
from situs.train.run import RunConfig

WIDTH = 16


FRAMES = dict(size=(9, 5), patch_size=(1, 5), in_chans=1)
"""Nine frames of five coefficients: a line of tokens."""


def make(
    positions: str = "sincos", size: tuple[int, int] = (12, 16), patch_size: Any = 4, in_chans: int = 3, **config: Any
) -> DropPos:
    torch.manual_seed(0)
    backbone = small_vit(size, width=WIDTH, positions=positions, patch_size=patch_size, in_chans=in_chans)
    fields: dict[str, Any] = dict(mask_ratio=0.34, position_mask_ratio=0.6, decoder_width=8, decoder_heads=2)
    method = DropPos(backbone, DropPosConfig(**(fields | config))).double()
    for parameter in method.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)  # so that every patch, place and weight shows in the logits
    return method


def batch(method: DropPos) -> Batch:
    torch.manual_seed(1)
    size = method.backbone.input.shape
    assert size is not None
    return Batch(torch.randn(3, method.backbone.input.channels, *size, dtype=torch.float64), torch.tensor([5, 900, 31]))


# --- the slow reference: lists of vectors, one token and one head at a time ------------------------------------


def slow_attention(qkv: nn.Linear, proj: nn.Linear, z: list[Tensor], heads: int) -> list[Tensor]:
    width = len(z[0])
    whole = [qkv.weight @ token + qkv.bias for token in z]
    side = width // heads
    out = []
    for i in range(len(z)):
        parts = []
        for h in range(heads):
            first, last = h * side, (h + 1) * side
            q = whole[i][first:last]
            keys = [w[width + first : width + last] for w in whole]
            values = [w[2 * width + first : 2 * width + last] for w in whole]
            scores = torch.stack([(q * k).sum() / math.sqrt(side) for k in keys])
            share = scores.exp() / scores.exp().sum()
            parts.append(sum(a * v for a, v in zip(share, values, strict=True)))
        out.append(proj.weight @ torch.cat(parts) + proj.bias)
    return out


def slow_encoder(vit: Any, z: list[Tensor]) -> list[Tensor]:
    for block in vit.blocks:
        mixed = slow_attention(block.attn.qkv, block.attn.proj, [block.norm1(token) for token in z], 2)
        z = [token + out for token, out in zip(z, mixed, strict=True)]
        z = [token + block.mlp(block.norm2(token)) for token in z]
    return [vit.norm(token) for token in z]


def slow_sincos(row: int, column: int, line: bool) -> Tensor:
    values, half = [], WIDTH // 2 if line else WIDTH // 4
    for place in (row,) if line else (column, row):
        angles = [place / 10000 ** (i / half) for i in range(half)]
        values += [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    return torch.tensor(values, dtype=torch.float64)


def slow_target(places: int, columns: int, true: int, sigma: float, squared: bool) -> list[float]:
    line = []
    for j in range(places):
        d2 = (true // columns - j // columns) ** 2 + (true % columns - j % columns) ** 2
        if sigma == 0:
            line.append(float(j == true))
        else:
            line.append(math.exp(-(d2 if squared else math.sqrt(d2)) / sigma**2))
    return [w / sum(line) for w in line]


def slow_cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.detach(), b.detach()
    return float((a * b).sum() / (a.square().sum().sqrt() * b.square().sum().sqrt()))


def slow_droppos(
    method: DropPos, images: Tensor, visible: list[list[int]], sigma: float, affinity: str | None
) -> Tensor:
    """DropPos from the paper's text (Eq. 3, 6, 8, 9) on the 3x4 patches of an image, or on frames."""
    vit, (high, wide) = method.backbone.model, method.backbone.model.patch_embed.patch_size
    rows, columns = images.shape[2] // high, images.shape[3] // wide
    count = rows * columns
    means, above, below = [], [], []
    for image, seen in zip(images, visible, strict=True):
        corners = [(high * r, wide * c) for r in range(rows) for c in range(columns)]
        patches = [image[:, y : y + high, x : x + wide] for y, x in corners]
        weight, bias = vit.patch_embed.proj.weight, vit.patch_embed.proj.bias
        x = [(weight * patch).sum(dim=(1, 2, 3)) + bias for patch in patches]
        table = [slow_sincos(i // columns, i % columns, columns == 1) for i in range(count)]
        cls = vit.cls_token[0, 0] + vit.pos_embed[0, 0]
        dropped = seen[method.anchors :]
        z = [cls] + [x[i] + (method.mask_token if i in dropped else table[i]) for i in seen]
        z = slow_encoder(vit, z)
        d = [method.decoder.enter(token) for token in z]
        for layer in method.decoder.layers:
            mixed = slow_attention(layer.qkv, layer.proj, [layer.norm1(token) for token in d], 2)
            d = [token + out for token, out in zip(d, mixed, strict=True)]
            d = [token + layer.mlp(layer.norm2(token)) for token in d]
        shares = dict.fromkeys(seen, 1.0)
        if affinity is not None:
            f = slow_encoder(vit, [cls] + [x[i] + table[i] for i in range(count)]) if affinity == "full" else z
            known = list(range(count)) if affinity == "full" else seen
            raw = {i: math.exp(slow_cosine(f[0], f[1 + k]) / method.config.tau) for k, i in enumerate(known)}
            full = {i: value / sum(raw.values()) for i, value in raw.items()}
            shares = {i: full[i] / sum(full[j] for j in seen) for i in seen}
        for place in dropped:
            logits = method.decoder.leave(method.decoder.norm(d[1 + seen.index(place)]))
            log_p = [logits[j] - logits.exp().sum().log() for j in range(count)]
            target = slow_target(count, columns, place, sigma, False)
            above.append(shares[place] * -sum(w * p for w, p in zip(target, log_p, strict=True)))
            below.append(shares[place])
        if method.per_sample:
            means.append(torch.stack(above).sum() / sum(below))
            above, below = [], []
    return torch.stack(means).mean() if means else torch.stack(above).sum() / sum(below)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("affinity", "progress", "alike", "shape"),
    [
        ("full", 0.0, True, {}),
        ("full", 0.2, False, FRAMES),
        ("visible", 0.5, True, {}),
        (None, 1.0, False, FRAMES),
        (None, 0.3, True, {}),
    ],
)
def test_loss_and_gradients_match_an_independent_slow_droppos(affinity, progress, alike, shape, monkeypatch) -> None:
    monkeypatch.setattr(DropPos, "per_sample", alike)
    method = make(affinity=affinity, sigma_start=1.2, **shape)
    data = batch(method)
    draws = method.draw(data, When(seed=3, epoch=7, progress=progress))
    assert float(draws["sigma"]) == pytest.approx(1.2 * (1 - progress))
    ours = method(data, draws).loss
    slow = slow_droppos(method, data.inputs, draws["visible"].tolist(), 1.2 * (1 - progress), affinity)
    assert ours.item() == pytest.approx(slow.item(), abs=1e-6)  # the loss itself is taken in float32
    parameters = {n: p for n, p in method.named_parameters() if p.requires_grad and "model.head" not in n}
    ours_grads = torch.autograd.grad(ours, list(parameters.values()))
    slow_grads = torch.autograd.grad(slow, list(parameters.values()))
    for name, a, b in zip(parameters, ours_grads, slow_grads, strict=True):
        assert torch.allclose(a, b, atol=1e-6), name
        assert a.abs().max() > 1e-9, name


# --- counts and draws -------------------------------------------------------------------------------------------


def at_224(kind: type[DropPos]) -> DropPos:
    with torch.device("meta"):
        return kind(create_backbone("vit_tiny_patch16_224", positions="sincos", model_args={"depth": 1}))


def test_counts_are_the_papers() -> None:
    paper, official = at_224(DropPos), at_224(OfficialDropPos)
    assert (paper.visible, paper.anchors) == (49, 13)
    assert (official.visible, official.anchors) == (49, 12)
    draws = paper.draw(Batch(torch.zeros(64), torch.arange(64)), When(seed=0, epoch=0))
    assert draws["visible"].shape == (64, 49)
    assert (paper.at(0.25, 0.95).visible, paper.at(0.25, 0.95).anchors) == (147, 147 - 139)
    assert paper.at(0.0, 1.0).anchors == 0
    assert (paper.visible, paper.anchors) == (49, 13)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_rope_224", "eva02_tiny_patch14_224"])
@torch.no_grad()
def test_a_view_at_other_ratios_shares_the_weights(name: str) -> None:
    side = 14 if "14" in name else 16
    backbone = create_backbone(name, img_size=(3 * side, 4 * side), model_args={"depth": 1})
    config = DropPosConfig(decoder_width=8, decoder_heads=2)
    method = DropPos(backbone, config).eval()
    state = torch.get_rng_state()
    view = method.at(0.0, 0.5)
    assert torch.equal(torch.get_rng_state(), state)
    assert view.decoder is method.decoder and view.mask_token is method.mask_token and not view.training
    fresh = DropPos(backbone, replace(config, mask_ratio=0.0, position_mask_ratio=0.5)).eval()
    fresh.decoder, fresh.mask_token = method.decoder, method.mask_token
    data = Batch(torch.randn(2, 3, 3 * side, 4 * side), torch.arange(2))
    draws = view.draw(data, When(seed=0, epoch=0))
    assert torch.equal(view(data, draws).extras["logits"], fresh(data, draws).extras["logits"])
    assert (method.visible, view.visible, view.anchors) == (3, 12, 6)


def test_sigma_falls_by_step_or_by_epoch() -> None:
    paper = make(sigma_start=2.0, sigma_end=0.5)
    assert [paper.sigma(When(epoch=3, progress=p, epochs=10)) for p in (0.0, 0.4, 1.0)] == [2.0, 1.4, 0.5]
    official = at_224(OfficialDropPos)
    whens = [When(epoch=4, progress=p, epochs=10) for p in (0.4, 0.45, 0.499)]
    assert [official.sigma(when) for when in whens] == pytest.approx([0.6] * 3)
    assert official.sigma(When(epoch=4, progress=0.25)) == 0.75  # outside of a run


# --- what is told, and what bears loss ----------------------------------------------------------------------------


def change(images: Tensor, sample: int, place: int) -> Tensor:
    images = images.clone()
    patch = images[sample, :, 4 * (place // 4) : 4 * (place // 4) + 4, 4 * (place % 4) : 4 * (place % 4) + 4]
    patch += 3.0 * torch.randn(patch.shape, dtype=patch.dtype, generator=torch.Generator().manual_seed(9))
    return images


@torch.no_grad()
def test_hidden_patches_are_seen_by_nobody() -> None:
    method = make(affinity="visible")
    data = batch(method)
    draws = method.draw(data, When(seed=0, epoch=0))
    before = method(data, draws)
    hidden = next(i for i in range(12) if i not in draws["visible"][0])
    after = method(data._replace(inputs=change(data.inputs, 0, hidden)), draws)
    assert torch.equal(after.extras["logits"], before.extras["logits"]) and torch.equal(after.loss, before.loss)
    seen = int(draws["visible"][0, -1])
    moved = method(data._replace(inputs=change(data.inputs, 0, seen)), draws)
    assert not torch.allclose(moved.extras["logits"][0], before.extras["logits"][0], atol=1e-4)
    # With the full affinity, hidden patches choose the weights, and nothing else.
    full = make(affinity="full")
    changed = full(data._replace(inputs=change(data.inputs, 0, hidden)), draws)
    assert torch.equal(changed.extras["logits"], before.extras["logits"])
    assert abs(changed.loss.item() - full(data, draws).loss.item()) > 1e-7


@torch.no_grad()
def test_only_anchors_and_cls_know_their_place() -> None:
    method = make(positions="learned", affinity="visible")
    data = batch(method)
    draws = method.draw(data._replace(ids=data.ids[:1].expand(3)), When(seed=0, epoch=0))
    before = method(data, draws).extras["logits"]
    table = method.backbone.positions().table
    assert table is not None
    noise = torch.randn(WIDTH, dtype=torch.float64)  # a constant would fall to the first norm
    table[draws["visible"][0, method.anchors :]] += noise  # the dropped rows
    assert torch.equal(method(data, draws).extras["logits"], before)
    table[draws["visible"][0, 0]] += noise
    anchored = method(data, draws).extras["logits"]
    assert not torch.allclose(anchored, before, atol=1e-4)
    method.backbone.model.pos_embed[:, 0] += noise  # CLS's own row is never dropped
    assert not torch.allclose(method(data, draws).extras["logits"], anchored, atol=1e-4)


# --- the pure functions -------------------------------------------------------------------------------------------


def test_the_official_map_has_the_published_numbers() -> None:
    """On 14x14 tokens: built on 16x16, columns normalised, cut; by loops and the standard library."""
    ours = cut_targets(196, (16, 16), 1.0).double()
    weights = [[math.exp(-((i // 16 - j // 16) ** 2) - (i % 16 - j % 16) ** 2) for j in range(256)] for i in range(256)]
    sums = [sum(row) for row in weights]
    slow = torch.tensor([[weights[i][j] / sums[j] for j in range(196)] for i in range(196)], dtype=torch.float64)
    assert torch.allclose(ours, slow, atol=1e-6)
    assert ours.sum(1).min().item() == pytest.approx(0.66, abs=5e-3)
    assert ours.sum(1).max().item() == pytest.approx(1.11, abs=5e-3)
    assert torch.equal(cut_targets(196, (16, 16), 0.0), torch.eye(196))
    official = at_224(OfficialDropPos)
    assert torch.equal(official.targets(torch.tensor(1.0)), cut_targets(196, (16, 16), 1.0))
    paper = at_224(DropPos).targets(torch.tensor(1.0))
    assert torch.allclose(paper.sum(1), torch.ones(196), atol=1e-5)


# --- other backbones, the second task, compilation ------------------------------------------------------------------


@pytest.mark.slow
def test_another_sigma_does_not_compile_again() -> None:
    method = make(affinity="full").eval()
    data = batch(method)
    torch.compiler.reset()  # what other tests compiled would make shapes dynamic, which takes longer
    compiled = torch.compile(method, fullgraph=True, backend="eager")
    for epoch, progress in enumerate((0.1, 0.5, 1.0)):
        draws = method.draw(data, When(seed=0, epoch=epoch, progress=progress))
        with torch.compiler.set_stance("fail_on_recompile" if epoch else "default"):
            assert compiled(data, draws).loss.item() == pytest.approx(method(data, draws).loss.item(), abs=1e-5)


def test_presets_are_the_methods() -> None:
    for name, config in (
        ("imagenet-droppos", DropPosConfig()),
        ("imagenet-droppos-official", OfficialDropPosConfig()),
    ):
        run = from_dict(RunConfig, load_preset(name), name)
        assert run.method == config and run.backbone.positions == "sincos"


def test_mistakes_are_sentences() -> None:
    with pytest.raises(SitusError, match=r"mask_ratio=1.0: must be in \[0, 1\)$"):
        DropPosConfig(mask_ratio=1.0)
    with pytest.raises(SitusError, match=r"tau=0: must be > 0$"):
        DropPosConfig(tau=0)
    with pytest.raises(
        SitusError, match=r"position_mask_ratio=0\.1: is so small .* of the 8 visible patches \(of 12 patches in all\)"
    ):
        make(position_mask_ratio=0.1)
    small = OfficialDropPosConfig(target_grid=(3, 3), decoder_width=8, decoder_heads=2)
    with pytest.raises(SitusError, match=r"target_grid=\(3, 3\): must have at least 12 positions"):
        OfficialDropPos(small_vit((12, 16)), small)
    few: dict[str, Any] = dict(mask_ratio=0.34, decoder_width=8, decoder_heads=2)
    for kind in (DropPos, OfficialDropPos):
        with pytest.raises(SitusError, match="no positions to drop: choose positions='sincos'"):
            kind(small_vit((12, 16), positions="none"), kind.Config(**few))


@pytest.mark.parametrize("where", ["before the patches", "first of the patches", "nowhere"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_patch_is_as_likely_as_it_is_like_the_whole(where: str, padded: bool) -> None:
    """The cosine of each patch with CLS, or with the mean of the real patches where there is none."""
    torch.manual_seed(0)
    prefix, patches = torch.randn(2, 2 if where == "before the patches" else 0, 6), torch.randn(2, 5, 6)
    real = torch.tensor([[True] * 5, [True] * 3 + [False] * 2]) if padded else None
    found = cls_likeness(Features(prefix, patches.half(), real), int(where == "first of the patches"))
    assert found.shape == (2, 5) and found.dtype == torch.float32
    for row, sample in enumerate(patches.half().double()):
        whole_sample = sample if real is None else sample[real[row]]
        whole = {"before the patches": prefix[row, :1], "first of the patches": sample[:1]}.get(where)
        whole = (whole_sample.mean(0) if whole is None else whole[0]).double()
        for place in range(len(whole_sample)):
            cosine = whole @ sample[place] / whole.norm() / sample[place].norm()
            assert float(found[row, place]) == pytest.approx(float(cosine), abs=2e-3)


def test_other_ratios_that_do_not_fit_are_refused_when_they_are_tried() -> None:
    method = make()
    assert (method.count, method.visible) == (12, 8)
    assert method.under(position_mask_ratio=0.13).anchors == 7  # the least that drops one
    with pytest.raises(SitusError, match=r"^position_mask_ratio=0.12: is so small that no position of the 8 visi"):
        method.under(position_mask_ratio=0.12)


@torch.no_grad()
def test_a_solution_shows_the_anchors_and_the_likeliest_position_of_each_other_patch() -> None:
    method = make(affinity="full").eval()
    puzzle = method.solve(batch(method), seed=5)
    draws = method.draw(batch(method), When(seed=5, progress=1.0))
    logits, anchors = method(batch(method), draws).extras["logits"], method.anchors
    assert (puzzle.known, puzzle.asked) == (anchors, anchors) and puzzle.grid == (3, 4)
    assert torch.equal(puzzle.places, draws["visible"])
    for row in range(3):
        best = [max(range(12), key=line.__getitem__) for line in logits[row].tolist()]
        assert puzzle.guesses[row].tolist() == [*draws["visible"][row, :anchors].tolist(), *best]
        assert puzzle.right[row].tolist() == [
            a == b for a, b in zip(best, draws["visible"][row, anchors:], strict=True)
        ]


def test_a_swin_predicts_the_places_of_its_last_grid() -> None:
    swin = small_swin((32, 64), positions="sincos", model_args={"window_size": 2})
    method = DropPos(swin, DropPosConfig(mask_ratio=0.75, position_mask_ratio=0.5, decoder_width=8, decoder_heads=2))
    assert (swin.grid, method.grid, method.count, method.visible) == ((8, 16), (4, 8), 32, 8)
    data = Batch(torch.randn(2, 3, 32, 64), torch.arange(2))
    draws = method.draw(data, When(seed=0, epoch=0))
    cells = draws["visible"] // 8 // 2 * 4 + draws["visible"] % 8 // 2
    assert torch.equal(cells.sort(dim=1).values, torch.arange(8).expand(2, -1))
    output = method(data, draws)
    assert output.extras["logits"].shape == (2, 4, 32)
    output.loss.backward()
    with pytest.raises(SitusError, match=r"^mask_ratio: must be 0.75 on swin.*, which sees one patch of each 2x2 cell"):
        method.under(mask_ratio=0.5)
