"""Captured uploads: every format gives the same gradients, and damage of any kind is one sentence."""

from __future__ import annotations

import math
import os
import pickle
import zipfile
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from situs.audit.captured import Captured, _rounding, load_weights, open_uploads
from situs.audit.defences import create_defence
from situs.audit.victim import Victim, load_test_set, open_victim
from situs.errors import SitusError

RATE = 0.05
SHAPE = {"img_size": 16, "patch_size": 4, "embed_dim": 48, "depth": 1, "num_heads": 2}


class Sent:
    """A model before a step, its gradients, and its weights after a step of SGD, each by torch itself."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = timm.create_model("vit_tiny_patch16_224", **SHAPE, num_classes=5)
        self.victim: Victim = open_victim(self.module)
        chance = torch.Generator().manual_seed(1)
        picture = torch.randint(0, 256, (16, 16, 3), generator=chance, dtype=torch.uint8).numpy()
        self.pictures = [picture]
        self.image = load_test_set(self.victim, self.pictures, 1).pixels
        trained = timm.create_model("vit_tiny_patch16_224", **SHAPE, num_classes=5)
        trained.load_state_dict(self.module.state_dict())
        F.cross_entropy(trained(self.image), torch.tensor([2])).backward()
        self.gradients = {name: p.grad.clone() for name, p in trained.named_parameters() if p.grad is not None}
        torch.optim.SGD(trained.parameters(), lr=RATE).step()
        self.after = {name: value.clone() for name, value in trained.state_dict().items()}
        self.difference = {name: value - self.after[name] for name, value in self.module.state_dict().items()}

    def open(self, uploads: Any, *defences: str, **asked: Any) -> list[Captured]:
        return open_uploads(uploads, self.victim.trains, [create_defence(name) for name in defences], **asked)


@pytest.fixture(scope="module")
def sent() -> Sent:
    return Sent()


def numpy_list(state: dict[str, Tensor]) -> list[np.ndarray]:
    return [value.numpy() for value in state.values()]


def prefixed(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in state.items()}


def same(captured: Captured, gradients: dict[str, Tensor]) -> bool:
    return all(torch.equal(captured.gradients[f"model.{name}"], value) for name, value in gradients.items())


def saved(path: Path, state: dict[str, Tensor], kind: str) -> Path:
    if kind == "safetensors":
        save_file(state, path / "a.safetensors")
    elif kind == "pt":
        torch.save(state, path / "a.pt")
    elif kind == "nested.pt":
        torch.save({"round": 3, "state_dict": state}, path / "a.pt")
    elif kind == "list.pt":
        torch.save(list(state.values()), path / "a.pt")
    elif kind == "npz":
        np.savez(path / "a.npz", **{name: value.numpy() for name, value in state.items()})
    elif kind == "list.npz":
        np.savez(path / "a.npz", *numpy_list(state))
    return path / f"a.{kind.rpartition('.')[2]}"


@pytest.mark.parametrize("kind", ["safetensors", "pt", "nested.pt", "list.pt", "npz", "list.npz"])
def test_every_format_gives_the_same_gradients(sent: Sent, tmp_path: Path, kind: str) -> None:
    [captured] = sent.open(saved(tmp_path, sent.gradients, kind))
    assert captured.sent == "gradient" and captured.rounding == 0
    assert same(captured, sent.gradients)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "backbone.", "model.", "a.b.c."])
def test_a_prefix_is_no_matter(sent: Sent, prefix: str) -> None:
    [captured] = sent.open(prefixed(prefix, sent.gradients))
    assert same(captured, sent.gradients)


def test_what_is_sent_shows_in_the_numbers(sent: Sent) -> None:
    """Weights, and differences of either sign, are told from gradients, and are the same step."""
    negative = {name: -value for name, value in sent.difference.items()}
    for upload, kind in ((sent.after, "weights"), (sent.difference, "difference"), (negative, "difference")):
        [captured] = sent.open(upload)
        assert captured.sent == kind and captured.rounding > 0
        assert "not random noise" in captured.caveat(create_defence("none"), 1)
        assert captured.caveat(create_defence("noise=1"), 1) == ""
        assert same(captured, sent.difference)
        gradients, rounding = captured.under(create_defence(f"fedavg=1:{RATE}"))
        for name, gradient in sent.gradients.items():
            off = (gradients[f"model.{name}"] - gradient).double()
            size = torch.maximum(sent.module.state_dict()[name].abs(), sent.after[name].abs()).max().double()
            assert float(off.abs().max()) <= float(size) * 2**-23 / RATE  # one rounding of the weight
        matrices = [name for name, g in sent.gradients.items() if g.dim() > 1]
        off = torch.cat([(gradients[f"model.{n}"] - sent.gradients[n]).double().flatten() for n in matrices])
        assert float(off.square().mean().sqrt()) == pytest.approx(rounding, rel=0.2)  # as stated


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rounded_before", [False, True])
def test_rounding_of_half_precision_is_stated_and_no_less_than_it_is(
    sent: Sent, dtype: torch.dtype, rounded_before: bool
) -> None:
    """Weights of half precision and their difference, in their own type or in float32: the error of the step is at most
    what is stated, and within a factor of ten; twice rounded where the client may have begun with rounded weights."""
    before = {name: value.to(dtype) for name, value in sent.module.state_dict().items()}
    start = {n: v.float() for n, v in before.items()} if rounded_before else sent.module.state_dict()
    after = {name: (start[name] - sent.difference[name]).to(dtype) for name in start}
    difference = {name: before[name] - after[name] for name in before}
    kind = str(dtype).removeprefix("torch.")
    for upload, what in ((after, "weights"), (difference, "difference")):
        for state in (upload, {name: value.float() for name, value in upload.items()}):
            [captured] = sent.open(state)
            assert (captured.sent, captured.rounded_to) == (what, kind)
            off = [captured.gradients[f"model.{n}"] - d for n, d in sent.difference.items() if d.dim() > 1]
            error = float(torch.cat([part.double().flatten() for part in off]).square().mean().sqrt())
            assert error <= captured.rounding <= 10 * error
            assert f"rounded to {kind}" in captured.caveat(create_defence("noise=1e-6"), 1)
    exact = open_victim(rounded_module := timm.create_model("vit_tiny_patch16_224", **SHAPE, num_classes=5))
    rounded_module.load_state_dict({name: value.float() for name, value in before.items()})
    [once] = open_uploads(after, exact.trains)
    [twice] = sent.open(after)
    assert twice.rounding == pytest.approx(2**0.5 * once.rounding, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_short_gradient_is_no_difference(sent: Sent, dtype: torch.dtype) -> None:
    """w - g often lands on float32 where g has few digits."""
    chance = torch.Generator().manual_seed(0)
    weights = sent.module.state_dict()
    small = {n: w / 64 * (1 + torch.rand(w.shape, generator=chance)) for n, w in weights.items()}
    [captured] = sent.open({name: g.to(dtype).float() for name, g in small.items()})
    assert captured.sent == "gradient" and captured.rounding == 0


def test_noise_on_a_difference_is_no_certain_difference(sent: Sent) -> None:
    chance = torch.Generator().manual_seed(0)
    noisy = {name: v + 1e-3 * torch.randn(v.shape, generator=chance) for name, v in sent.difference.items()}
    assert sent.open(noisy)[0].sent == "gradient"
    assert sent.open(noisy, sent="difference")[0].sent == "difference"


def test_several_uploads_and_one_list_of_arrays(sent: Sent) -> None:
    arrays = numpy_list(sent.after)
    assert [one.name for one in sent.open([sent.gradients, arrays])] == ["upload 1", "upload 2"]
    assert len(sent.open(arrays)) == 1


def test_a_missing_tensor_needs_a_reason(sent: Sent) -> None:
    part = {name: value for name, value in sent.gradients.items() if name != "pos_embed"}
    with pytest.raises(SitusError, match=r"lacks 1 of .* that the model trains .model.pos_embed.*exclude=PATTERN"):
        sent.open(part)
    for stated in ("no-pe-gradient", "exclude=pos_embed"):
        assert "model.pos_embed" not in sent.open(part, stated)[0].gradients


def tampered(sent: Sent, **changes: Tensor | None) -> dict[str, Tensor]:
    state = {**sent.gradients, **changes}
    return {name: value for name, value in state.items() if value is not None}


HEAD = "head.weight"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda s: tampered(s, **{HEAD: torch.full((5, 48), torch.nan)}), "head.weight contains NaN"),
        (lambda s: tampered(s, **{HEAD: torch.full((5, 48), torch.inf)}), "head.weight contains infinity"),
        (lambda s: tampered(s, **{HEAD: torch.zeros(5, 47)}), r"head.weight has shape \[5, 47\], .* \[5, 48\]"),
        (lambda s: tampered(s, **{HEAD: torch.zeros(5, 48, dtype=torch.int8)}), "head.weight is torch.int8"),
        (lambda s: tampered(s, **{HEAD: None}), "lacks 1 of 20 tensors"),
        (lambda s: tampered(s, unheard=torch.zeros(2)), r"1 of its 21 names .* \(unheard\)"),
        (lambda s: {name: torch.zeros_like(g) for name, g in s.gradients.items()}, "only zeros"),
        (lambda s: dict(s.module.state_dict()), "it contains no update"),
        (lambda s: numpy_list(s.after)[1:], "holds 19 arrays, .*20 tensors"),
        (lambda s: {}, "holds no tensors"),
        (lambda s: {"head.weight": "text"}, "head.weight is str, not an array"),
        (lambda s: {"arr_0": torch.ones(2), "arr_2": torch.ones(2)}, "number 1 is missing"),
        (lambda s: {**s.gradients, "_orig_mod.head.weight": torch.ones(5, 48)}, "differ only by a wrapper's prefix"),
        (lambda s: 3, "upload: must be files, .*, not int"),
        (lambda s: tampered(s, **{HEAD: torch.empty(5, 48, device="meta")}), "head.weight is a meta tensor"),
        (
            lambda s: tampered(s, **{HEAD: torch.zeros(5, 48).double() + 1e300}),
            "head.weight has numbers too large for float32",
        ),
        (lambda s: {HEAD: np.zeros((5, 48), "V2")}, r"head.weight is an array of \|V2, .* save bfloat16 as float32"),
        (lambda s: {HEAD: np.full((5, 48), "a")}, "head.weight is an array of <U1, not an array of numbers$"),
        (lambda s: {HEAD: torch.ones(5, 47)}, r"head.weight has shape \[5, 47\]"),  # and no name of another part
        (lambda s: tampered(s, **{"a\nb\x1b[31m": torch.ones(2)}), r"is not in the model \(a\\nb\\x1b\[31m\)"),
    ],
)
def test_tampered_uploads_are_refused_in_one_sentence(sent: Sent, make: Any, reason: str) -> None:
    with pytest.raises(SitusError, match=reason) as raised:
        sent.open(make(sent))
    assert str(raised.value).isprintable()


def test_a_stated_kind_that_is_not_true_is_refused(sent: Sent) -> None:
    with pytest.raises(SitusError, match="its values are the weights of the model"):
        sent.open(sent.after, sent="gradient")
    with pytest.raises(SitusError, match="open the model as it was before the step"):
        sent.open(sent.gradients, sent="weights")


class Boom:
    def __reduce__(self) -> Any:
        return (Path("boom").touch, ())


@pytest.mark.parametrize("ending", ["safetensors", "pt", "npz"])
def test_truncated_files_are_refused(sent: Sent, tmp_path: Path, ending: str) -> None:
    whole = saved(tmp_path, sent.gradients, ending).read_bytes()
    for length in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / f"b.{ending}").write_bytes(whole[:length])
        with pytest.raises(SitusError, match="cannot be read: it is damaged, truncated or of another format"):
            sent.open(tmp_path / f"b.{ending}")


def test_code_in_files_is_never_run(sent: Sent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"head.weight": Boom()}, "a.pt")
    Path("b.pt").write_bytes(pickle.dumps(Boom()))
    np.savez("c.npz", head=np.array([Boom()], dtype=object))
    for name in ("a.pt", "b.pt", "c.npz"):
        with pytest.raises(SitusError, match="contains Python objects, which are never loaded"):
            sent.open(name)
    assert not Path("boom").exists()
    with pytest.raises(SitusError, match="no such file"):
        sent.open("d.npz")
    Path("e.csv").write_text("1")
    with pytest.raises(SitusError, match=r"must be one of .safetensors, .pt, .pth, .npz"):
        sent.open("e.csv")


def test_unusual_paths_and_files_are_refused(sent: Sent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.npz").mkdir()
    Path("loop.npz").symlink_to("loop.npz")
    os.mkfifo("pipe.npz")
    Path("picture.npz").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    Path("header.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{")
    torch.save(tampered(sent, **{HEAD: torch.ones(5, 48).to_sparse()}), "sparse.pt")  # torch warns of it
    with zipfile.ZipFile("large.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("head.weight.npy", bytes(2**27))
    for name, reason in {
        "folder.npz": "is not a regular file",
        "loop.npz": "no such file",
        "pipe.npz": "is not a regular file",
        "picture.npz": "damaged, truncated or of another format",
        "header.safetensors": "damaged, truncated or of another format",
        "sparse.pt": "head.weight is sparse",
        "large.npz": "holds 134,217,728 bytes, .*needs at most",
        "x" * 300: "cannot be read: file name too long",
    }.items():
        with pytest.raises(SitusError, match=f"upload={name}: .*{reason}"):
            sent.open(name)
    np.savez("a.npz", **{name: g.numpy() for name, g in sent.gradients.items()})
    Path("A.NPZ").symlink_to("a.npz")
    assert same(sent.open("A.NPZ")[0], sent.gradients)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(SitusError, match=r"upload=a\.npz: cannot be read: permission denied"):
        sent.open("a.npz")


def test_a_file_without_tensors_and_weights_of_another_shape_are_refused(sent: Sent, tmp_path: Path) -> None:
    torch.save(3, tmp_path / "a.pt")
    with pytest.raises(SitusError, match="contains a int, but must contain tensors by name or in order"):
        sent.open(tmp_path / "a.pt")
    before, model = {**sent.module.state_dict()}, open_victim(deepcopy(sent.module)).trains
    said = r"the weights before the step: head.weight has shape \[5, 47\], but shape \[5, 48\] in the model"
    with pytest.raises(SitusError, match=said):
        load_weights(model, {**before, HEAD: torch.ones(5, 47)})
    load_weights(model, {**before, HEAD: torch.ones(5, 48)})
    assert float(dict(model.named_parameters())[f"model.{HEAD}"].min()) == 1.0


@pytest.mark.parametrize(("rounded", "times"), [(True, 1), (False, 2)])
def test_rounding_is_uniform_within_a_step_of_the_type_and_twice_where_the_start_was_rounded_too(
    rounded: bool, times: int
) -> None:
    weights = 1 + torch.rand(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = weights.half().double() if rounded else weights
    step = torch.finfo(torch.float16).eps  # between 1 and 2
    upload = {"w": 1e-6 * torch.ones(64, 64), "b": torch.ones(64)}
    found = _rounding(upload, {"w": weights, "b": torch.ones(64)}, torch.float16)
    assert found == pytest.approx(math.sqrt(times / 12) * step, rel=1e-3)
    assert _rounding({"b": upload["b"]}, {"b": torch.ones(64)}, torch.float16) == 0.0


def refuse(*_: Any, **__: Any) -> None:
    raise PermissionError(13, "Permission denied")


class Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Flatten(), nn.Linear(48, 4), nn.Linear(4, 3)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


def test_names_that_fit_two_places_are_ambiguous() -> None:
    victim = open_victim(Twins(), img_size=4)
    part = {
        "1.weight": torch.ones(4, 48),
        "1.bias": torch.ones(4),
        "2.weight": torch.ones(3, 4),
        "2.bias": torch.ones(3),
    }
    with pytest.raises(SitusError, match=r"its names fit several modules \(model.left.… and model.right.…\)"):
        open_uploads(part, victim.trains)


def test_buffers_of_a_state_dict_are_left_out() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(128, 3))
    victim = open_victim(module, img_size=16)
    state = {n: v + 1e-3 if v.is_floating_point() else v + 1 for n, v in module.state_dict().items()}
    for upload in (state, [v.numpy() for v in state.values()]):
        [captured] = open_uploads(upload, victim.trains)
        assert captured.sent == "weights"
        assert captured.gradients.keys() == {name for name, _ in victim.model.backbone.named_parameters()}


@pytest.mark.parametrize(("ratio", "said"), [(0.05, False), (0.1, False), (0.11, True), (5.0, True)])
@pytest.mark.parametrize("rate", [None, 0.5])
def test_rounding_that_the_stated_noise_drowns_is_no_caveat(ratio: float, said: bool, rate: float | None) -> None:
    """In units of the gradient: a difference of weights is the rate times it."""
    weights = {"w": torch.full((2, 2), 3.0)}
    captured = Captured("it", weights, "difference", ratio * (rate or 1.0), "bfloat16")
    stated = create_defence("noise=1" if rate is None else f"fedavg=2:{rate / 2}+noise=1")
    gradients, rounding = captured.under(stated)
    assert rounding == pytest.approx(ratio) and torch.equal(gradients["w"], weights["w"] / (rate or 1.0))
    assert bool(captured.caveat(stated, 1)) is said
    both = replace(captured, mismatch="it is of other images").caveat(stated, 1)
    assert both.startswith("it is of other images") and ("; the upload comes from" in both) is said
    plain = replace(captured, sent="gradient")
    assert plain.under(stated)[0] is weights and plain.under(stated)[1] == captured.rounding
