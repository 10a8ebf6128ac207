"""Groups read off the graph: the curated adapters are the oracle; what is not certified is not given."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from zoo import ZOO, make

from situs.backbones.timm import VitBackbone
from situs.errors import SitusError
from situs.locks import trace_ops
from situs.locks.axes import axis, freeze, leaves, length, partition, unify
from situs.locks.equivariance import verify
from situs.locks.groups import groups_of, permute_state, random_keys, residual_only
from situs.locks.members import Group
from situs.locks.trace import trace_backbone, trace_module

WIDTH = 12


def axes_of(groups: tuple[Group, ...]) -> list[tuple[int, set[tuple[Any, ...]]]]:
    """Size and members, without the names that tracing cannot know."""
    return [(g.size, {(m.tensor, m.axis, m.outer, m.inner) for m in g.members}) for g in groups]


def z() -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))


class Residual(nn.Module):
    """z + f(norm(z)), with a weight on either side of whatever stands in the middle."""

    def __init__(self, middle: nn.Module | None = None, stream: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.middle = nn.Identity() if middle is None else middle
        self.stream = nn.Identity() if stream is None else stream

    def forward(self, z: Tensor) -> Tensor:
        return z + self.stream(self.down(self.middle(torch.tanh(self.up(self.norm(z))))))


class Call(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


# --- against the adapters ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ZOO)
def test_tracing_finds_the_residual_key_that_the_adapter_names(name: str) -> None:
    backbone = make(name, torch.float32)
    traced = trace_backbone(backbone)
    assert axes_of(residual_only(traced.groups)) == axes_of(residual_only(groups_of(backbone)))
    assert traced.error < 1e-10
    assert traced.unknown == traced.dropped == ()
    assert {g.size for g in traced.groups if g.kind == "hidden"}, "the MLP's units at least are free"


def test_a_class_that_no_adapter_knows_is_traced_by_verify() -> None:
    class Mine(VisionTransformer):
        pass

    torch.manual_seed(0)
    backbone = VitBackbone(Mine(img_size=32, patch_size=16, embed_dim=24, depth=1, num_heads=3), "mine")
    with pytest.raises(SitusError, match="no lock is known for the class"):
        groups_of(backbone)
    verdict = verify(backbone, steps=1)
    assert verdict.whole("column").status == "needs keyed weights"
    assert verdict.worst < 1e-10


# --- modules of any kind -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_first", [True, False])
def test_torchs_own_encoder(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 3, 20, batch_first=True, norm_first=norm_first, activation="gelu")
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train()
    traced = trace_module(encoder, z())
    assert encoder.training
    assert [(g.name, g.size) for g in traced.groups[:1]] == [("residual", WIDTH)]
    assert sorted(g.size for g in traced.groups[1:]) == [3, 3, 4, 4, 20, 20]
    encoder.eval()
    with torch.no_grad():
        before = encoder(z())
        keys = random_keys(traced.groups, torch.Generator().manual_seed(4))
        encoder.load_state_dict(permute_state(encoder.state_dict(), traced.groups, keys))
        p = keys["residual"]
        assert (encoder(z()[..., p]) - before[..., p]).abs().max() < 1e-5
        assert (encoder(z()) - before).abs().max() > 1e-2


def test_an_unknown_operation_inside_freezes_what_it_touches_and_is_reported() -> None:
    plain, odd = trace_module(Residual(), z()), trace_module(Residual(Call(lambda x: x.cumsum(-1))), z())
    assert odd.unknown == ("cumsum",)
    assert axes_of(odd.groups) == axes_of(residual_only(plain.groups))
    assert [g.size for g in plain.groups] == [WIDTH, 20]


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda x: x.cumsum(-1), "unknown operation cumsum"),
        (lambda x: torch.fft.rfft(x).abs()[..., :1] + x, "unknown operation fft_rfft"),
        (lambda x: x.roll(1, dims=-1), "roll"),
        (lambda x: torch.cat([x[..., 1:], x[..., :1]], dim=-1), "cat"),
        (lambda x: x * torch.arange(WIDTH), "constant"),
        (lambda x: nn.functional.conv1d(x, torch.ones(5, 5, 3), padding=1), "conv1d"),
        (lambda x: x.unflatten(-1, (3, 4)).softmax(-1).flatten(-2), "are cut in 3 x 4"),
    ],
)
def test_an_operation_on_the_stream_refuses_it_by_name(function: Any, named: str) -> None:
    with pytest.raises(SitusError, match=f"the channels of the stream going in .*{named}"):
        trace_module(Residual(stream=Call(function)), z())


def test_a_buffer_counts_where_it_is_saved_and_freezes_where_it_is_not() -> None:
    class Shift(nn.Module):
        def __init__(self, saved: bool) -> None:
            super().__init__()
            self.register_buffer("by", torch.linspace(0, 1, WIDTH), persistent=saved)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.by

    (residual, _) = trace_module(Residual(stream=Shift(saved=True)), z()).groups
    assert "stream.by" in {m.tensor for m in residual.members}
    with pytest.raises(SitusError, match=r"buffer stream\.by, which no state dict holds"):
        trace_module(Residual(stream=Shift(saved=False)), z())


def test_what_cannot_be_exported_is_one_sentence() -> None:
    with pytest.raises(SitusError, match="Residual cannot be exported"):
        trace_module(Residual(stream=Call(lambda x: x if float(x.sum()) > 0 else -x)), z())


def test_nothing_to_key_is_no_lock() -> None:
    with pytest.raises(SitusError, match="nothing to key"):
        trace_module(Call(torch.tanh), z())


def test_a_wrong_rule_does_not_pass_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The types are a guess; were cumsum taken for an element-wise step, the check would still refuse."""
    monkeypatch.setitem(trace_ops.RULES, "cumsum", trace_ops.RULES["tanh"])
    with pytest.raises(SitusError, match="fail the check"):
        trace_module(Residual(stream=Call(lambda x: x.cumsum(-1))), z())
    inside = trace_module(Residual(Call(lambda x: x.cumsum(-1))), z())
    assert [g.size for g in inside.groups] == [WIDTH]
    assert inside.dropped == ("inner.up.weight.0.1",)


# --- axes ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(2, 4), min_size=1, max_size=5), st.data())
def test_a_view_and_back_meets_itself(factors: list[int], data: st.DataObject) -> None:
    """Merging neighbours any way and cutting them again hands every atom back to its own axis."""
    start = [axis(n) for n in factors]
    flat = [atom for each in start for atom in each]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(factors)))) | {len(factors)})
    merged = [prod(factors[a:b]) for a, b in zip([0, *cuts], cuts, strict=False) if b > a]
    viewed = partition(flat, merged, "view")
    assert [length(each) for each in viewed] == merged
    again = partition([atom for each in viewed for atom in each], factors, "view")
    assert [leaves(each) for each in again] == [leaves(each) for each in start]
    assert all(atom.frozen is None for atom in flat)


def test_united_axes_share_their_cuts_and_their_frost() -> None:
    whole, parts = axis(24), [*axis(3), *axis(8)]
    unify(whole, parts, "add")
    assert leaves(whole) == leaves(parts)
    freeze([parts[0]], "slice")
    assert [atom.frozen for atom in leaves(whole)] == ["slice", None]


def test_cuts_that_do_not_meet_freeze_both() -> None:
    a, b = [*axis(2), *axis(6)], [*axis(3), *axis(4)]
    unify(a, b, "add")
    assert all(atom.frozen for atom in leaves([*a, *b]))
    assert all(atom.frozen for atom in leaves(partition([*axis(4), *axis(6)], (3, 8), "view")[0]))
