"""The audit's verdict follows from its numbers, for models that know, half know and do not know their places."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import small_vit

from situs.backbones import create_backbone
from situs.data.batch import Batch
from situs.errors import SitusError
from situs.measure.position.knowledge import OWN, REMOVED, SHUFFLED, PositionAudit, measure_positions, verdict
from situs.pages import make_page


def make(name: str = "vit_tiny_patch16_224", **more: Any) -> Any:
    torch.manual_seed(0)
    found = small_vit(name=name, **{"img_size": (12, 16), "width": 24, "heads": 3, **more}).eval()
    if name.startswith("vit_tiny"):
        with torch.no_grad():
            found.model.pos_embed.normal_(std=2.0)
    return found


def batches(count: int = 40, size: tuple[int, int] = (12, 16)) -> list[Batch]:
    images = torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(1))
    return [Batch(images, torch.arange(count))]


@pytest.fixture(scope="module")
def audit() -> PositionAudit:
    law = {"status": "holds", "reason": "", "errors": {"forward": 1e-15}}
    return replace(measure_positions("tiny", make(), batches()), rows=law)


def test_verdict_of_a_model_with_positions(audit: PositionAudit) -> None:
    assert audit.kinds == ("table",)
    said = verdict(audit)
    assert said.startswith("`tiny` encodes its 3 × 4 positions by a vector added to each token.")
    assert "Its learned table does not encode the grid" in said  # its vectors are random
    assert "Its features reveal the position of a patch" in said
    last = audit.probed.readings[OWN][-1]
    assert f"{100 * last.right:.0f} % after the final norm (chance: 8.3 %)" in said
    assert "only from the position embeddings" in said
    assert "If 50 % of the patches are shuffled, the CLS token changes by" in said  # 15 % of 12 is one, which cannot be
    assert "answers" not in said  # its head was never trained
    assert "Its blocks are permutation equivariant" in said


def test_shuffles_with_the_mask_known_and_hidden(audit: PositionAudit) -> None:
    assert [(row.ratio, row.mask_known) for row in audit.shuffled] == [
        (0.15, True), (0.15, False), (0.5, True), (0.5, False), (0.9, True), (0.9, False),
    ]  # fmt: skip
    assert [row.masked for row in audit.shuffled[::2]] == [1, 6, 10]
    assert all(row.diff_norm > 0 for row in audit.shuffled if row.mask_known or row.masked > 1)


def test_model_without_positions_does_not_mind_shuffles() -> None:
    found = measure_positions("mp3", make().double(), [b._replace(inputs=b.inputs.double()) for b in batches()],
                            positions=False)  # fmt: skip
    said = verdict(found)
    assert said.startswith("`mp3` uses no positions: it was trained without them.")
    assert "Its features reveal no position to a linear reader" in said
    assert "does not change the CLS token" in said
    assert all(row.diff_norm < 1e-9 for row in found.shuffled)
    assert found.no_vectors.startswith("it was trained without positions")
    assert (found.rows, found.looks) == (None, ())
    text = make_page(found).render()
    assert "<td>not measured</td>" in text
    assert "<td>it was trained without positions" in text


def test_relative_bias_breaks_the_law_and_has_no_vector() -> None:
    found = measure_positions("relpos", make("vit_relpos_small_patch16_224", img_size=(32, 48), patch_size=16),
                            batches(6, (32, 48)))  # fmt: skip
    assert "biases between pairs of tokens" in found.no_vectors
    assert not found.no_vectors.startswith("vit_relpos")
    law = {"status": "refused", "reason": "its relative bias follows places", "errors": {}}
    said = verdict(replace(found, rows=law))
    assert "`relpos` encodes its 2 × 3 positions by biases between pairs of tokens." in said
    assert "Its blocks are not permutation equivariant: its relative bias" in said


def test_words_at_the_borders(audit: PositionAudit) -> None:
    def with_last(condition: str, of: PositionAudit = audit, **changed: float) -> PositionAudit:
        readings = {c: list(each) for c, each in of.probed.readings.items()}
        readings[condition][-1] = replace(readings[condition][-1], **changed)
        return replace(of, probed=replace(of.probed, readings=readings))

    blind = audit.probed.readings[OWN][-1].blind_error
    assert "features reveal the position of a patch" in verdict(with_last(OWN, error=0.1 * blind, right=0.1))
    assert "features reveal roughly where a patch is" in verdict(with_last(OWN, error=0.5 * blind, right=0.1))
    assert "features reveal no position to a linear reader" in verdict(with_last(OWN, error=0.95 * blind, right=0.1))
    both = verdict(with_last(SHUFFLED, with_last(REMOVED, error=0.5 * blind), error=0.3 * blind))
    assert re.search(rf"content alone.*{0.5 * blind:.2f}.*positions alone.*{0.3 * blind:.2f}", both)
    rotary = replace(audit, rows={"status": "holds", "reason": "RoPE: it leaks", "errors": {"forward": 1e-15}})
    assert "1e-15 in float64 (RoPE: it leaks)" in verdict(rotary)


def test_page_opens_with_the_verdict_and_shows_every_depth(audit: PositionAudit) -> None:
    page = make_page(audit)
    text = page.render()
    assert set(page.pictures) == {"error", "named", "vectors", "spectrum"}
    first, figure = text.index("encodes its 3 × 4 positions"), text.index("<figure>")
    assert first < figure < text.index("read from its features</h2>")
    assert all(f"{condition}: error" in text for condition in ("own", "removed", "shuffled"))
    for depth in ("embedding", "1", "2", "norm"):
        assert f"<td>{depth}</td>" in text or f'<td class="number">{depth}</td>' in text
    assert "which predicts the position of" in text
    assert "situs audit gradients" in text  # a learned table has a gradient


def test_numbers_are_plain_json(audit: PositionAudit) -> None:
    numbers = json.loads(json.dumps(audit.to_json()))
    assert numbers["verdict"] == verdict(audit)
    assert [each["depth"] for each in numbers["readings"][OWN]] == ["embedding", "1", "2", "norm"]
    assert (numbers["images_fitted_on"], numbers["images_read"]) == (20, 20)
    assert numbers["row_law"]["status"] == "holds"
    assert numbers["vectors"][0]["kind"] == "learned table"


def test_a_convolution_is_refused() -> None:
    with pytest.raises(SitusError, match="has no tokens"):
        measure_positions("net", create_backbone("test_resnet").eval(), batches(2))
