"""The engine: few uploads at a time, made once for all attacks, and the same answers as all at once."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from builders import small_vit

from situs.audit import Matching, MatchingConfig, PatchEmbedding, create_attack, create_defence, engine
from situs.audit.attacks.base import Attack, Knowledge, Ready, Recovery, Refused
from situs.audit.cases import Case, ImageFinding, TestSet
from situs.audit.client import upload_of, victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import MaskedJigsaw, NoDefence, Noise, NoPositionGradient, Step
from situs.audit.run import take_turns
from situs.audit.scores import BEST_PSNR, measure, psnr
from situs.errors import SitusError
from situs.findings import NO_NOISE

NORMALISATION = ((0.5,), (0.25,))
COUNT = 20


@pytest.fixture(scope="module")
def backbone() -> Any:
    torch.manual_seed(0)
    return small_vit(8, depth=1, in_chans=1, num_classes=3).eval()


def images(count: int = COUNT) -> TestSet:
    pixels = (torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(1)) - 0.5) / 0.25
    return TestSet(pixels, torch.arange(count) % 3, NORMALISATION)


class Spy(Attack):
    """Gives grey for what it is given, `most` uploads a turn, and remembers which these were."""

    name, about = "spy", "looks on"

    def __init__(self, most: int = 99, reads: tuple[str, ...] | None = None) -> None:
        super().__init__()
        self.most, self.reads = most, reads
        self.seen: list[tuple[int, int]] = []
        self.names: set[str] = set()

    def prepare(self, backbone: Any, sent: Any, known: Any) -> Ready:
        return Ready(self.reads)

    def recover(self, backbone: Any, uploads: Any, known: Any = None, deadline: Any = None) -> Recovery:
        self.seen.append((known.first, len(uploads)))
        self.names |= {*uploads[0]}
        count = min(self.most, len(uploads))
        return Recovery(torch.zeros(count * known.step.batch, 1, 8, 8), [{}] * count)


def findings(
    cases: list[Case], test: TestSet, step: Step | None = None, deadline: Deadline | None = None, lpips: Any = None
) -> Iterator[Any]:
    return take_turns(engine.trials_of(cases, test, step, lpips), deadline or Deadline())


def run(cases: list[Case], test: TestSet | None = None, *args: Any) -> dict[Case, ImageFinding]:
    return {each.case: each for each in findings(cases, test or images(), *args)}


def test_no_more_uploads_are_held_than_a_group_has(backbone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many images there are, and whatever attacks read; each upload is made once for all who attack it."""
    alive, most, made = weakref.WeakSet[Any](), [0], []

    class Held(dict[str, Any]):
        __hash__ = object.__hash__  # type: ignore[assignment]

    def sent(model: Any, batch: Any, *args: Any) -> Any:
        found = Held(upload_of(model, batch, *args))
        alive.add(found["model.pos_embed"])
        gc.collect(0)
        made.append(batch.ids.tolist())
        most[0] = max(most[0], len(alive))
        return found

    monkeypatch.setattr(engine, "upload_of", sent)
    spies = [Spy(), Spy(reads=("model.pos_embed",))]
    found = run([Case("m", backbone, NoDefence(), spy) for spy in spies])
    assert [(o.status, o.count) for o in found.values()] == [("done", COUNT)] * 2
    assert most == [engine.GROUP] and made == [[i] for i in range(COUNT)]
    assert spies[0].seen == spies[1].seen == [(0, 8), (8, 8), (16, 4)]


def test_local_steps_without_end_take_their_share_of_the_time_and_are_not_attacked(backbone: Any) -> None:
    endless, plain = (Case("m", backbone, create_defence(name), Spy()) for name in ("fedavg=1e9", "none"))
    began = time.monotonic()
    found = run([endless, plain], images(2), Step(), Deadline(seconds=0.5))
    assert time.monotonic() - began < 10
    assert found[plain].status == "done" and endless not in found
    few = Case("m", backbone, create_defence("fedavg=3"), Spy())
    assert run([few], images(2), Step(), Deadline(seconds=60))[few].status == "done"


def test_local_steps_longer_than_their_share_are_made_in_the_time_that_others_leave(backbone: Any) -> None:
    ticks = count()  # a second whenever the clock is asked, which is once a local step
    slow, *quick = (Case("m", backbone, create_defence(name), Spy()) for name in ("fedavg=30", *["none"] * 3))
    found = run([slow, *quick], images(1), Step(), Deadline(seconds=100, clock=lambda: float(next(ticks))))
    assert [found[each].status for each in quick] == ["done"] * 3 and list(found)[-1] is slow, "its first turn was cut"
    assert found[slow].status == "done"


def test_large_uploads_come_one_by_one_and_small_ones_only_as_far_as_they_are_read(
    backbone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, part = Spy(), Spy(reads=("model.pos_embed",))
    size = 4 * sum(p.numel() for p in backbone.parameters())
    monkeypatch.setattr(engine, "GROUP_BYTES", 3 * size)
    run([Case("m", backbone, NoDefence(), part)])
    run([Case("m", backbone, NoDefence(), whole)])
    assert part.names == {"model.pos_embed"} and part.seen[0] == (0, 8)
    assert len(whole.names) > 10 and whole.seen[:2] == [(0, 3), (3, 3)]
    monkeypatch.setattr(engine, "GROUP_BYTES", 1)
    run([Case("m", backbone, NoDefence(), other := Spy())], images(2))
    assert other.seen == [(0, 1), (1, 1)]


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_groups_give_what_all_uploads_at_once_give(backbone: Any, batch: int) -> None:
    """Scores, facts and a search's own noise, against the attack on all uploads in one call."""
    test, step = images(18), Step(batch=batch, seed=3)
    parts = zip(test.pixels.split(batch), test.labels.split(batch), torch.arange(18).split(batch), strict=True)
    uploads = [victim_gradients(backbone, x, y, step=Step(seed=3), ids=i, defence=Noise(1e-4)) for x, y, i in parts]
    known = Knowledge(Noise(1e-4), Step(batch, seed=3), normalisation=NORMALISATION)
    attacks = [PatchEmbedding(), Matching(MatchingConfig(iterations=3, parallel=8))]
    found = run([Case("m", backbone, Noise(1e-4), attack) for attack in attacks], test, step)
    for attack, outcome in zip(attacks, found.values(), strict=True):
        whole = attack.recover(backbone, uploads, known, Deadline())
        assert outcome.status == "done" and outcome.count == len(outcome.facts) == 18
        assert [fact.get("residual") for fact in outcome.facts[::batch]] == [f.get("residual") for f in whole.facts]
        if batch == 1:
            pictures = (whole.images.double() * 0.25 + 0.5).clamp(0, 1)
            expected = measure(pictures, test.real(), backbone, None)
            assert outcome.scores["psnr"] == pytest.approx(expected["psnr"], abs=1e-9)
            assert outcome.scores["reidentified"] == expected["reidentified"]
            torch.testing.assert_close(outcome.shown, pictures[: engine.SHOWN], rtol=0, atol=1e-9)


class Ticking(Spy):
    """Takes two seconds a turn."""

    now = 0.0

    def recover(self, *args: Any) -> Recovery:
        Ticking.now += 2
        return super().recover(*args)


def test_a_stop_leaves_every_case_the_first_images(backbone: Any) -> None:
    """113 images with a time limit once stopped before anything was attacked."""
    deadline = Deadline(seconds=10, clock=lambda: Ticking.now)
    cases = [Case("m", backbone, defence, Ticking()) for defence in (NoDefence(), Noise(1e-3), Noise(1e-2))]
    found = run(cases, images(113), Step(), deadline)
    assert [(o.status, o.why("stopped")) for o in found.values()] == [
        ("stopped", "16 of 113 images"),
        ("stopped", "16 of 113 images"),
        ("stopped", "8 of 113 images"),
    ]


def test_an_attack_with_seconds_for_all_images_has_turns_until_they_are_gone(backbone: Any) -> None:
    class Limited(Ticking):
        def prepare(self, *args: Any) -> Ready:
            return Ready(None, seconds=5.0)

    deadline = Deadline(clock=lambda: Ticking.now)
    cases = [Case("m", backbone, NoDefence(), attack) for attack in (Limited(), Ticking())]
    found = run(cases, images(40), Step(), deadline)
    assert [(o.status, o.why("stopped")) for o in found.values()] == [("stopped", "24 of 40 images"), ("done", None)]
    assert deadline.reason == "the limit of 5 s for a search"


def test_an_attack_that_came_short_goes_on_where_it_stopped(backbone: Any) -> None:
    slow, quick = Spy(most=3), Spy()
    found = run([Case("m", backbone, NoDefence(), attack) for attack in (slow, quick)])
    assert [first for first, _ in slow.seen] == [0, 3, 6, 9, 12, 15, 18]
    assert quick.seen == [(0, 8), (8, 8), (16, 4)]
    assert [(o.status, o.count) for o in found.values()] == [("done", COUNT)] * 2
    once = run([Case("m", backbone, NoDefence(), Spy(most=3), images=6, seconds=9.0)])
    [outcome] = once.values()
    assert (outcome.status, outcome.why("stopped")) == ("stopped", "3 of 6 images")  # its own time was all it had


def test_an_attack_that_gives_back_nan_fails_alone_and_hides_no_image_that_it_found(backbone: Any) -> None:
    test = images(4)

    class Broken(Spy):
        """Finds all but some pixels of the second upload's last image."""

        closed_form = True

        def recover(self, *args: Any) -> Recovery:
            found = test.pixels.clone()
            found[3, 0, :2] = torch.nan
            return Recovery(found, [{"fits": True}, {"fits": True}])

    broken, spy = (Case("", backbone, NoDefence(), attack) for attack in (Broken(), Spy()))
    found = run([broken, spy], test, Step(batch=2))
    assert [found[case].status for case in (broken, spy)] == ["done", "done"]
    assert [fact.get("broken", False) for fact in found[broken].facts] == [False, False, True, True]
    assert found[broken].exact == 3 and "do not fit for 2 of 4 images" in str(found[broken].why("doubt"))
    black, last = test.real()[3:].clone(), test.real()[3:]
    black[:, :, :2] = 0.0
    assert (found[broken].scores["psnr"] or [])[3] == pytest.approx(float(psnr(black, last)))


def test_pictures_are_compared_with_what_the_model_was_fed_too_and_nan_is_black(
    backbone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model mirrors its images, all but the first; the attack finds what came of them, but for some pixels."""
    test = images(4)

    def fed(_backbone: Any, _stem: Any, _inputs: Any, x: torch.Tensor) -> torch.Tensor | None:
        return None if torch.equal(x[0], test.pixels[0]) else x.flip(-1)

    class Mirrored(Spy):
        def recover(self, *args: Any) -> Recovery:
            found = test.pixels.flip(-1)
            found[0], found[3, 0, :2] = test.pixels[0], torch.nan
            return Recovery(found, [{}] * 4)

    monkeypatch.setattr(engine, "pictures_fed", fed)
    [found] = run([Case("", backbone, NoDefence(), Mirrored())], test).values()
    black, last = test.real()[3:].flip(-1), test.real()[3:].flip(-1)
    black[:, :, :2] = 0.0
    wanted = [BEST_PSNR] * 3 + [float(psnr(black, last))]
    assert found.scores["psnr"] == pytest.approx(wanted)
    against = psnr(black, test.real()[3:])
    assert float(against) < wanted[3]  # the closer of the two counts


@pytest.mark.parametrize("referenced", [True, False])
def test_pictures_that_are_shown_are_no_brighter_than_white_and_no_darker_than_black(
    backbone: Any, referenced: bool
) -> None:
    class Beyond(Spy):
        def recover(self, *args: Any) -> Recovery:
            return Recovery(torch.tensor([9.0, -9.0, 0.0]).view(3, 1, 1, 1).expand(3, 1, 8, 8), [{}] * 3)

    test = replace(images(3), referenced=referenced)
    [found] = run([Case("", backbone, NoDefence(), Beyond())], test).values()
    assert found.shown is not None and found.shown.amax(dim=(1, 2, 3)).tolist() == [1.0, 0.0, 0.5]
    assert torch.equal(found.shown.amin(dim=(1, 2, 3)), found.shown.amax(dim=(1, 2, 3)))


def test_refusals_come_first_and_what_runs_by_itself_only_where_nothing_closed_does(backbone: Any) -> None:
    class No(Spy):
        closed_form = True

        def prepare(self, backbone: Any, sent: Any, known: Any) -> Any:
            return Refused("no table") if "model.pos_embed" not in sent else Ready(None)

    no = No()
    cases = []
    for defence in (NoDefence(), NoPositionGradient()):
        cases += [Case("m", backbone, defence, no), Case("m", backbone, defence, Spy(), fallback="why")]
    found = list(findings(cases, images(2)))
    first, rest = [(cases[2], "refused"), (cases[3], "not_run")], [(cases[0], "done"), (cases[3], "done")]
    assert [(o.case, o.status) for o in found] == first + rest
    assert found[3].caveat == "why" and found[0].why("refused") == "no table"


def test_cases_that_differ_in_the_comparison_alone_are_one_attack(backbone: Any) -> None:
    test = images(3)
    test = replace(test, shuffled=test.pixels.flip(0), mask=torch.zeros(3, 4, dtype=torch.bool))
    spy = Spy()
    cases = [Case("m", backbone, NoDefence(), spy, "shuffled", which) for which in ("shuffled", "original")]
    found = run(cases, test)
    assert spy.seen == [(0, 3)]
    b, c = (found[case].scores for case in cases)
    assert b["mse"] == pytest.approx((c["mse"] or [])[::-1]) and b["mse"] != c["mse"]
    assert b["hidden_psnr"] is None and b["shown_psnr"] == pytest.approx(b["psnr"])


@pytest.mark.parametrize(
    ("defence", "trained_on", "moved", "fed"),
    [
        (NoDefence(), "original", False, True),
        (NoDefence(), "shuffled", True, False),
        (MaskedJigsaw(0.5), "original", False, False),
        (MaskedJigsaw(0.5), "shuffled", False, False),
    ],
)
def test_a_step_on_shuffled_images_takes_them_unless_its_method_shuffles_itself(
    backbone: Any, defence: Any, trained_on: str, moved: bool, fed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is shuffled is compared as its setting says, and not with what the model was fed."""
    monkeypatch.setattr(engine, "pictures_fed", lambda *given: given[-1].flip(-1))
    test = replace(images(2), shuffled=images(2).pixels.flip(0))
    client = engine.Client(Case("m", backbone, defence, Spy(), trained_on), test, Step())
    assert client.pixels is (test.shuffled if moved else test.pixels)
    client.upload(1)
    assert list(client.fed) == [1] * fed
    for picture in client.fed.values():
        torch.testing.assert_close(picture, test.real()[1].flip(-1))


def test_images_must_fill_their_batches(backbone: Any) -> None:
    with pytest.raises(SitusError, match=r"3 images .*batches of 2"):
        run([Case("m", backbone, NoDefence(), Spy())], images(3), Step(batch=2))


def test_what_a_defence_changes_of_the_step_is_told_and_never_passes_for_proof() -> None:
    """int8 and Adam are solved as far as they let it, dropout spoils what stands behind it; none of that passes."""
    torch.manual_seed(0)
    model = small_vit(8, depth=2, width=48, num_classes=5, in_chans=1, patch_size=2).eval()
    attacks = [create_attack("patchembed"), create_attack("tokens")]
    named = ["int8", "dropout", "fedavg=3", "fedavg-adam", "clip-batch"]
    cases = [Case("m", model, create_defence(name), attack) for name in named for attack in attacks]
    found = {(each.case.defence.name, each.attack): each for each in run(cases, images(2)).values()}
    solved = ("dropout", "fedavg", "clip-batch")
    assert all(
        found[name, "patchembed"].exact == 2 and found[name, "patchembed"].why("doubt") == NO_NOISE for name in solved
    )
    for name in ("int8", "fedavg-adam"):
        assert all(found[name, attack.name].why("doubt") and not found[name, attack.name].exact for attack in attacks)
    assert "dropout (0.1)" in str(found["dropout", "tokens"].why("doubt"))
    clipped = found["clip-batch", "tokens"]  # rounding decides: 53 to 71 dB
    assert clipped.why("doubt") == NO_NOISE and min(clipped.scores["psnr"] or [0.0]) > 45
    two, three = (Case("m", model, create_defence(f"accumulate={m}"), attacks[0]) for m in (2, 3))
    summed = run([two, three], images(2))
    assert summed[two].count == 2 and "a batch of 2" in str(summed[two].caveat)
    said = str(summed[three].why("refused"))
    assert said.startswith("2 images") and "batches of 3" in said
