"""`guard` against steps that look harmless because of what they are held against: each kind with neighbours.

Every setup here ended in "below" where a picture of the image, or all of it, was in what was sent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, cast

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs import audit
from situs.audit import reference
from situs.audit.attacks.base import Attack
from situs.audit.one_step import Reidentified, alike
from situs.audit.scores import denormalise
from situs.audit.watch import Guard, Look
from situs.errors import SitusError

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Own(nn.Module):
    """Patches, a table, one encoder layer; `change` is done to its images in training mode."""

    def __init__(
        self, change: Callable[[Tensor], Tensor] | None = None, dropout: float = 0.0, conv: bool = False
    ) -> None:
        super().__init__()
        self.change, self.conv = change, conv
        self.patches = nn.Conv2d(3, 48, 4, 4) if conv else nn.Linear(48, 48)
        self.positions = nn.Parameter(torch.randn(16, 48) * 0.2)
        self.mix = nn.TransformerEncoderLayer(48, 4, 96, dropout=dropout, batch_first=True, norm_first=True)
        self.head = nn.Linear(48, 5)

    def forward(self, images: Tensor) -> Tensor:
        images = self.change(images) if self.change is not None and self.training else images
        if self.conv:
            tokens = self.patches(images).flatten(2).mT
        else:
            cut = images.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
            tokens = self.patches(cut)
        return self.head(self.mix(tokens + self.positions).mean(dim=1))


def own(*args: Any, **asked: Any) -> Own:
    torch.manual_seed(0)
    return Own(*args, **asked)


def vit(**asked: Any) -> nn.Module:
    torch.manual_seed(0)
    shape = {"img_size": 16, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", **shape, num_classes=5, **asked)


def batches(count: int, size: int = 1, seed: int = 1, normalisation: Any = IMAGENET) -> list[tuple[Tensor, Tensor]]:
    """Smooth pictures of bytes, no two alike."""
    chance = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count * size, 3, 4, 4, generator=chance)
    fine = F.interpolate(coarse, size=(16, 16), mode="bilinear") * 0.8 + 0.2 * torch.rand(
        count * size, 3, 16, 16, generator=chance
    )
    pixels = (fine * 255).round().view(count, size, 3, 16, 16) / 255
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in normalisation)
    return [((x - mean) / std, torch.arange(size) % 5) for x in pixels]


def add_noise(module: nn.Module, sigma: float, wanted: Callable[[str, Tensor], bool] = lambda *_: True) -> None:
    for name, p in module.named_parameters():
        if p.grad is not None and wanted(name, p):
            p.grad = p.grad + sigma * torch.randn_like(p)


OTHERS = [(denormalise(x, *IMAGENET)[0] * 255).round().to(torch.uint8) for x, _ in batches(32, seed=7)]
"""Other images, no two alike: what `Memory.keep` keeps of them."""


def experienced(watch: Guard) -> Guard:
    """A guard that has seen other images in earlier looks, and found none again."""
    watch._memory.decoys.extend(OTHERS)
    watch._memory.looks["patchembed"] = deque([Reidentified(0, 1, 1 / 32)])
    return watch


def watched(module: nn.Module, change: Callable[[nn.Module], None] = lambda _: None, **asked: Any) -> list[Look]:
    """The looks at a loop of one's own, in training mode. change: what is done to the gradients before a step."""
    seen: list[Look] = []
    steps, size = asked.pop("steps", 1), asked.pop("size", 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    asked = {"img_size": 16} | asked if isinstance(module, Own) else {k: v for k, v in asked.items() if k != "img_size"}
    watch = audit.guard(module, optimizer, every=1, act=seen.append, **cast("Any", {"attacks": ["patchembed"]} | asked))
    experienced(watch)
    module.train()
    torch.manual_seed(3)
    for images, labels in batches(steps, size):
        optimizer.zero_grad()
        F.cross_entropy(module(images), labels).backward()
        change(module)
        optimizer.step()
    return seen


def by_hand(module: nn.Module, change: Callable[[nn.Module], None] = lambda _: None, **asked: Any) -> list[Look]:
    """The same with `look`, in eval mode."""
    seen: list[Look] = []
    steps, size, mode = asked.pop("steps", 1), asked.pop("size", 1), asked.pop("train", False)
    asked = {"img_size": 16} | asked if isinstance(module, Own) else asked
    watch = experienced(audit.guard(module, act=seen.append, **cast("Any", {"attacks": ["patchembed"]} | asked)))
    torch.manual_seed(3)
    for images, labels in batches(steps, size):
        module.zero_grad()
        F.cross_entropy(module.train(mode)(images), labels).backward()
        change(module)
        watch.look(images)
    return seen


# --- augmentation inside the module ---------------------------------------------------------------------------------


def mixup(x: Tensor) -> Tensor:
    [(other, _)] = batches(1, 1, seed=9)
    return 0.5 * x + 0.5 * other


def jitter(x: Tensor) -> Tensor:
    return x * (0.2 + 0.3 * torch.rand(len(x), 3, 1, 1)) + torch.rand(len(x), 3, 1, 1)


def cropped(x: Tensor) -> Tensor:
    top, left = torch.randint(1, 5, (2,)).tolist()
    return F.interpolate(x[:, :, top : top + 8, left : left + 8], size=(16, 16), mode="bilinear")


def shifted(x: Tensor) -> Tensor:
    return torch.roll(x, (5 + int(torch.randint(3, ())), 6), dims=(2, 3))


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda x: x.flip(3) if torch.rand(()) < 2 else x,
    "jitter": jitter,
    "crop": cropped,
    "shift": shifted,
    "mixup": mixup,
    "turned": lambda x: torch.rot90(x, 1 + int(torch.randint(3, ())), (2, 3)),
    "erased": lambda x: torch.where(torch.rand_like(x[:, :1]) < 0.6, torch.zeros_like(x), x),
    "numpy": lambda x: torch.roll(x, int(np.random.randint(5, 9)), dims=2),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("kind", "conv"),
    [
        pytest.param(kind, conv, marks=[pytest.mark.slow] * (conv and kind not in ("turned", "crop")))
        for kind in CHANGES
        for conv in (False, True)
    ],
)
def test_what_the_first_layer_was_fed_in_training_is_the_reference(kind: str, conv: bool) -> None:
    [look] = watched(own(CHANGES[kind], conv=conv))
    assert look.answer == "above" and look.value is not None and look.value > 40


@pytest.mark.parametrize("kind", ["dropout", "autocast", "micro-batches", "label smoothing", "jitter"])
def test_a_step_is_made_again_to_rounding(kind: str) -> None:
    """Dropout, augmentation and all: the gradient of the copy is that of the loop."""
    module = own(CHANGES["jitter"] if kind == "jitter" else None, dropout=0.3 if kind == "dropout" else 0.0).train()
    witness = reference.Witness(module, None, lambda: True)
    for images, labels in batches(2 if kind == "micro-batches" else 1, 3):
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            loss = F.cross_entropy(module(images), labels, label_smoothing=0.2 * (kind == "label smoothing"))
        loss.backward()
    witness.close()
    before = reference.Chance.now()
    again = reference.replay(module, witness.passes)
    assert before.same(reference.Chance.now()) and isinstance(again, dict)
    for name, p in module.named_parameters():
        torch.testing.assert_close(again[name], p.grad, rtol=1e-4, atol=1e-6)
    assert reference.compare({n: p.grad for n, p in module.named_parameters() if p.grad is not None}, again).quiet


@pytest.mark.parametrize("size", [1, 3])
def test_the_slopes_of_a_loss_are_read_off_the_classifier(size: int) -> None:
    module, [(images, labels)] = own().eval(), batches(1, size)
    F.cross_entropy(module(images), labels).backward()
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    hard, free = reference.guessed_passes(module, images, gradients)
    wanted = reference.cross_entropy_slopes(module(images).detach(), labels)
    for each in (hard, free):
        assert each.slopes is not None
        torch.testing.assert_close(each.slopes, wanted, rtol=1e-4, atol=1e-6)
    assert not reference.guessed_passes(module, images, {n: g for n, g in gradients.items() if "head" not in n})


@pytest.mark.parametrize(("images", "guesses"), [(13, 2), (14, 0)])
def test_no_slopes_are_read_off_a_classifier_with_fewer_features_than_images(images: int, guesses: int) -> None:
    """Twelve features and a bias determine the slopes of thirteen images; NaN determines none."""
    torch.manual_seed(0)
    module, batch = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), torch.randn(images, 3, 2, 2)
    labels = torch.arange(images) % 3
    F.cross_entropy(module(batch), labels).backward()
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    assert len(reference.guessed_passes(module, batch, gradients)) == guesses
    gradients["1.bias"][0] = math.nan
    assert not reference.guessed_passes(module, batch, gradients)


class Doubled(Own):
    """In training, sees each image and its mirror image at once, and gives the mean of both."""

    def forward(self, images: Tensor) -> Tensor:
        if not self.training:
            return super().forward(images)
        both = super().forward(torch.cat([images, images.flip(3)]))
        return both.unflatten(0, (2, -1)).mean(dim=0)


class Shrinking(Own):
    """Gives one logit less at each call."""

    calls = 0

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(images)[:, : 6 - self.calls]


UNTOLD: dict[str, tuple[type[Own], bool, str]] = {
    "two of each image": (Doubled, True, "the module's first layer got another number of images than the module"),
    "another output": (Shrinking, True, "the module's output differed in a second pass of the same images"),
    "no loss": (Own, False, "no loss was backpropagated through the module's output"),
}


@pytest.mark.parametrize("kind", UNTOLD)
def test_a_step_that_cannot_be_made_again_is_never_below(kind: str) -> None:
    torch.manual_seed(0)
    make, lossy, said = UNTOLD[kind]
    module, seen = make().train(), list[Look]()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    given: Any = {"img_size": 16, "attacks": ["patchembed"], "defence": "noise=3"}
    experienced(audit.guard(module, optimizer, every=1, act=seen.append, **given))
    [(images, labels)] = batches(1)
    logits = module(images)
    if lossy:
        F.cross_entropy(logits, labels).backward()
    for p in module.parameters():
        p.grad = 3.0 * torch.randn_like(p)
    optimizer.step()
    assert seen[0].answer == "inconclusive" and said in seen[0].reason, seen[0].reason


@pytest.mark.parametrize(
    ("frozen", "backward", "stray"), [(True, False, True), (False, False, False), (False, True, True)]
)
def test_a_pass_in_eval_mode_is_stray_where_its_gradient_comes_back_or_cannot_be_watched(
    frozen: bool, backward: bool, stray: bool
) -> None:
    module, [(images, labels)] = own(), batches(1)
    stem = audit.guard(module, img_size=16)._module_stem
    witness = reference.Witness(module.train(), stem, lambda: True)
    module.patches.requires_grad_(not frozen)
    loss = F.cross_entropy(module(images), labels)
    assert not witness.stray and len(witness.passes) == 1
    loss = F.cross_entropy(module.eval()(images), labels)
    if backward:
        loss.backward()
    assert witness.stray is stray
    witness.forget()
    assert not witness.stray and not witness.passes


def test_micro_batches_of_one_step_are_each_held_against_what_was_fed() -> None:
    module, seen = own(CHANGES["turned"]), list[Look]()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    watch = audit.guard(module, optimizer, img_size=16, every=1, act=seen.append, attacks=["patchembed"])
    for images, labels in batches(2):
        F.cross_entropy(module(images), labels).backward()
    assert watch._witness is not None and [len(each.fed) for each in watch._witness.passes] == [1, 1]
    optimizer.step()
    assert seen[0].answer == "above" or "batch of 2" in seen[0].reason


@pytest.mark.thin(3)
@pytest.mark.parametrize("kind", ["turned", "mixup", "jitter", "numpy", "crop", "rare", "rare in numpy"])
def test_by_hand_a_module_that_draws_has_no_known_reference(kind: str) -> None:
    rare: dict[str, Callable[[Tensor], Tensor]] = {
        "rare": lambda x: x.flip(3) if torch.rand(()) < 1e-3 else x,
        "rare in numpy": lambda x: x.flip(3) if np.random.rand() < 1e-3 else x,
    }
    module = own({**CHANGES, **rare, "mixup": lambda x: mixup(x) + 0 * torch.rand(())}[kind])
    looks = by_hand(module, lambda m: add_noise(m, 3.0), defence="noise=3", train=kind not in rare)
    assert all(look.answer == "inconclusive" for look in looks)
    assert "changes its images at random" in looks[-1].reason


def broken(_: Tensor) -> Tensor:
    raise ValueError("no such image")


def flipped_once(when: int) -> Callable[[Tensor], Tensor]:
    """Flips the images of one call; without a random number, for example by a count of its own."""
    calls = iter(range(9))
    return lambda x: x.flip(3) if next(calls) == when else x


AT_RANDOM = "in training mode the module changes its images at random"
TRIED: dict[str, tuple[Callable[[], Callable[[Tensor], Tensor] | None], str, list[str]]] = {
    "plain": (lambda: None, "", ["plain", "plain"]),
    "flip": (lambda: lambda x: x.flip(3), "", ["flipped", "plain"]),
    "jitter": (lambda: jitter, AT_RANDOM, ["plain"]),
    "drawn": (lambda: lambda x: x + 0 * torch.rand(()), AT_RANDOM, ["plain"]),
    "first call": (lambda: flipped_once(0), AT_RANDOM, ["plain"]),
    "second call": (lambda: flipped_once(1), AT_RANDOM, ["plain"]),
    "third call": (lambda: flipped_once(2), AT_RANDOM, ["plain"]),
    "doubled": (lambda: lambda x: torch.cat([x, x]), "does not get the same input in training mode", ["any"] * 4),
    "broken": (lambda: broken, "cannot be computed: no such image", []),
}


@pytest.mark.parametrize("kind", TRIED)
def test_what_a_module_does_to_images_in_training_is_tried(kind: str) -> None:
    change, reason, views = TRIED[kind]
    module, [(images, _)] = own().eval(), batches(1, 2)
    stem = audit.guard(module, img_size=16)._module_stem
    [plain, _], _ = reference.draws(module, stem, images)
    [flipped, _], _ = reference.draws(module, stem, images.flip(3))
    assert plain.shape == (2, 16, 48) and not torch.allclose(plain, flipped)
    module.change, before = change(), reference.Chance.now()
    rows, why = reference.draws(module, stem, images)
    assert reason in why and bool(reason) == bool(why)
    assert before.same(reference.Chance.now()) and not module.training
    assert len(rows) == len(views)
    for part, view in zip(rows, views, strict=True):
        assert view == "any" or torch.equal(part, {"plain": plain, "flipped": flipped}[view])
    assert reference.draws(module, None, images) == ([], "the input of the module's first layer cannot be recorded")


# --- factors of tensors, and what else is no gradient ----------------------------------------------------------------


def clip_each(bound: float) -> Callable[[nn.Module], None]:
    def clip(module: nn.Module) -> None:
        for p in module.parameters():
            if p.grad is not None:
                p.grad = p.grad * min(1.0, bound / float(p.grad.norm().clamp(min=1e-12)))

    return clip


def layer_wise(module: nn.Module) -> None:
    for depth, p in enumerate(module.parameters()):
        if p.grad is not None:
            p.grad = p.grad * 0.6**depth


def lars(module: nn.Module) -> None:
    for p in module.parameters():
        if p.grad is not None:
            p.grad = p.grad * float(p.norm() / (p.grad.norm() + 1e-9)) * 0.01


def centred(module: nn.Module) -> None:
    for p in module.parameters():
        if p.grad is not None and p.dim() > 1:
            p.grad = p.grad - p.grad.mean(dim=tuple(range(1, p.dim())), keepdim=True)


def some_divided(module: nn.Module) -> None:
    for name, p in module.named_parameters():
        if p.grad is not None and "patch" in name:
            p.grad = p.grad / 40


FACTORS = {"clipped": clip_each(0.05), "rates": layer_wise, "lars": lars, "divided": some_divided, "centred": centred}


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("kind", "model"),
    [
        pytest.param(kind, model, marks=[pytest.mark.slow] * (model is vit and kind not in ("lars", "centred")))
        for kind in FACTORS
        for model in (own, vit)
    ],
)
def test_factors_of_tensors_do_not_hide_an_image(kind: str, model: Callable[[], nn.Module]) -> None:
    for looks in (watched, by_hand):
        [look] = looks(model(), FACTORS[kind], normalisation=IMAGENET)
        assert look.answer == "above" or (kind == "centred" and look.answer == "inconclusive"), look


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", ["clipped", "rates", "lars", "divided"])
def test_factors_under_noise_are_named_and_never_below(kind: str) -> None:
    def both(module: nn.Module) -> None:
        FACTORS[kind](module)
        typical = (
            torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).square().mean().sqrt()
        )
        add_noise(module, float(typical))

    looks = watched(own(), both, defence="noise=1")
    assert all(look.answer != "below" for look in looks)
    assert all(
        look.answer == "above" or ("scaled by different factors" in look.reason and " × " in look.reason)
        for look in looks
    )


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("kind", "stated", "steps"),
    [
        (torch.optim.AdamW, "noise=5", 1),
        (torch.optim.AdamW, "fedavg-adam+noise=5", 3),
        (torch.optim.RMSprop, "noise=5", 3),
        (torch.optim.RMSprop, "fedavg-adam+noise=5", 1),
        pytest.param(torch.optim.AdamW, "noise=5", 3, marks=pytest.mark.slow),
        pytest.param(torch.optim.AdamW, "fedavg-adam+noise=5", 1, marks=pytest.mark.slow),
        pytest.param(torch.optim.RMSprop, "noise=5", 1, marks=pytest.mark.slow),
        pytest.param(torch.optim.RMSprop, "fedavg-adam+noise=5", 3, marks=pytest.mark.slow),
    ],
)
def test_another_step_beneath_noise_is_never_below(kind: Any, stated: str, steps: int) -> None:
    """The update of a client whose optimiser divides every number by its size."""
    module, [(images, labels)] = own().eval(), batches(1)
    moved = deepcopy(module)
    optimizer = kind(moved.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(moved(images), labels).backward()
        optimizer.step()
    torch.manual_seed(0)
    pairs = zip(module.named_parameters(), moved.parameters(), strict=True)
    update = {n: (p - q).detach() / (0.01 * steps) + 5 * torch.randn_like(p) for (n, p), q in pairs}
    watch = experienced(audit.guard(module, img_size=16, act="log", attacks=["patchembed"], defence=stated))
    assert watch.look(images, update, local_steps=steps).answer != "below"


def test_centred_gradients_are_not_those_of_the_images() -> None:
    match = compared(own(), centred)
    assert "not the gradient of one step" in match.wrong


def compared(module: nn.Module, change: Callable[[nn.Module], None]) -> reference.Match:
    [(images, labels)] = batches(1)
    F.cross_entropy(module.eval()(images), labels).backward()
    clean = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    change(module)
    return reference.compare({name: p.grad for name, p in module.named_parameters() if p.grad is not None}, clean)


@pytest.mark.parametrize("factor", [1e-3, 0.37, 65536.0])
def test_one_factor_for_all_is_undone(factor: float) -> None:
    """Clipping by the norm of everything, a sum in the place of a mean, a loss scale."""

    def scaled(module: nn.Module) -> None:
        for p in module.parameters():
            p.grad = None if p.grad is None else p.grad * factor

    match = compared(own(), lambda m: (scaled(m), add_noise(m, 0.1 * factor))[0])
    assert not match.wrong and match.factor == pytest.approx(factor, rel=0.1)
    assert match.sigma == pytest.approx(0.1 * factor, rel=0.05)
    quiet = compared(own(), scaled)
    assert quiet.quiet and not quiet.wrong and quiet.factor == pytest.approx(factor, rel=1e-5)


HIDES = "in which noise hides the gradient"
UNLIKE: dict[str, tuple[float, float, str, int, str]] = {
    "nothing added": (0.0, 1.0, "none", 1, ""),
    "nothing added to a sum": (0.0, 3.0, "fedavg-adam", 3, ""),
    "little noise": (0.1, 1.0, "none", 1, ""),
    "little noise on a sum": (0.1, 3.0, "none", 1, ""),
    "little noise on Adam": (0.1, 1.0, "fedavg-adam", 1, ""),
    "little noise on steps": (0.1, 1.0, "none", 3, ""),
    "clipped": (3.0, 0.5, "none", 1, ""),
    "a sum": (5.0, 3.0, "none", 1, "times the gradient of these images"),
    "as stated": (30.0, 1.0, "noise", 1, ""),
    "as half of it is stated": (30.0, 1.0, "half", 1, "the difference may not be noise"),
    "not stated": (30.0, 1.0, "none", 1, "but the stated noise is 0, so the difference may not be noise"),
    "Adam beneath noise": (30.0, 1.0, "fedavg-adam", 1, f"the update of a step of Adam, {HIDES}"),
    "steps beneath noise": (30.0, 1.0, "noise", 3, f"the update of 3 local steps, {HIDES}"),
}
"""Noise in units of the gradient's numbers, factor, stated defence, local steps, and what is wrong."""


@pytest.mark.parametrize("kind", UNLIKE)
def test_an_upload_under_noise_is_the_gradient_where_it_shows_or_noise_is_stated(kind: str) -> None:
    share, factor, stated, steps, reason = UNLIKE[kind]
    module, [(images, labels)] = own().train(), batches(1)
    witness = reference.Witness(module, None, lambda: True)
    F.cross_entropy(module(images), labels).backward()
    witness.close()
    clean = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    sigma = share * float(torch.cat([g.flatten() for g in clean.values()]).square().mean().sqrt())
    torch.manual_seed(1)
    upload = {name: factor * g + sigma * torch.randn_like(g) for name, g in clean.items()}
    defence = audit.create_defence({"noise": f"noise={sigma}", "half": f"noise={sigma / 2}"}.get(stated, stated))
    names = {name: name for name in clean}
    match, _, wrong = reference.match_upload(module, names, upload, images, defence, steps, witness.passes)
    assert match is not None and match.wrong == wrong and match.quiet == (share == 0)
    assert reason in wrong
    assert bool(wrong) == bool(reason), wrong


# --- noise as it is, and not as it is stated ------------------------------------------------------------------------


@pytest.mark.thin(2)
@pytest.mark.parametrize("looks", [watched, by_hand])
def test_the_noise_that_is_there_decides(looks: Callable[..., list[Look]]) -> None:
    """As much leaks whatever is stated."""
    [right], *others = (
        looks(own(), lambda m: add_noise(m, 1e-3), defence=stated)
        for stated in ("noise=0.001", "noise=10", "noise=1", "noise=0.0001", "none")
    )
    for [look] in [[right], *others]:
        assert look.answer == "above" and look.value == pytest.approx(right.value, abs=0.1)


PARTS: dict[str, Callable[[str, Tensor], bool]] = {
    "not the vectors": lambda _, p: p.dim() > 1,
    "not the head": lambda name, _: "head" not in name,
    "not the stem": lambda name, _: "patches" not in name and "positions" not in name,
    "not the attention": lambda name, _: "in_proj" not in name,
}


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("looks", "part"),
    [
        *((watched, part) for part in PARTS),
        *((by_hand, part) for part in ("not the head", "not the stem")),
        *(pytest.param(by_hand, part, marks=pytest.mark.slow) for part in ("not the vectors", "not the attention")),
    ],
)
def test_noise_on_some_tensors_is_never_below(looks: Callable[..., list[Look]], part: str) -> None:
    seen = looks(own(), lambda m: add_noise(m, 5.0, PARTS[part]), defence="noise=5")
    assert all(look.answer != "below" for look in seen)


def same_number(module: nn.Module) -> None:
    for p in module.parameters():
        p.grad = cast("Tensor", p.grad) + 5 * torch.randn(()).sign()


def same_row(module: nn.Module) -> None:
    for p in module.parameters():
        p.grad = cast("Tensor", p.grad) + 5 * torch.randn(p.shape[-1])


def same_column(module: nn.Module) -> None:
    for p in module.parameters():
        p.grad = cast("Tensor", p.grad) + 5 * torch.randn(*p.shape[:-1], 1)


def low_rank(module: nn.Module) -> None:
    for p in module.parameters():
        p.grad = cast("Tensor", p.grad) + 5 * torch.randn(*p.shape[:-1], 1) * torch.randn(p.shape[-1])


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", [same_number, same_row, same_column, low_rank])
def test_numbers_that_repeat_are_no_noise(kind: Callable[[nn.Module], None]) -> None:
    seen = watched(own(), kind, defence="noise=5")
    assert all(look.answer != "below" for look in seen)


@pytest.mark.parametrize(("looks", "stated"), [(watched, 10), (by_hand, 30)])
def test_noise_that_is_there_is_below_as_measured(looks: Callable[..., list[Look]], stated: float) -> None:
    seen = looks(own(), lambda m: add_noise(m, 10.0), defence=f"noise={stated}")
    assert seen[-1].answer == "below" and ("noise is 10" in seen[-1].reason or "noise is 9.9" in seen[-1].reason)


def test_without_earlier_looks_the_seventh_image_is_the_first_that_may_be_below() -> None:
    module, seen = own().eval(), list[Look]()
    watch = audit.guard(module, img_size=16, act=seen.append, attacks=["patchembed"], defence="noise=10")
    for images, labels in batches(7):
        module.zero_grad()
        F.cross_entropy(module(images), labels).backward()
        add_noise(module, 10.0)
        watch.look(images)
    assert ["only few other images" in look.reason for look in seen] == [True] * 6 + [False]


@pytest.mark.thin(2)
@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_draws_behind_the_first_layer_are_made_again(dropout: float) -> None:
    seen = watched(own(dropout=dropout), lambda m: add_noise(m, 10.0), defence="noise=10")
    assert seen[-1].answer == "below"
    torch.manual_seed(0)
    hand = by_hand(own(dropout=dropout), lambda m: add_noise(m, 1e-3), train=True, defence="noise=0.001")
    assert hand[0].answer != "below"


# --- others to tell an image from -----------------------------------------------------------------------------------


def test_the_same_image_in_another_epoch_is_no_blind_guess() -> None:
    [(images, labels)] = batches(1)
    module = own().eval()
    watch = audit.guard(module, img_size=16, act="log", attacks=["patchembed"])
    F.cross_entropy(module(images), labels).backward()
    for turned in (images, images.flip(3), images.roll(2, dims=2), images):
        module.zero_grad()
        F.cross_entropy(module(turned), labels).backward()
        assert watch.look(turned).answer == "above"
    assert len(watch._memory.decoys) == 1


def test_twins_in_a_batch_do_not_hide_one_another() -> None:
    [(images, _)] = batches(1)
    real = torch.cat([images, images])
    watch = audit.guard(own(), img_size=16, act="log", attacks=["patchembed"])
    held = watch._memory.reference(real, IMAGENET, watch.backbone)
    assert list(held.blind) == ["grey"]


@pytest.mark.parametrize("mean", [0.1, 0.485, 0.9])
def test_the_blind_grey_is_the_mean_of_the_normalisation(mean: float) -> None:
    normalisation: Any = ([mean] * 3, [0.2] * 3)
    [(images, _)] = batches(1, 2, normalisation=normalisation)
    watch = audit.guard(own(), img_size=16, act="log")
    held = watch._memory.reference(images, normalisation, watch.backbone)
    errors = (images * 0.2).square().mean(dim=(1, 2, 3))  # of a picture whose every pixel is the mean
    torch.testing.assert_close(torch.tensor(held.blind["grey"]["psnr"]), -10 * errors.log10(), atol=1e-3, rtol=0)


def test_decoys_are_few_and_small() -> None:
    module = own().eval()
    watch = audit.guard(module, img_size=16, act="log", attacks=["april"])
    for images, _ in batches(3, 16):
        watch._memory.keep(denormalise(images, *IMAGENET))
    assert len(watch._memory.decoys) == 32 and all(each.dtype == torch.uint8 for each in watch._memory.decoys)


@pytest.mark.parametrize(
    "turn", [lambda x: x, lambda x: x.flip(3), lambda x: x.roll((3, -2), (2, 3)), lambda x: 0.5 * x]
)
def test_alike_is_the_same_picture_moved_mirrored_or_dimmed(turn: Callable[[Tensor], Tensor]) -> None:
    pictures = torch.cat([x for x, _ in batches(6, normalisation=((0.0,) * 3, (1.0,) * 3))])
    assert torch.equal(alike(turn(pictures), pictures), torch.eye(6, dtype=torch.bool))


# --- units ----------------------------------------------------------------------------------------------------------

ZERO, HALF = ((0.0,) * 3, (1.0,) * 3), ((0.5,) * 3, (0.5,) * 3)


@pytest.mark.parametrize(
    ("true", "stated"),
    [
        pytest.param(ZERO, IMAGENET, id="0/1 as ImageNet's"),
        pytest.param(IMAGENET, HALF, id="ImageNet's as .5"),
        pytest.param(HALF, ZERO, id=".5 as 0/1"),
        pytest.param(HALF, IMAGENET, id=".5 as ImageNet's", marks=pytest.mark.slow),
        pytest.param(IMAGENET, ZERO, id="ImageNet's as 0/1", marks=pytest.mark.slow),
        pytest.param(ZERO, HALF, id="0/1 as .5", marks=pytest.mark.slow),
    ],
)
def test_units_that_the_pixels_contradict_are_said_and_nothing_is_judged_in_them(true: Any, stated: Any) -> None:
    module, seen = own().eval(), list[Look]()
    watch = audit.guard(module, img_size=16, act=seen.append, normalisation=stated, attacks=["patchembed"])
    experienced(watch)
    for images, labels in batches(2, normalisation=true):
        module.zero_grad()
        F.cross_entropy(module(images), labels).backward()
        add_noise(module, 10.0)
        watch.look(images)
    assert all(look.answer == "inconclusive" for look in seen)
    assert "give normalisation=" in seen[-1].reason and "the images have values from" in seen[-1].reason
    right, _ = reference.units(images, stated)
    assert torch.tensor(right).allclose(torch.tensor(true))
    assert reference.units(images, true) == (true, "")
    module.zero_grad()
    F.cross_entropy(module(images), labels).backward()
    assert watch.look(images).answer == "above"


@pytest.mark.parametrize("normalisation", [IMAGENET, HALF, ZERO])
def test_units_that_nothing_contradicts_stay(normalisation: Any) -> None:
    [(images, _)] = batches(1, 4, normalisation=normalisation)
    for seen in (images, F.interpolate(images, 24, mode="bicubic").clamp(images.min(), images.max()), 0.3 * images):
        assert reference.units(seen, normalisation)[1] == "" or seen is not images
    erased = images.clone()
    erased[:, :, :5, :5] = torch.randn(4, 3, 5, 5)  # random erasing
    assert reference.units(erased, IMAGENET)[1] == "" or normalisation is not IMAGENET


# --- sentences ------------------------------------------------------------------------------------------------------


class Frozen(nn.Module):
    def __init__(self, norm_first: bool, layers: int) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 48, 4, 4), nn.Linear(48, 5)
        self.positions = nn.Parameter(torch.randn(16, 48) * 0.2)
        layer = nn.TransformerEncoderLayer(48, 4, 96, batch_first=True, norm_first=norm_first)
        self.mix = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.requires_grad_(False)
        self.head.requires_grad_()

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.mix(self.patches(images).flatten(2).mT + self.positions).mean(dim=1))


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("norm_first", "layers"), [(True, 1), (False, 2), pytest.param(False, 1, marks=pytest.mark.slow)]
)
def test_a_frozen_encoder_of_torch_has_a_derivative(norm_first: bool, layers: int, tmp_path: Any) -> None:
    torch.manual_seed(0)
    module = Frozen(norm_first, layers).eval()
    [(images, labels)] = batches(1)
    F.cross_entropy(module(images), labels).backward()
    watch = audit.guard(module, img_size=16, act="log", attacks=["matching"], seconds=0.5)
    assert "the audit of this step failed" not in watch.look(images).reason
    from PIL import Image

    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    found = audit.audit_gradients(
        module, tmp_path, attacks=["matching"], defences=["none"], img_size=16, count=1, iterations=2
    )
    assert found.pairs[0].why("refused") is None


GOOD, LABELS = batches(1)[0]
W = "patches.weight"


def graded(**changed: Any) -> dict[str, Any]:
    module = own()
    F.cross_entropy(module(GOOD), LABELS).backward()
    return {name: p.grad for name, p in module.named_parameters()} | {
        n.replace("__", "."): g for n, g in changed.items()
    }


FULL = torch.zeros(48, 48)
BAD: dict[str, tuple[Any, Any, str]] = {
    "images: labels": (LABELS, None, r"must be \[B, C, H, W\]"),
    "images: one without a batch": (GOOD[0], None, r"must be \[B, C, H, W\]"),
    "images: none": (GOOD[:0], None, "the batch is empty"),
    "images: numpy": (GOOD.numpy(), None, "not ndarray"),
    "images: a list": ([GOOD], None, "not list"),
    "images: nothing": (None, None, "not NoneType"),
    "images: bytes": ((GOOD * 50).to(torch.uint8), None, "normalised floats"),
    "images: integers": (GOOD.long(), None, "normalised floats"),
    "images: grey levels": (GOOD * 100, None, "not normalised"),
    "images: NaN": (GOOD * math.nan, None, "NaN"),
    "images: infinite": (GOOD * math.inf, None, "NaN or infinity"),
    "images: half": (GOOD.half(), None, "torch.float16, but the module takes torch.float32"),
    "images: double": (GOOD.double(), None, "torch.float64"),
    "images: one channel": (GOOD[:, :1], None, "takes 3 channels"),
    "images: channels last": (GOOD.permute(0, 2, 3, 1), None, "takes 3 channels"),
    "images: another size": (F.interpolate(GOOD, 32), None, "of 16 × 16 pixels"),
    "images: elsewhere": (GOOD.to("meta"), None, "are on meta"),
    "gradients: a list": (GOOD, [FULL], "not list"),
    "gradients: none": (GOOD, {}, "gradients: are missing"),
    "gradients: another name": (GOOD, {"nope": FULL}, "nope is not a parameter"),
    "gradients: a number for a name": (GOOD, {0: FULL}, "0 is not a parameter"),
    "gradients: int8": (GOOD, {W: FULL.to(torch.int8)}, "is torch.int8: convert it to floats"),
    "gradients: numpy": (GOOD, {W: FULL.numpy()}, "ndarray"),
    "gradients: nothing": (GOOD, {W: None}, "is NoneType"),
    "gradients: shape": (GOOD, {W: FULL[:3]}, r"has shape \[3, 48\]"),
    "gradients: NaN": (GOOD, {W: FULL * math.nan}, "contains NaN"),
    "gradients: infinite": (GOOD, {W: FULL + math.inf}, "contains infinity"),
    "gradients: sparse": (GOOD, {W: FULL.to_sparse()}, "sparse"),
    "gradients: complex": (GOOD, {W: FULL.to(torch.complex64)}, "complex64"),
    "gradients: elsewhere": (GOOD, {W: FULL.to("meta")}, "is on meta"),
}


def test_what_no_look_can_take_is_told_in_a_sentence_and_nothing_is_noted() -> None:
    module = own()
    F.cross_entropy(module(GOOD), LABELS).backward()
    watch = audit.guard(module, img_size=16, act="log", attacks=["patchembed"])
    for kind, (images, gradients, said) in BAD.items():
        with pytest.raises(SitusError, match=said) as error:
            watch.look(images, gradients)
        assert "\n" not in str(error.value) and not watch.looks and module.training, kind
    assert watch.look(GOOD).answer == "above"  # and goes on


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "two"])
def test_local_steps_are_a_whole_number(steps: Any) -> None:
    with pytest.raises(SitusError, match=r"local_steps=.*: must be a whole number"):
        audit.guard(own(), img_size=16, act="log").look(GOOD, graded(), local_steps=steps)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"optimizer": 0.1}, "optimizer=0.1: must be an Optimizer or none"),
        (
            {"optimizer": torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)},
            "none of the module's parameters",
        ),
        ({"every": 0}, "every=0"),
        ({"every": 2.5}, "every=2.5"),
        ({"seconds": "10"}, "seconds='10'"),
        ({"attacks": "patchembed"}, "attacks='patchembed': must be a list"),
        ({"normalisation": (0.5, 0.5)}, "normalisation=.*: must be the means"),
        ({"normalisation": ((0.5,) * 3, (0.0,) * 3)}, "normalisation=.*: must be the means"),
        ({"module": "vit"}, "module='vit': must be a Module"),
    ],
)
def test_what_no_guard_can_be_made_of_is_told_in_a_sentence(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(SitusError, match=said):
        audit.guard(**{"module": own(), "img_size": 16} | asked)


class Broken(Attack):
    """An attack that ends with an error of its own."""

    name = "broken"

    def prepare(self, *_: Any) -> Any:
        raise RuntimeError("out of memory\nand more")

    def recover(self, *_: Any, **__: Any) -> Any:
        raise AssertionError


def test_a_loop_goes_on_whatever_a_look_ends_with() -> None:
    module = own()
    [look] = watched(module, attacks=[Broken()])
    assert look.answer == "inconclusive" and look.reason == "the audit of this step failed: RuntimeError: out of memory"
    assert module.training
    bad: Mapping[str, Callable[[nn.Module], None]] = {
        "NaN": lambda m: m.head.weight.grad.fill_(math.nan),  # type: ignore[union-attr]
        "none": lambda m: m.zero_grad(),
    }
    for change in bad.values():
        assert watched(own(), change)[0].answer == "inconclusive"
