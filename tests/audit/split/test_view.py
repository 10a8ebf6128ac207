"""What is sent is what the truth says it is, and models that no order of rows hides are refused."""

from __future__ import annotations

import pytest
import torch
from builders import small_vit
from sent import classifier, pictures, sent, streams_of

from situs.audit.split.view import Setting, check_places, streams
from situs.errors import SitusError
from situs.locks.features import Defence


@pytest.mark.parametrize("defence", ["none", "batch-shuffle=2", "batch-shuffle=4", "batch-shuffle"])
@pytest.mark.parametrize("permute", [(), ("rows",), ("columns",), ("rows", "columns")])
def test_the_truth_names_every_number_that_was_sent(defence: str, permute: tuple[str, ...]) -> None:
    z = streams_of(5).z
    seen, truth = sent(z, defence, *permute)
    assert torch.equal(seen, z[truth.sample, truth.row][..., truth.channels])
    assert torch.equal(truth.channels.sort().values, torch.arange(z.shape[2]))
    assert ("columns" in permute) != torch.equal(truth.channels, torch.arange(z.shape[2]))
    own = truth.sample == torch.arange(len(z))[:, None]
    assert own[truth.row == 0].all()  # the prefix stays with its sample
    assert own.all() == (defence == "none")
    if defence == "none":
        assert ("rows" in permute) != torch.equal(truth.row, torch.arange(z.shape[1]).expand_as(truth.row))


def test_another_step_has_other_rows_and_the_same_words_the_same() -> None:
    z = streams_of(3).z
    one, again, other = (sent(z, "none", "rows", number=number) for number in (0, 0, 1))
    assert torch.equal(one.seen, again.seen) and not torch.equal(one.truth.row, other.truth.row)


def test_a_setting_says_what_it_is() -> None:
    said = [Setting(), Setting(Defence("noise", 0.2), rows=True), Setting(rows=True, columns=True)]
    assert list(map(str, said)) == ["none", "noise=0.2 + rows", "rows + columns"]


def test_streams_are_what_enters_the_blocks() -> None:
    backbone, images = classifier(), pictures(3)
    entered = []
    hook = backbone.model.blocks[0].register_forward_pre_hook(lambda _, given: entered.append(given[0]))
    backbone.model(images)
    hook.remove()
    torch.testing.assert_close(streams(backbone, images.split(2)), entered[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("vit_small_patch16_rope_224", "RoPE: its coordinates"),
        ("vit_small_patch16_rope_ape_224", "RoPE: its coordinates"),
        ("vit_relpos_small_patch16_224", "relative bias"),
    ],
)
def test_places_that_go_beside_the_tokens_are_refused(name: str, why: str) -> None:
    backbone = small_vit(32, name=name, depth=1, width=24, heads=2, patch_size=None)
    with pytest.raises(SitusError, match=f"no order of rows hides places from its server, nothing to attack: .*{why}"):
        streams(backbone, [torch.zeros(1, 3, 32, 32)])
    check_places(classifier())
