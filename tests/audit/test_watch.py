"""`guard` in loops of one's own: it sees what is about to be sent, disturbs nothing, and no silence is safety."""

from __future__ import annotations

import logging
from collections import deque
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs import audit
from situs.audit.attacks.base import Attack, Ready, Recovery
from situs.audit.attacks.patchembed import PatchEmbedding
from situs.audit.one_step import Reidentified
from situs.audit.scores import denormalise
from situs.audit.watch import Guard, LeakError, Look
from situs.errors import SitusError


class Own(nn.Module):
    """A module that nobody knows: linear patches, a table, one attention, with dropout."""

    def __init__(self, learned: bool = True) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * 16, 48)
        self.positions = nn.Parameter(torch.randn(16, 48) * 0.2, requires_grad=learned)
        self.mix = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(48, 5)

    def forward(self, images: Tensor) -> Tensor:
        cut = images.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return self.head(self.mix(self.patches(cut) + self.positions).mean(dim=1))


def made(kind: str = "own", **asked: Any) -> nn.Module:
    torch.manual_seed(0)
    if kind == "own":
        return Own(**asked)
    shape = {"img_size": 16, "patch_size": 4, "embed_dim": 48, "depth": 2, "num_heads": 2}
    return timm.create_model("vit_tiny_patch16_224", **shape, num_classes=5)


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def batches(count: int, size: int = 1) -> list[tuple[Tensor, Tensor]]:
    chance = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (count, size, 3, 16, 16), generator=chance) / 255
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in IMAGENET)
    return [((x - mean) / std, torch.arange(size) % 5) for x in pixels]


def loop(module: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> None:
    module.train()
    torch.manual_seed(3)  # dropout draws from here
    for images, labels in data:
        optimizer.zero_grad()
        F.cross_entropy(module(images), labels).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["own", "timm"])
def test_an_image_that_can_be_had_back_raises_before_the_step_is_made(kind: str) -> None:
    module = made(kind)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    watch = audit.guard(module, optimizer, normalisation=IMAGENET, **({"img_size": 16} if kind == "own" else {}))
    assert isinstance(watch, Guard) and module.training
    before = deepcopy(module.state_dict())
    with pytest.raises(LeakError, match=r"step 0: .* above the limit \(.*psnr \d+ by patchembed \(limit 20") as error:
        loop(module, optimizer, batches(1))
    assert error.value.look.value is not None and error.value.look.value > 60  # it truly came back
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_guarded_loop_takes_the_same_steps_and_is_looked_at_every_so_many() -> None:
    found, plain, guarded = [], made(), made()
    for module in (plain, guarded):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        if module is guarded:
            watch = audit.guard(module, optimizer, img_size=16, every=3, act=found.append)
        loop(module, optimizer, batches(7))
    assert [look.step for look in found] == [0, 3, 6] == [look.step for look in watch.looks]
    assert all(look.answer == "above" and look.seconds > 0 for look in found)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), guarded.parameters(), strict=True))
    watch.close()
    loop(guarded, torch.optim.SGD(guarded.parameters(), lr=0.1), batches(1))
    assert len(found) == 3 and not guarded._forward_pre_hooks


def test_where_nothing_applies_or_proves_anything_it_is_not_judged_and_said_aloud(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("situs.audit.guard"), "handle", said.append)
    for module, size in ((made(learned=False), 1), (made(learned=False), 2)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        watch = audit.guard(module, optimizer, img_size=16, attacks=["patchembed"])
        loop(module, optimizer, batches(1, size))
        assert watch.looks[0].answer == "inconclusive"
        why = "no closed form applies (patchembed: "
        assert "inconclusive, not a pass" in said[-1].getMessage() and why in said.pop().getMessage()


def experienced(watch: Guard) -> Guard:
    """A guard that has seen other images in earlier looks, and found none again."""
    for images, _ in batches(1, 40):
        watch._memory.keep(denormalise(images[8:], *IMAGENET))
    watch._memory.looks["patchembed"] = deque([Reidentified(0, 1, 1 / 32)])
    return watch


def test_noise_is_below_the_limit_only_where_equations_hold_and_it_is_there() -> None:
    module, asked = made().eval(), {"img_size": 16, "act": "log", "attacks": ["patchembed"]}
    watch = experienced(audit.guard(module, defence="noise=10", **asked))
    [(images, labels)] = batches(1)
    F.cross_entropy(module(images), labels).backward()
    for parameter in module.parameters():
        parameter.grad += 10 * torch.randn(parameter.shape)
    assert watch.look(images).answer == "below"
    for stated in ("int8+noise=10", "autocast+noise=20"):  # as measured, whatever is stated
        assert experienced(audit.guard(module, defence=stated, **asked)).look(images).answer == "below"
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape) * 1e3  # not what was stated
    look = experienced(audit.guard(module, defence="noise=10", **asked)).look(images)
    assert look.answer == "inconclusive" and "but the stated noise is 10" in look.reason


@pytest.mark.thin(2)
@pytest.mark.parametrize("noisy", [(), ("mix", "head")], ids=["nowhere", "not on the embedding"])
def test_noise_that_is_stated_and_not_there_is_not_believed(noisy: tuple[str, ...]) -> None:
    module, [(images, labels)] = made(), batches(1)
    watch = audit.guard(module, img_size=16, defence="noise=1", act="log", attacks=["patchembed"])
    F.cross_entropy(module(images), labels).backward()
    for name, parameter in module.named_parameters():
        if name.startswith(noisy or "nothing") and parameter.grad is not None:
            parameter.grad += torch.randn_like(parameter)
    look = watch.look(images)
    assert look.answer == "above" and look.value is not None and look.value > 60


def test_more_noise_than_there_is_does_not_weaken_the_attackers() -> None:
    values = []
    for stated in (1, 3, 30):
        module, [(images, labels)] = made().eval(), batches(1)
        F.cross_entropy(module(images), labels).backward()
        torch.manual_seed(0)
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad += 1e-3 * torch.randn_like(parameter)
        watch = audit.guard(module, img_size=16, defence=f"noise={1e-3 * stated}", act="log", attacks=["patchembed"])
        values.append(watch.look(images).value)
    assert values == pytest.approx([values[0]] * 3, abs=0.1)


@pytest.mark.parametrize("stated", ["fedavg-adam", "mjp=0.3", "fedavg=4+int8"])
def test_a_defence_that_is_stated_and_not_there_is_not_believed(stated: str) -> None:
    module, [(images, labels)] = made("timm").eval(), batches(1)
    F.cross_entropy(module(images), labels).backward()
    asked = {"act": "log", "attacks": ["patchembed"], "normalisation": IMAGENET}
    look = audit.guard(module, defence=stated, **asked).look(images)
    assert look.answer == "above" and look.value is not None and look.value > 60


class Search(Attack):
    """A search of which each test says what it does."""

    name = "a search"

    def __init__(self, do: Any) -> None:
        super().__init__()
        self.do = do

    def prepare(self, *_: Any) -> Ready:
        return Ready(None, seconds=60.0)

    def recover(self, backbone: Any, uploads: Any, known: Any = None, deadline: Any = None) -> Recovery:
        return Recovery(self.do(known, deadline), [{}], partial="a round" if deadline.over() else None)


def sent(module: nn.Module, size: int = 1, noise: float = 0.0) -> Tensor:
    """Images whose gradients stand in the module."""
    [(images, labels)] = batches(1, size)
    F.cross_entropy(module(images), labels).backward()
    for parameter in module.parameters():
        parameter.grad = parameter.grad + noise * torch.randn_like(parameter) if parameter.grad is not None else None
    return images


def test_a_search_that_needs_the_right_noise_is_told_what_is_there() -> None:
    module = made().eval()
    images = sent(module, noise=1e-3)

    def near(known: Any, _: Any) -> Tensor:
        return images if 0.9e-3 < known.defence.noise_level(1) < 1.1e-3 else torch.zeros_like(images)

    for stated in ("none", "noise=0.0001", "noise=0.001", "noise=0.03"):
        given = {"img_size": 16, "act": "log", "attacks": [Search(near)]}
        assert audit.guard(module, defence=stated, **given).look(images).answer == "above"


def test_a_look_ends_in_time_and_a_stopped_attack_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    module = made().eval()
    images = sent(module, noise=10.0)

    def forever(_: Any, deadline: Any) -> Tensor:
        while not deadline.over():
            pass
        return torch.zeros_like(images)

    given = {"img_size": 16, "act": "log", "defence": "noise=10"}
    assert experienced(audit.guard(module, attacks=["patchembed"], **given)).look(images).answer == "below"
    look = audit.guard(module, attacks=[Search(forever), "patchembed"], seconds=0.3, **given).look(images)
    assert look.seconds < 3 and look.answer == "inconclusive" and "a search was stopped after a round" in look.reason
    late = audit.guard(module, attacks=["patchembed"], seconds=1e-9, **given).look(images)
    assert late.answer == "inconclusive" and "did not finish within 1e-09 s" in late.reason
    whole = PatchEmbedding.recover
    monkeypatch.setattr(PatchEmbedding, "recover", lambda *a: replace(whole(*a), partial="one step"))
    cut = experienced(audit.guard(module, attacks=["patchembed"], **given)).look(images)
    assert cut.answer == "inconclusive" and "patchembed was stopped after one step" in cut.reason


@pytest.mark.parametrize("loss", [F.cross_entropy, lambda z, y: F.mse_loss(z, F.one_hot(y, 5).float())])
def test_a_pass_under_another_loss_than_cross_entropy_needs_the_least_likely_labels_too(loss: Any) -> None:
    module, seen = made().train(), list[Look]()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    given = {"img_size": 16, "attacks": ["patchembed"], "defence": "noise=10"}
    watch = experienced(audit.guard(module, optimizer, every=1, act=seen.append, **given))
    [(images, labels)] = batches(1)
    loss(module(images), labels).backward()
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad += 10 * torch.randn(parameter.shape)
    optimizer.step()
    assert [look.answer for look in seen] == ["below"]
    bounds = [finding.hardest for finding in watch.findings if finding.bound]
    assert bounds == ([False] if loss is F.cross_entropy else [False, True])


@pytest.mark.parametrize("loss", [F.cross_entropy, lambda z, y: F.mse_loss(z, F.one_hot(y, 5).float())])
def test_by_hand_noise_that_hides_the_loss_needs_the_least_likely_labels_too(loss: Any) -> None:
    """Without the optimizer the guard knows the loss from the upload alone."""
    module = made().eval()
    [(images, labels)] = batches(1)
    loss(module(images), labels).backward()
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad += 10 * torch.randn(parameter.shape)
    given = {"img_size": 16, "attacks": ["patchembed"], "defence": "noise=10"}
    watch = experienced(audit.guard(module, act="log", **given))
    assert watch.look(images).answer == "below"
    assert [finding.hardest for finding in watch.findings if finding.bound] == [False, True]


def test_a_mistake_that_an_attack_finds_in_a_step_makes_the_look_inconclusive() -> None:
    module = made().eval()
    images = sent(module)

    def refuse(*_: Any) -> Tensor:
        raise SitusError("no such layer")

    look = audit.guard(module, img_size=16, act="log", attacks=[Search(refuse)]).look(images)
    assert (look.answer, look.reason) == ("inconclusive", "no such layer")


def test_one_upload_comes_with_the_images_of_one_step_or_with_none() -> None:
    module = made().eval()
    images = sent(module)
    upload = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    watch = audit.guard(module, img_size=16, act="log", attacks=["patchembed"])
    with pytest.raises(SitusError, match="2 uploads were given with the images of one step") as caught:
        watch.look_upload([upload, upload], images)
    assert caught.value.fields == ("upload",)
    assert watch.look_upload([upload], images).answer == watch.look_upload(upload, images).answer == "above"
    unknown = watch.look_upload(upload)
    assert (unknown.answer, unknown.metric, unknown.bound) == ("above", "certified_psnr", 20.0)
    blind = audit.guard(module, img_size=16, act="log", attacks=["patchembed"], limit="blind")
    assert 0 < blind.look(images).bound < 20 < watch.look(images).value  # the limit of the worst image itself
    stop = Search(lambda _, deadline: (deadline.interrupt(), images)[1])
    with pytest.raises(KeyboardInterrupt):
        audit.guard(module, img_size=16, act="log", attacks=[stop]).look_upload(upload)


def test_ctrl_c_within_an_attack_that_keeps_what_it_has_ends_the_loop() -> None:
    module = made().eval()
    images = sent(module)
    stop = Search(lambda _, deadline: (deadline.interrupt(), images)[1])
    with pytest.raises(KeyboardInterrupt):
        audit.guard(module, img_size=16, act="log", attacks=[stop]).look(images)


def test_an_image_of_no_numbers_hides_no_other() -> None:
    module = made().eval()
    images = sent(module, 2)
    broken = images * torch.tensor([torch.nan, 1.0]).view(2, 1, 1, 1)
    given = {"img_size": 16, "act": "log"}
    assert audit.guard(module, attacks=[Search(lambda *_: broken)], **given).look(images).answer == "above"
    (nearly := images.clone())[:, 0, 0, 0] = torch.nan
    for limit in ("psnr=20", "ssim=0.5"):
        watch = audit.guard(module, attacks=[Search(lambda *_: nearly)], limit=limit, **given)
        assert watch.look(images).answer == "above", "of one pixel"
    images = sent(module := made().eval(), noise=10.0)
    void = Search(lambda *_: torch.full_like(images, torch.nan))
    look = audit.guard(module, attacks=[void, "patchembed"], defence="noise=10", **given).look(images)
    assert look.answer == "inconclusive" and "a search returned NaN for 1 of 1 image" in look.reason


class Before(nn.Module):
    """A model that does something to its image first."""

    def __init__(self, first: Any) -> None:
        super().__init__()
        self.first, self.inner = first, made("timm")

    def forward(self, images: Tensor) -> Tensor:
        return self.inner(self.first(images))


def test_a_module_that_writes_into_its_images_is_judged_by_those_that_it_was_given() -> None:
    module, found = Before(lambda x: x.mul_(0.25)), list[Look]()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    audit.guard(module, optimizer, img_size=16, every=1, act=found.append, attacks=["patchembed"])
    [(images, labels)] = batches(1)
    F.cross_entropy(module(images), labels).backward()
    optimizer.step()
    assert found[0].answer == "above" and found[0].value is not None and found[0].value > 60


def test_noise_that_undoing_a_mixture_of_the_channels_makes_larger_is_not_judged() -> None:
    """What comes back is worse than a guess, and one who weighs noise against what pixels are does better."""
    mix = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.1, 1.0], [1.0, 1.0, 1.1]])
    answers = []
    for first in (lambda x: x + 0, lambda x: torch.einsum("dc,bchw->bdhw", mix.to(x), x)):
        module = Before(first).eval()
        images = sent(module, noise=10.0)
        given = {"img_size": 16, "act": "log", "defence": "noise=10", "attacks": ["patchembed"]}
        answers.append(experienced(audit.guard(module, normalisation=IMAGENET, **given)).look(images).answer)
    assert answers == ["below", "inconclusive"]


@pytest.mark.thin(2)
@pytest.mark.parametrize("attack", ["patchembed", "tokens"])
@pytest.mark.parametrize(
    "first",
    [
        lambda x: x.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1),
        torch.relu,
        lambda x: x.clamp(-0.5, 0.5),
        F.instance_norm,
    ],
    ids=["grey", "relu", "clamp", "normalised"],
)
def test_a_part_of_the_image_that_its_layer_sees_is_more_than_a_blind_guess_has(attack: str, first: Any) -> None:
    module, [(images, labels)] = Before(first).eval(), batches(1)
    watch = audit.guard(module, img_size=16, act="log", attacks=[attack], normalisation=IMAGENET)
    F.cross_entropy(module(images), labels).backward()
    assert watch.look(images).answer == "above"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"act": "raises"}, "act='raises': must be one of raise, log or a function"),
        ({"attacks": []}, "attacks=.*: must be a list of one or more"),
        ({"attacks": ["patchembed", "crafted"]}, "attacks=crafted: .* set server=active"),
        ({"every": 0}, "every=0: must be a whole number, >= 1"),
        ({"every": True}, "every=True: must be an integer"),
        ({"limit": "psnr=loud"}, "limit='psnr=loud': must be METRIC=NUMBER"),
    ],
)
def test_mistakes_are_told_before_the_loop(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(SitusError, match=said):
        audit.guard(made(), img_size=16, **asked)


def test_a_client_of_federated_averaging_gives_its_update_by_hand() -> None:
    module = made("timm").eval()
    [(images, labels)] = batches(1)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    watch = audit.guard(module, act="log")
    moved = deepcopy(module)
    optimizer = torch.optim.SGD(moved.parameters(), lr=0.01)
    F.cross_entropy(moved(images), labels).backward()
    optimizer.step()
    update = {name: (before[name] - p.detach()) / 0.01 for name, p in moved.named_parameters()}
    look = watch.look(images, update)
    assert look.answer == "above" and look.value is not None and look.value > 30
    sent = {name: g for name, g in update.items() if name != "pos_embed"}
    assert watch.look(images, sent).answer in ("above", "inconclusive")  # never below: nothing of this was proved
    with pytest.raises(SitusError, match="nope is not a parameter"):
        watch.look(images, {"nope": torch.zeros(1)})
    with pytest.raises(SitusError, match="float32"):
        audit.guard(made("timm").bfloat16())


class Named(Own):
    """Called by names alone, as models of transformers are."""

    def forward(self, pixel_values: Tensor) -> Tensor:
        return super().forward(pixel_values)


def test_images_that_are_given_by_name_are_seen() -> None:
    torch.manual_seed(0)
    module = Named()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    audit.guard(module, optimizer, img_size=16, attacks=["patchembed"])
    [(images, labels)] = batches(1)
    F.cross_entropy(module.train()(pixel_values=images), labels).backward()
    with pytest.raises(LeakError, match="above"):
        optimizer.step()


def test_a_step_whose_images_it_has_not_seen_is_not_judged_and_said() -> None:
    module, found = made().eval(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    audit.guard(module, optimizer, img_size=16, every=1, act=found.append)
    [(images, labels)] = batches(1)
    F.cross_entropy(module(images), labels).backward()
    optimizer.step()
    assert found[0].answer == "inconclusive" and "no images went through the module" in found[0].reason
    made_of_two = nn.Sequential(nn.AdaptiveAvgPool2d(16), made())
    optimizer = torch.optim.SGD(made_of_two.parameters(), lr=0.1)
    audit.guard(made_of_two, optimizer, img_size=16, act=found.append, attacks=["patchembed"])
    for size in (16, 32):
        F.cross_entropy(made_of_two(torch.zeros(1, 3, size, size)), labels).backward()
    optimizer.step()
    assert found[1].answer == "inconclusive" and "of several sizes" in found[1].reason


@pytest.mark.parametrize(("value", "said"), [(float("nan"), "NaN"), (200.0, "up to 200")])
def test_images_that_no_audit_takes_do_not_end_the_loop(value: float, said: str) -> None:
    module, found = made(), list[Look]()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    audit.guard(module, optimizer, img_size=16, every=1, act=found.append)
    [(images, labels)] = batches(1)
    images[0, 0, 0, 0] = value
    F.cross_entropy(module(images), labels).backward()
    optimizer.step()
    assert [look.answer for look in found] == ["inconclusive"] and said in found[0].reason


def test_an_optimiser_with_a_closure_is_looked_at_after_the_closure() -> None:
    """A look before the closure would judge the gradient of the step before."""
    module, seen = made("timm"), list[Look]()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    given = {"attacks": ["patchembed"], "normalisation": IMAGENET}
    audit.guard(module.train(), optimizer, every=1, act=seen.append, **given)
    steps = batches(2)
    for images, labels in steps:

        def closure(images: Tensor = images, labels: Tensor = labels) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(module(images), labels)
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None
    assert [(look.step, look.answer) for look in seen] == [(0, "above"), (1, "above")]
    module, seen = made("timm"), list[Look]()
    lbfgs = torch.optim.LBFGS(module.parameters(), lr=1e-4, max_iter=2)  # which computes the loss twice
    audit.guard(module.train(), lbfgs, every=3, act=seen.append, **given)
    images, labels = steps[0]

    def again() -> Tensor:
        lbfgs.zero_grad()
        loss = F.cross_entropy(module(images), labels)
        loss.backward()
        return loss

    for _ in range(4):
        lbfgs.step(again)
    answers = [(step, answer) for step in (0, 3) for answer in ("above", "inconclusive")]
    assert [(look.step, look.answer) for look in seen] == answers
    assert all("computes the loss of this step several times" in look.reason for look in seen[1::2])


class Halves(Own):
    """A module with a method of its own beside `forward`."""

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))

    def features(self, images: Tensor) -> Tensor:
        cut = images.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        return self.mix(self.patches(cut) + self.positions).mean(dim=1)


@pytest.mark.parametrize("way", ["none", "eval mode", "another method", "no gradient"])
def test_images_that_went_another_way_into_the_step_keep_it_from_being_below(way: str) -> None:
    """Noise hides their gradient from the comparison with that of the images that were seen."""
    torch.manual_seed(0)
    module, seen = Halves().train(), list[Look]()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    given = {"img_size": 16, "attacks": ["patchembed"], "defence": "noise=10"}
    experienced(audit.guard(module, optimizer, every=1, act=seen.append, **given))
    (images, labels), (others, _) = batches(2)
    loss = F.cross_entropy(module(images), labels)
    if way == "eval mode":
        loss = loss + F.cross_entropy(module.eval()(others), labels)
    if way == "another method":
        loss = loss + F.cross_entropy(module.head(module.features(others)), labels)
    with torch.set_grad_enabled(way != "no gradient"):
        module.eval()(others)  # an evaluation between two steps is no part of either
    module.train()
    loss.backward()
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad += 10 * torch.randn(parameter.shape)
    optimizer.step()
    [look] = seen
    if way in ("none", "no gradient"):
        assert look.answer == "below", look
    else:
        assert look.answer == "inconclusive" and "outside of a forward pass in training mode" in look.reason


def test_two_guards_of_one_module_do_not_see_one_another() -> None:
    module, seen = made().train(), list[Look]()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        experienced(audit.guard(module, optimizer, img_size=16, every=1, act=seen.append, attacks=["patchembed"]))
    loop(module, optimizer, batches(2))
    assert [look.answer for look in seen] == ["above"] * 4
    assert all(look.value is not None and look.value > 60 for look in seen)


class Casts(Own):
    """Works in float32 alone, as audits do not."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.float())


def test_a_module_that_no_audit_can_run_is_refused_in_a_sentence() -> None:
    with pytest.raises(SitusError, match="Casts: an audit cannot run this module: RuntimeError: ") as error:
        audit.guard(Casts(), img_size=16)
    assert "\n" not in str(error.value)
