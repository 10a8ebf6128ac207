from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from builders import small_vit
from torch import Tensor

from situs.backbones import block as runs
from situs.backbones import create_backbone
from situs.backbones.base import Stream
from situs.backbones.block import run_blocks
from situs.backbones.timm.blocks import read_block
from situs.core.tokens import take
from situs.core.when import When
from situs.errors import SitusError
from situs.methods import MP3, Batch, MP3Config
from situs.methods.heads import place_ranks, position_loss


def make(eta: float = 0.5, **config) -> MP3:
    torch.manual_seed(0)
    backbone = small_vit((8, 12))
    return MP3(backbone, MP3Config(mask_ratio=eta, **config)).double()


def batch() -> Batch:
    torch.manual_seed(1)
    return Batch(torch.randn(3, 3, 8, 12, dtype=torch.float64), torch.tensor([5, 900, 31]))


def slow_mp3(
    method: MP3,
    images: Tensor,
    context: list[list[int]],
    anchors: tuple[list[int], ...] = ([], [], []),
    cls: tuple[bool, ...] = (True, True, True),
) -> Tensor:
    """MP3 from the paper's text, one image, one token and one head at a time, in the natural order of the patches.

    cls: whether it is in the context.
    """
    vit = method.backbone.model
    losses = []
    for image, chosen, told, shown in zip(images, context, anchors, cls, strict=True):
        patches = [image[:, r : r + 4, c : c + 4] for r in (0, 4) for c in (0, 4, 8)]
        weight, bias = vit.patch_embed.proj.weight, vit.patch_embed.proj.bias
        z = [vit.cls_token[0, 0] + vit.pos_embed[0, 0]]
        z += [(weight * patch).sum(dim=(1, 2, 3)) + bias for patch in patches]
        z = [token + vit.pos_embed[0, i] if i - 1 in told else token for i, token in enumerate(z)]
        keys = [0] * shown + [1 + place for place in chosen]
        for block in vit.blocks:
            normed = [block.norm1(token) for token in z]
            q, k, v = ([], [], [])
            for token in normed:
                whole = block.attn.qkv.weight @ token + block.attn.qkv.bias
                q.append(whole[:16]), k.append(whole[16:32]), v.append(whole[32:])
            mixed = []
            for i in range(len(z)):
                heads = []
                for h in (slice(0, 8), slice(8, 16)):
                    scores = torch.stack([(q[i][h] * k[j][h]).sum() / math.sqrt(8) for j in keys])
                    share = scores.exp() / scores.exp().sum()
                    heads.append(sum(a * v[j][h] for a, j in zip(share, keys, strict=True)))
                mixed.append(block.attn.proj(torch.cat(heads)))
            z = [token + out for token, out in zip(z, mixed, strict=True)]
            z = [token + block.mlp(block.norm2(token)) for token in z]
        for place in range(6):
            logits = method.position_head(vit.norm(z[1 + place]))
            losses.append(logits.exp().sum().log() - logits[place])
    return torch.stack(losses).mean()


@pytest.mark.parametrize("eta", [0.0, 0.5, 0.8])
def test_loss_and_gradients_match_an_independent_slow_mp3(eta: float) -> None:
    method = make(eta)
    draws = method.draw(batch(), When(seed=3, epoch=7))
    context = draws["order"][:, : method.context].tolist()
    parameters = {n: p for n, p in method.named_parameters() if "head" not in n or "position" in n}
    ours = method(batch(), draws).loss
    slow = slow_mp3(method, batch().inputs, context)
    assert float(ours.detach()) == pytest.approx(float(slow.detach()), abs=1e-6)  # the loss itself is taken in float32
    ours_grads = torch.autograd.grad(ours, list(parameters.values()), allow_unused=True)
    slow_grads = torch.autograd.grad(slow, list(parameters.values()), allow_unused=True)
    for name, a, b in zip(parameters, ours_grads, slow_grads, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert torch.allclose(a, b, atol=1e-7), name
    assert method.context == 6 - int(eta * 6)


def test_positions_are_gone_and_masked_patches_are_seen_by_nobody() -> None:
    method = make(0.5)
    draws = method.draw(batch(), When(seed=0, epoch=0))
    before = method(batch(), draws).extras["logits"]
    with torch.no_grad():
        method.backbone.model.pos_embed[:, 1:].normal_()
    assert torch.equal(method(batch(), draws).extras["logits"], before)
    images = batch().inputs.clone()
    place = int(draws["order"][0, -1])  # a patch outside the context of sample 0
    images[0, :, 4 * (place // 3) : 4 * (place // 3) + 4, 4 * (place % 3) : 4 * (place % 3) + 4] += 3.0
    after = method(batch()._replace(inputs=images), draws).extras["logits"]
    assert torch.allclose(after[0, :-1], before[0, :-1], atol=1e-12)
    assert not torch.allclose(after[0, -1], before[0, -1], atol=1e-3)


@pytest.mark.parametrize("eta", [0.0, 0.5])
def test_anchors_are_told_their_own_place_and_no_other(eta: float) -> None:
    method = make(eta, anchor_ratio=0.4)
    with torch.no_grad():
        method.backbone.model.pos_embed[:, 1:].normal_()
    draws = method.draw(batch(), When(seed=0, epoch=0))
    assert draws["anchors"].sum(1).tolist() == [2, 2, 2]
    order = draws["order"].tolist()
    told = tuple(
        [row[i] for i in flags.nonzero().flatten()] for row, flags in zip(order, draws["anchors"], strict=True)
    )
    slow = slow_mp3(method, batch().inputs, [row[: method.context] for row in order], told)
    assert float(method(batch(), draws).loss.detach()) == pytest.approx(float(slow.detach()), abs=1e-6)
    untold = slow_mp3(method, batch().inputs, [row[: method.context] for row in order])
    assert abs(float(slow.detach()) - float(untold.detach())) > 1e-3


def test_mistakes_are_sentences() -> None:
    with pytest.raises(SitusError, match=r"mask_ratio=1.2: must be in \[0, 1\)$"):
        MP3Config(mask_ratio=1.2)
    swin = create_backbone("swin_tiny_patch4_window7_224", img_size=56, model_args={"depths": (1, 1, 1, 1)})
    with pytest.raises(SitusError, match="window attention"):
        MP3(swin, MP3Config())


def test_patches_are_ordered_before_they_are_embedded() -> None:
    """Pixels need no gradient, so nothing is scattered back; the loss is that of embedded tokens put in order."""
    method = make()
    draws = method.draw(batch(), When(seed=3, epoch=7))
    loss = method(batch(), draws).loss
    seen, names = [loss.grad_fn], set()
    while seen:
        node = seen.pop()
        names.add(type(node).__name__)
        seen += [parent for parent, _ in node.next_functions if parent is not None]
    assert "AddmmBackward0" in names and not {name for name in names if "Gather" in name or "Index" in name}
    tokens = take(method.backbone.embed(batch().inputs), draws["order"])
    logits = method.position_head(method.backbone.encode(tokens, None, context=method.context).patches)
    assert torch.equal(loss, position_loss(logits, draws["order"]))


def compiled_step(context: int | None) -> tuple[Tensor, dict[str, Tensor], int]:
    """Loss and gradients of small blocks, compiled, and the bytes that they keep for the backward.

    The partition is the compiler's own; only the kernels are torch's.
    """
    torch.manual_seed(0)
    backbone = small_vit((8, 12))
    blocks, tokens = backbone.model.blocks, torch.randn(4, 7, 16)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    run = torch.compile(
        lambda z: run_blocks(blocks, read_block, Stream(z, 1), context), backend="aot_eager_decomp_partition"
    )
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = run(tokens).square().mean()
    loss.backward()
    return loss, {name: p.grad for name, p in blocks.named_parameters()}, sum(kept.values())


@pytest.mark.slow
def test_a_compiled_context_is_kept_once_and_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, grads, less = compiled_step(5)
    plain = compiled_step(None)[2]
    monkeypatch.setattr(
        runs, "_of_first", lambda x, keys, weight, bias: torch.nn.functional.linear(x[:, :keys], weight, bias)
    )
    torch.compiler.reset()
    expected, gradients, more = compiled_step(5)
    assert torch.equal(loss, expected) and all(torch.equal(grads[name], gradients[name]) for name in gradients)
    depth = len(small_vit((8, 12)).model.blocks)
    copies = depth * 4 * 5 * 16 * 4  # of the context, in every block
    assert 0.8 * copies < more - less <= copies
    assert less < plain


@torch.no_grad()
def test_ranks_count_the_places_held_likelier() -> None:
    """By sorting one row at a time; equal logits keep the order of the places."""
    logits = torch.randint(0, 4, (3, 5, 7), generator=torch.Generator().manual_seed(0)).float()
    places = torch.randint(0, 7, (3, 5), generator=torch.Generator().manual_seed(1))
    ranks = place_ranks(logits, places)
    for b in range(3):
        for k in range(5):
            order = sorted(range(7), key=lambda place: (-float(logits[b, k, place]), place))
            assert int(ranks[b, k]) == order.index(int(places[b, k]))


def test_a_view_takes_nothing_along_that_a_run_hung_on_the_method() -> None:
    """A compiled forward and hooks are of the config that they were made under; FSDP's class has no plain instances."""
    method = make(0.5)
    method.forward = lambda *_: pytest.fail("it is of the other config")  # type: ignore[method-assign]
    method.register_forward_pre_hook(lambda *_: pytest.fail("so is this"))

    class FSDPModule:
        def __new__(cls, *_: Any, **__: Any) -> Any:
            raise AssertionError("made by wrapping alone")

    method.__class__ = type("FSDPMP3", (FSDPModule, MP3), {})  # as `fully_shard` does
    view = method.at(0.0)
    assert type(view) is MP3 and view.position_head is method.position_head and view.context == 6
    assert view(batch(), view.draw(batch(), When())).loss.isfinite()
