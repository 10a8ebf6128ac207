from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from builders import small_swin, small_vit
from torch import Tensor, nn

from situs.core.when import When
from situs.errors import SitusError
from situs.measure.position.head import position_accuracy, position_curve, position_grid
from situs.methods import MP3, Batch, DropPos, DropPosConfig, MP3Config
from situs.models.model import Model, puzzle_method

RATIOS = (0.0, 0.5, 0.8)


def make(eta: float = 0.5) -> MP3:
    torch.manual_seed(0)
    backbone = small_vit((8, 12), drop_path=0.3)
    method = MP3(backbone, MP3Config(mask_ratio=eta))
    for parameter in method.parameters():  # large enough that what a token attends to shows in its logits
        nn.init.normal_(parameter, std=0.5)
    return method


def batches() -> list[Batch]:
    torch.manual_seed(1)
    return [Batch(torch.randn(size, 3, 8, 12), torch.arange(size) + 10 * size) for size in (4, 4, 3)]


def test_each_ratio_is_what_a_method_of_that_ratio_says() -> None:
    method = make(0.5).train()
    curve = position_curve(method, batches(), RATIOS, seed=3)
    found = curve.accuracy
    assert tuple(found) == tuple(curve.top5) == RATIOS
    assert len(set(found.values())) > 1  # the ratio matters
    for ratio in RATIOS:
        other = make(ratio)
        other.load_state_dict(method.state_dict())
        other.eval()
        right = near = 0
        for batch in batches():
            extras = other(batch, other.draw(batch, When(seed=3, epoch=0))).extras
            right += int((extras["logits"].argmax(-1) == extras["places"]).sum())
            five = extras["logits"].topk(5).indices
            near += int((five == extras["places"].unsqueeze(-1)).sum())
        assert found[ratio] == right / (11 * 6)
        assert curve.top5[ratio] == near / (11 * 6) > found[ratio]


def test_hints_are_given_or_not_whatever_the_training_gave() -> None:
    """The same weights asked without hints are what a method that never gave any says, and hints help a reader."""
    hinted = MP3(make(0.5).backbone, MP3Config(mask_ratio=0.5, anchor_ratio=0.4))
    bare = MP3(hinted.backbone, MP3Config(mask_ratio=0.5))
    bare.load_state_dict(hinted.state_dict())
    without = position_curve(hinted.under(anchor_ratio=0.0), batches(), RATIOS, seed=3)
    assert without == position_curve(bare, batches(), RATIOS, seed=3)
    assert position_curve(bare.under(anchor_ratio=0.4), batches(), RATIOS) == position_curve(hinted, batches(), RATIOS)
    assert (without.anchors, hinted.hint_ratio, hinted.under(anchor_ratio=0.0).hint_ratio) == (0.0, 0.4, 0.0)
    asked = replace(without, trained_anchors=0.4).summary()
    assert asked.notes == (
        "40 % of the patches kept their positions in training (hints); here no patch keeps its position.",
    )
    with pytest.raises(SitusError, match=r"anchor_ratio=1\.0: must be in \[0, 1\)"):
        hinted.under(anchor_ratio=1.0)
    made = make_droppos()
    with pytest.raises(SitusError, match="applies only to MP3, but the model was trained by DropPos"):
        puzzle_method(Model("run", made.backbone, made), anchor_ratio=0.0)


def test_the_method_is_left_as_it_was() -> None:
    method = make(0.5).train()
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    position_curve(method, batches(), RATIOS)
    assert (method.training, method.config.mask_ratio, method.context) == (True, 0.5, 3)
    assert all(torch.equal(before[name], tensor) for name, tensor in method.state_dict().items())


def test_a_perfect_reader_scores_one_and_chance_is_chance() -> None:
    """Patches that show their own place: a head that reads them is right at every ratio."""
    method = make()
    method.backbone.model.blocks = nn.ModuleList()  # only the embedding and the final norm stay
    method.backbone.model.norm = nn.Identity()
    with torch.no_grad():
        method.backbone.model.patch_embed.proj.weight.zero_()
        method.backbone.model.patch_embed.proj.bias.zero_()
        method.backbone.model.patch_embed.proj.weight[:6, 0].view(6, 16).copy_(torch.eye(6, 16))
        method.position_head.weight.copy_(torch.eye(6, 16))
        method.position_head.bias.zero_()
    images = torch.zeros(2, 3, 8, 12)
    for place in range(6):
        row, column = divmod(place, 3)
        images[:, 0, 4 * row + place // 4, 4 * column + place % 4] = 1.0
    batch = Batch(images, torch.tensor([0, 1]))
    assert position_curve(method, [batch], RATIOS).accuracy == dict.fromkeys(RATIOS, 1.0)
    blank = batch._replace(inputs=torch.zeros_like(images))
    blind = position_curve(method, [blank], RATIOS)
    assert blind.accuracy == pytest.approx(dict.fromkeys(RATIOS, 1 / 6))
    assert blind.top5 == pytest.approx(dict.fromkeys(RATIOS, 5 / 6))  # equal logits are no knowledge


def test_mistakes_are_named() -> None:
    with pytest.raises(SitusError, match="no samples"):
        position_curve(make(), [])
    with pytest.raises(SitusError, match=r"ratios=1.0: must be in \[0, 1\)"):
        position_curve(make(), batches(), (1.0,))
    with pytest.raises(SitusError, match=r"ratios=\[\]"):
        position_curve(make(), batches(), ())


def make_droppos(**fields: object) -> DropPos:
    torch.manual_seed(0)
    backbone = small_vit((8, 12), patch_size=2, positions="sincos", drop_path=0.3)
    settings = {"decoder_width": 16, "decoder_heads": 2, "decoder_depth": 1, **fields}
    return DropPos(backbone, DropPosConfig(**settings))  # type: ignore[arg-type]


def by_hand(method: DropPos, gamma: float, gamma_pos: float, seed: int) -> float:
    """One image at a time, with a method made for these ratios."""
    other = make_droppos(mask_ratio=gamma, position_mask_ratio=gamma_pos)
    other.load_state_dict(method.state_dict())
    other.eval()
    right = asked = 0
    for batch in batches():
        for image, name in zip(batch.inputs, batch.ids, strict=True):
            one = Batch(image[None], name[None])
            extras = other(one, other.draw(one, When(seed=seed, epoch=0))).extras
            assert extras["places"].shape[1] == int(gamma_pos * (24 - int(gamma * 24)))
            right += int((extras["logits"].argmax(-1) == extras["places"]).sum())
            asked += extras["places"].numel()
    return right / asked


def scrambled(method: DropPos) -> DropPos:
    for parameter in method.parameters():
        nn.init.normal_(parameter, std=0.5)
    return method.train()


@torch.no_grad()
def test_the_grid_is_what_methods_made_for_each_cell_say() -> None:
    method = scrambled(make_droppos())
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    found = position_grid(method, batches(), (0.0, 0.75), (0.25, 0.95), seed=3)
    assert (found.count, found.places) == (11, 24)
    assert [(cell.visible, cell.dropped) for cell in found.cells] == [(24, 6), (24, 22), (6, 1), (6, 5)]
    for cell in found.cells:
        assert cell.accuracy == by_hand(method, cell.mask_ratio, cell.position_mask_ratio, 3)
    assert len({cell.accuracy for cell in found.cells}) > 1
    assert position_accuracy(method, batches(), seed=3) == by_hand(method, 0.75, 0.75, 3)  # as it is trained
    assert found.mean == pytest.approx(sum(cell.accuracy or 0.0 for cell in found.cells) / 4)
    assert (method.training, method.config.mask_ratio, method.config.affinity) == (True, 0.75, "full")
    assert all(torch.equal(before[name], tensor) for name, tensor in method.state_dict().items())


def test_the_default_grid_has_sixteen_cells() -> None:
    cells = position_grid(make_droppos(), batches()).cells
    assert [(cell.mask_ratio, cell.position_mask_ratio) for cell in cells] == [
        (gamma, gamma_pos) for gamma in (0, 0.25, 0.5, 0.75) for gamma_pos in (0.25, 0.5, 0.75, 0.95)
    ]


def test_an_untrained_head_guesses_one_place_in_n() -> None:
    """Its guesses do not know the places, which are a random choice: binomial with p = 1 / N whatever it answers."""
    torch.manual_seed(2)
    images = torch.randn(64, 3, 8, 12)
    many = [Batch(images, start + torch.arange(64)) for start in (0, 64)]
    grid = position_grid(make_droppos(), many)
    for cell in grid.cells:
        asked = grid.count * (cell.dropped or 0)
        # An image's dropped places are drawn without replacement, which only narrows the spread.
        assert abs((cell.accuracy or 0.0) - 1 / 24) < 4.5 * (1 / 24 * 23 / 24 / asked) ** 0.5
    torch.manual_seed(0)
    backbone = small_vit((8, 12), patch_size=2)
    for accuracy in position_curve(MP3(backbone, MP3Config()), many).accuracy.values():
        # All 24 patches of an image are asked for, and a head that always says one place is right exactly once.
        assert abs(accuracy - 1 / 24) < 4.5 * (1 / 24 * 23 / 24 / (128 * 24)) ** 0.5


def test_swin_has_one_row_and_says_why() -> None:
    torch.manual_seed(0)
    backbone = small_swin(width=8, patch_size=2, positions="sincos", model_args={"window_size": 2})
    method = DropPos(backbone, DropPosConfig(decoder_width=16, decoder_heads=2, decoder_depth=1))
    images: Tensor = torch.randn(3, 3, 32, 32)
    grid = position_grid(method, [Batch(images, torch.arange(3))])
    assert grid.places == 64
    assert [cell.accuracy is None for cell in grid.cells] == [True] * 12 + [False] * 4
    assert {cell.reason is None for cell in grid.cells[:12]} == {False}
    assert "must be 0.75" in str(grid.cells[0].reason)
    assert grid.mean == pytest.approx(sum(cell.accuracy or 0.0 for cell in grid.cells[12:]) / 4)
    with pytest.raises(SitusError, match=r"nothing can be measured: mask_ratio: must be 0.75"):
        position_grid(method, [], (0.5,))


def test_mistakes_in_the_grid_are_named() -> None:
    method = make_droppos()
    with pytest.raises(SitusError, match="no samples"):
        position_grid(method, [])
    with pytest.raises(SitusError, match=r"ratios=1.0: must be in \[0, 1\)"):
        position_grid(method, batches(), (1.0,))
    with pytest.raises(SitusError, match=r"position_ratios=0.0: must be in \(0, 1\]"):
        position_grid(method, batches(), (0.5,), (0.0,))
