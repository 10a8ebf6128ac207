"""What the two sides of a lock say of their channels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from situs.backbones import create_backbone
from situs.errors import SitusError
from situs.locks.attacks.images import RIDGE, SHIFTS, clear_side, locked_side, shifted
from situs.locks.attacks.match import normal_scores
from situs.locks.groups import permute_state, random_keys, residual_only, within

KINDS = ["vit", "eva", "swin", "bert", "gpt2", "llama", "gpt_neox", "electra", "hf_vit"]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def load(folder: Callable[[str], Path], name: str) -> Any:
    return create_backbone(folder(name)).eval()


# --- clear ------------------------------------------------------------------------------------------------------


def test_the_clear_side_is_the_covariance_of_what_enters(model_folder: Callable[[str], Path]) -> None:
    backbone = load(model_folder, "vit")
    groups = backbone.groups()
    images = torch.randn(20, 3, 16, 16, generator=seeded(0))
    clear = clear_side(backbone, groups, images.split(7))  # batches of unequal length
    with torch.no_grad():
        z = backbone.assemble(backbone.embed(images), backbone.positions()).z
    tokens = F.layer_norm(z, (24,)).double().numpy()
    flat = tokens.reshape(-1, 24)
    assert np.allclose(clear.grams["all"].numpy(), np.cov(flat.T, bias=True), atol=1e-5)
    at_places = tokens.mean(axis=0)
    assert np.allclose(clear.grams["place"].numpy(), np.cov(at_places.T, bias=True), atol=1e-5)
    within = (tokens - at_places).reshape(-1, 24)
    assert np.allclose(clear.grams["content"].numpy(), within.T @ within / len(within), atol=1e-5)
    assert np.allclose(clear.mean.numpy(), flat.mean(axis=0), atol=1e-5)
    assert np.allclose(clear.spread.numpy(), flat.std(axis=0), atol=1e-5)
    assert np.allclose(clear.first.numpy(), tokens[0, 0], atol=1e-5)  # the CLS token is the same in every image
    filters = backbone.model.patch_embed.proj.weight.detach().flatten(1)
    assert torch.allclose(clear.grams["filters"], filters @ filters.T, atol=1e-4)
    table = backbone.model.pos_embed.detach()[0, 1:]
    assert torch.allclose(clear.grams["table"], table.T @ table, atol=1e-4)
    inverse = np.linalg.inv(np.corrcoef(flat.T) + RIDGE * np.eye(24))
    assert np.allclose(clear.grams["inverse"].numpy(), inverse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["bert", "electra", "gpt2", "llama"])
def test_texts_of_unequal_length_are_read_as_the_first_block_reads_them(
    name: str, model_folder: Callable[[str], Path]
) -> None:
    backbone = load(model_folder, name)
    texts = [torch.randint(0, 31, (1, length), generator=seeded(length)) for length in (3, 9, 5)]
    clear = clear_side(backbone, backbone.groups(), texts)
    entering = []
    with torch.no_grad():
        for ids in texts:
            z = backbone.assemble(backbone.embed(ids), backbone.positions((ids.shape[1],))).z[0]
            norm = {
                "bert": lambda x: x,
                "electra": lambda x: x,
                "gpt2": lambda x: F.layer_norm(x, (24,)),
                "llama": lambda x: F.rms_norm(x, (24,)),
            }
            entering.append(norm[name](z))
    flat = torch.cat(entering).numpy()
    assert np.allclose(clear.mean.numpy(), flat.mean(axis=0), atol=1e-5)
    assert np.allclose(clear.grams["all"].numpy(), np.cov(flat.T, bias=True), atol=1e-4)
    assert ("table" in clear.grams) == (name != "llama")
    assert "filters" in clear.grams
    if name == "electra":  # words and places of 12 channels, which a clear matrix makes 24
        inner = backbone.model.base_model
        words, places = (getattr(inner.embeddings, f"{each}_embeddings").weight for each in ("word", "position"))
        for gram, rows in (("filters", words - words.mean(dim=0)), ("table", places)):
            wide = rows.detach() @ inner.embeddings_project.weight.detach().T
            assert torch.allclose(clear.grams[gram], wide.T @ wide, rtol=1e-4, atol=1e-4)


def test_no_samples_and_an_embedding_that_is_not_there_are_one_sentence(model_folder: Callable[[str], Path]) -> None:
    backbone = load(model_folder, "vit")
    groups = backbone.groups()
    with pytest.raises(SitusError, match="needs samples"):
        clear_side(backbone, groups, [])
    with torch.no_grad():
        for name, parameter in backbone.model.named_parameters():
            if name.startswith(("patch_embed", "pos_embed", "cls_token")):
                parameter.zero_()
    with pytest.raises(SitusError, match="has the same output for all samples"):
        clear_side(backbone, groups, [torch.randn(2, 3, 16, 16)])


def test_shifts_are_crops_of_the_reflected_image_and_their_mirrors() -> None:
    images = torch.randn(3, 2, 12, 8, generator=seeded(0))
    views = list(shifted(images, (4, 2)))
    assert len(views) == 2 * SHIFTS
    assert torch.equal(views[0], images)
    padded = F.pad(images, (4, 4, 8, 8), mode="reflect")
    places = set()
    for straight, mirrored in zip(views[::2], views[1::2], strict=True):
        assert torch.equal(straight.flip(-1), mirrored)
        found = [
            (top, left)
            for top in range(17)
            for left in range(9)
            if torch.equal(padded[..., top : top + 12, left : left + 8], straight)
        ]
        assert len(found) == 1
        places.add(found[0])
    assert len(places) == SHIFTS  # no two alike
    assert all(torch.equal(a, b) for a, b in zip(views, shifted(images, (4, 2)), strict=True))
    tiny = list(shifted(torch.randn(1, 1, 4, 4), (4, 4)))  # a reflection reaches no further than the image
    assert all(view.shape == (1, 1, 4, 4) for view in tiny)


def test_many_images_come_in_batches() -> None:
    images = torch.randn(40, 1, 4, 4, generator=seeded(0))
    views = list(shifted(images, (2, 2)))
    assert sum(len(view) for view in views) == 40 * 2 * SHIFTS
    assert max(len(view) for view in views) <= 16


# --- locked -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_the_locked_side_moves_with_the_key_and_with_no_cover(name: str, model_folder: Callable[[str], Path]) -> None:
    backbone = load(model_folder, name)
    groups = backbone.groups()
    clear = locked_side(backbone, groups)
    keys = random_keys(groups, seeded(1))
    p = keys[residual_only(groups)[0].name]
    backbone.model.load_state_dict(permute_state(backbone.model.state_dict(), groups, keys))
    locked = locked_side(backbone, groups)
    assert len(locked.grams) == (1 if name == "swin" else 2)
    for before, after in zip(clear.grams, locked.grams, strict=True):
        assert {"q", "k", "v", "o", "up", "down"} <= before.keys() == after.keys()
        for role in before:
            assert torch.allclose(after[role], before[role][p][:, p], atol=1e-4), role
    for clue in ("centre", "lean", "reach"):
        ours, theirs = getattr(clear, clue), getattr(locked, clue)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert torch.allclose(theirs, ours[p], atol=1e-4), clue


def test_grams_and_clues_of_a_vit_by_hand(model_folder: Callable[[str], Path]) -> None:
    backbone = load(model_folder, "vit")
    locked = locked_side(backbone, backbone.groups())
    block = backbone.model.blocks[0]
    q, k, v = block.attn.qkv.weight.detach().chunk(3)
    expected: dict[str, Tensor] = {"q": q, "k": k, "v": v, "up": block.mlp.fc1.weight.detach()}
    expected |= {"o": block.attn.proj.weight.detach().T, "down": block.mlp.fc2.weight.detach().T}
    for role, weight in expected.items():
        assert torch.allclose(locked.grams[0][role], weight.T @ weight, atol=1e-4), role
    norm = block.norm1
    assert locked.centre is not None and locked.lean is not None
    assert torch.allclose(locked.centre, -norm.bias.detach() / norm.weight.detach())
    lean = normal_scores(block.mlp.fc1.weight.detach().T @ block.mlp.fc1.bias.detach())
    assert torch.allclose(locked.lean.double(), lean + normal_scores(block.attn.proj.bias.detach()))
    scores = [normal_scores(weight.norm(dim=0) * norm.weight.detach().abs()) for weight in (q, k, v)]
    assert torch.allclose(locked.reach.double(), scores[0] + scores[1] + scores[2], atol=1e-4)


def test_each_heads_queries_keys_and_values_are_told_apart(model_folder: Callable[[str], Path]) -> None:
    backbone = load(model_folder, "gpt_neox")
    locked = locked_side(backbone, backbone.groups())
    fused = backbone.model.base_model.layers[0].attention.query_key_value
    for number, role in enumerate("qkv"):
        weight = torch.cat([head[8 * number : 8 * number + 8] for head in fused.weight.detach().split(24)])
        assert torch.allclose(locked.grams[0][role], weight.T @ weight, atol=1e-4), role


def test_without_a_first_norm_the_values_bias_is_the_centre(model_folder: Callable[[str], Path]) -> None:
    backbone = load(model_folder, "bert")
    value = backbone.model.base_model.encoder.layer[0].attention.self.value
    locked = locked_side(backbone, backbone.groups())
    assert locked.centre is not None
    assert torch.allclose(locked.centre, -value.weight.detach().T @ value.bias.detach(), atol=1e-5)
    llama = load(model_folder, "llama")
    assert locked_side(llama, llama.groups()).centre is None  # RMSNorm, no biases


def test_the_first_blocks_that_are_left_are_looked_at(model_folder: Callable[[str], Path]) -> None:
    backbone = load(model_folder, "vit")
    groups = backbone.groups()
    whole = locked_side(backbone, groups)
    gone = {name for name in backbone.model.state_dict() if name.startswith("blocks.0.")}
    left = locked_side(backbone, within(groups, backbone.model.state_dict().keys() - gone))
    assert len(left.grams) == 1
    assert torch.equal(left.grams[0]["v"], whole.grams[1]["v"])
    norm = backbone.model.blocks[1].norm1
    assert left.centre is not None and torch.allclose(left.centre, -norm.bias.detach() / norm.weight.detach())
    with pytest.raises(SitusError, match="no block of the locked file has attention or MLP weights"):
        locked_side(backbone, _vectors_only(groups))


def _vectors_only(groups: Any) -> Any:
    """The residual group with its norms alone."""
    from dataclasses import replace

    [first, *_] = residual_only(groups)
    return [replace(first, members=tuple(m for m in first.members if "norm" in m.tensor))]
