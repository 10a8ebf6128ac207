"""What fits into the time: the plan, the image size and the timing of a step, with a clock that the tests move."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from situs.data.config import DataConfig
from situs.measure.adapt import run as runs
from situs.measure.adapt.bench import SCALES
from situs.measure.adapt.run import FROZEN, Plan, Search, affordable, neighbours_better, plan_of, seconds_of
from situs.measure.adapt.ways import Initial, TriedWay, Way, balanced, folds_of

UPDATE = {"LoRA": 0.2, "all layers": 0.3, "head": 0.1}
CPU = torch.device("cpu")


def slow_plan(pretraining: float | None, image: float, count: int, total: int, left: float) -> Plan:
    """Every number of steps from all to none, and for each every length: the first that fits."""
    steps = [(way, False) for way in UPDATE]
    if pretraining is not None:
        steps += [(FROZEN, True)] + [(way, True) for way in UPDATE]
    costs, shortest = [], 0.0
    for kept in range(len(steps), 0, -1):
        for folds, part in ((5, 1), (2, 1), (1, 1), (1, 2), (1, 4)):
            length = min(total, max(100, total // part))
            seconds = {}
            for way, after in steps[:kept]:
                if way == FROZEN:
                    seconds[way, after] = count * image + length * (pretraining or math.nan)
                else:  # eight looks at the held-out fifth of the images
                    seconds[way, after] = folds * (length * UPDATE[way] + 8 * image * count / 5)
            refit = length * max(UPDATE[way] for way, _ in steps[:kept] if way in UPDATE)
            costs.append((Plan(seconds, folds, length, refit, tuple(steps[kept:]), shortest), refit))
            if kept == len(steps) and (folds, part) == (1, 4):
                shortest = sum(seconds.values()) + refit
    for plan, refit in costs:
        if sum(plan.seconds.values()) + refit <= left:
            return plan
    return Plan({}, 0, 0, 0.0, tuple(steps), shortest)


@pytest.mark.parametrize("pretraining", [None, 0.05, 0.7])
@pytest.mark.parametrize("total", [60, 300, 1000])
def test_the_plan_is_the_first_that_fits_of_all_there_are(pretraining: float | None, total: int) -> None:
    seen = set()
    for left in torch.logspace(-1, 4, 60).tolist():
        plan, slow = (
            make(*given)
            for make, given in (
                (plan_of, (UPDATE, pretraining, 0.01, 150, total, left)),
                (slow_plan, (pretraining, 0.01, 150, total, left)),
            )
        )
        assert (plan.folds, plan.total, plan.dropped) == (slow.folds, slow.total, slow.dropped)
        assert dict(plan.seconds) == pytest.approx(dict(slow.seconds))
        assert (plan.refit, plan.whole) == pytest.approx((slow.refit, slow.whole))
        seen.add((plan.folds, plan.total, len(plan.seconds)))
    assert len(seen) >= 6
    exactly = plan_of(UPDATE, None, 0.01, 150, 300, 1e6)
    whole = sum(exactly.seconds.values()) + exactly.refit
    assert plan_of(UPDATE, None, 0.01, 150, 300, whole) == exactly  # to the last second


class Clock:
    """A clock that only the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


def test_a_step_is_timed_after_the_first_and_by_the_mean_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    def steps() -> Iterator[None]:
        for seconds in (50.0, 1.0, 3.0, 70.0):
            clock.now += seconds
            yield

    left = steps()
    assert seconds_of(left, CPU) == 2.0
    assert len([*left]) == 1


def a_bench(clock: Clock, test: int | None, *, shape: tuple[int, int] = (96, 64), each: float = 1.0) -> Any:
    """What `affordable` asks of a bench of 30 images: a model of patches of 4 pixels that takes `each` s an image."""

    class Model:
        training = False
        grid, input = (shape[0] // 4, shape[1] // 4), SimpleNamespace(channels=3, shape=shape)

        def __call__(self, samples: Tensor) -> None:
            clock.now += each * len(samples)

    sets: dict[str, Any] = {"train": [None] * 30, "test": None if test is None else [None] * test}
    made = (None, SimpleNamespace(backbone=Model()))
    config = SimpleNamespace(data=DataConfig("samples"))
    return SimpleNamespace(make=lambda *_: made, device=CPU, config=config, **sets)


@pytest.mark.parametrize(
    ("test", "limit", "size", "said"),
    [
        (None, 120.0, None, ""),  # 30 s are a quarter of the limit, which is not too much
        (None, 119.0, (92, 60), "already takes about 30 s. The time limit for everything is 1.98333 min"),
        (
            10,
            120.0,
            (72, 48),
            "already takes about 50 s. The time limit for everything is 2 min",
        ),  # the test images twice
        (60, 60.0, (28, 28), "about 2 min"),  # not below seven patches to a side
        (600, 1.0, (28, 28), "about 20 min"),
    ],
)
def test_images_become_smaller_as_the_time_asks(
    test: int | None, limit: float, size: tuple[int, int] | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench: Any = a_bench(Clock(monkeypatch), test)
    monkeypatch.setattr(runs, "evaluating", lambda _: torch.no_grad())
    taken, line = affordable(bench, Initial("", "m"), limit, any_size=True)
    assert taken == size and said in line and bool(line) == (size is not None)
    kept, advice = affordable(bench, Initial("", "m"), limit, any_size=False)
    assert kept is None and (size is None or f"smaller images (img_size={size[0]})" in advice)
    small: Any = a_bench(Clock(monkeypatch), 10, shape=(28, 24))  # seven patches by six: there is no smaller size
    assert affordable(small, Initial("", "m"), 1.0, any_size=True)[1].endswith(" min; allow more minutes.")
    small.device = torch.device("cuda")
    assert affordable(small, Initial("", "m"), 1.0, any_size=True) == (None, "")


def tried(way: Way, right: str, setting: float = 0.0, origin: str = "") -> TriedWay:
    return TriedWay(way, Initial(origin, "m"), torch.tensor([float(hit) for hit in right]).double(), setting)


LABELS = torch.tensor([0, 1] * 20)


@pytest.mark.parametrize(("more", "told"), [(0, 0), (3, 0), (4, 1), (12, 1)])
def test_neighbours_are_named_beyond_chance(more: int, told: int) -> None:
    """Of 40 images: `more` won and none lost is a gain of more / 40 with an error of √more / 40; 1.96² = 3.84."""
    chosen, bench = tried("head", "1" * 20 + "0" * 20), SimpleNamespace(labels=LABELS, train=None)
    rows = [tried("kNN", "1" * (20 + more) + "0" * (20 - more), 7.0), tried("LoRA", "1" * 40), chosen]
    rows.append(rows[0]._replace(origin=Initial("mp3", "p"), right=torch.ones(40).double()))
    asked: list[dict[str, Any]] = []

    def frozen(config: Any, train: Any, positions: bool) -> Any:
        assert positions  # those of the given weights
        return SimpleNamespace(command=lambda verb, **more: asked.append({verb: more}) or "situs x")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "Frozen", frozen)
        found = neighbours_better(bench, None, rows, chosen)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert len(found) == told and asked == [{"knn": {"k": 7}}] * told
    if told:
        assert f"by {100 * more / 40:.1f} % (to measure kNN: situs x)" in found[0]


def a_search(clock: Clock, left: float, *, frozen: list[TriedWay] | None = None, pool: Any = None) -> Any:
    """A search of 60 s, of which `left` are left, on 40 images in batches of 8; a step of any way takes 0.1 s."""
    said: list[str] = []

    def trained(way: Way, *given: Any, check: Any) -> TriedWay:
        clock.now += 2.0
        check()
        said.append(f"given {given[2]:g} {given[4]} {given[5]}")
        return tried(way, "10" * 20)

    bench = SimpleNamespace(
        labels=LABELS, device=CPU, frozen=lambda *_: frozen or [tried("linear probe", "10" * 20, 0.5)], trained=trained,
        make=lambda *_: (None, None), loader=lambda **_: None,
        config=SimpleNamespace(data=SimpleNamespace(batch=8), train=SimpleNamespace(seed=3)),
    )  # fmt: skip
    features = {Initial("", "m"): torch.zeros(40, 2)}
    clock.now = 60.0 - left
    return Search(bench, "mp3", pool, said.append, 0.0, 60.0, features), said  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("left", "ways", "length", "remark"),
    [
        (60.0, ["LoRA", "all layers", "head"], 110, ""),
        # 100 steps of 0.1 s and eight looks at 8 images of 0.01 s: 10.6 s a way, and 10 s for the last fit
        (42.0, ["LoRA", "all layers", "head"], 100, ""),
        (
            41.0,
            ["LoRA", "all layers"],
            110,
            "1 min are not enough to try head. About 2 min are enough for all recipes.",
        ),
        (25.0, ["LoRA"], 110, "not enough to try all layers, head. About"),
        (19.0, [], 0, "not enough to try LoRA, all layers, head. About"),
        (8.0, [], 0, "not enough to try LoRA, all layers, head. About"),
        (7.9, [], 0, "1 min are not enough to try LoRA, all layers, head."),  # 100 batches of 8 forwards take 8 s
    ],
)
def test_a_search_tries_what_fits_and_says_what_does_not(
    left: float, ways: list[str], length: int, remark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, timed = Clock(monkeypatch), []
    monkeypatch.setattr(runs, "updates", lambda *_: None)
    monkeypatch.setattr(runs, "seconds_of", lambda *_: timed.append(0) or 0.1)
    search, said = a_search(clock, left)
    monkeypatch.setattr(runs, "UPDATES", 110)
    remarks = search.run(0.01)
    if remark:
        assert remarks[0] in said
    if ways:
        assert f"plan: LoRA, {length} updates on 1 fold, about {length / 10 + 0.64:.0f} s" in said
        whole = 60 - left + len(ways) * (length / 10 + 0.64) + length / 10
        assert f"plan: about {runs._clock(whole)} in total; the limit is 1 min" in said
    assert search.folds.equal(folds_of(LABELS, seed=3))
    assert [trial.way for trial in search.tried] == ["linear probe", *ways]
    assert len(timed) == (3 if left >= 8 else 0)
    assert remarks[0].startswith(remark) or remark in remarks[0] if remark else remarks == []
    assert (
        said[0]
        == f"linear probe: 50.0 % of 40 (balanced {100 * balanced(tried('head', '10' * 20).right, LABELS):.1f} %)"
    )
    assert [line for line in said if line.startswith("given")] == [f"given 0.5 1 {length}"] * len(ways)


def test_a_search_ends_where_the_last_fit_must_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings that take longer than planned: what does not end before the last fit is left out and named."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(runs, "updates", lambda *_: None)
    monkeypatch.setattr(runs, "seconds_of", lambda *_: 0.1)
    search, said = a_search(clock, 45.0)
    ends = iter([47.0, 50.0, 50.1])  # the last fit takes 10 of the 60 s
    plain = search.bench.trained

    def slow(*given: Any, check: Any) -> TriedWay:
        clock.now = next(ends) - 2.0
        return plain(*given, check=check)

    search.bench.trained = slow
    monkeypatch.setattr(runs, "UPDATES", 100)
    (remark,) = search.run(0.01)
    assert [trial.way for trial in search.tried] == ["linear probe", "LoRA", "all layers"]
    assert remark.startswith("The time limit was reached before these recipes were finished: head.")
    assert said[-1] == f"{remark} Press Ctrl-C again to end without a model."


def test_a_way_that_the_model_does_not_have_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    search, _ = a_search(Clock(monkeypatch), 60.0)

    def make(origin: Any, way: Way) -> Any:
        if way == "LoRA":
            raise runs.SitusError("no linear layers")
        return None, None

    search.bench.make = make
    monkeypatch.setattr(runs, "updates", lambda *_: None)
    monkeypatch.setattr(runs, "seconds_of", lambda *_: 0.1)
    remarks = search.run(0.01)
    assert remarks == ["LoRA: was not tried (no linear layers)."]
    assert [trial.way for trial in search.tried] == ["linear probe", "all layers", "head"]


@pytest.mark.parametrize(("batch", "count", "total"), [(8, 40, 300), (8, 400, 500), (100, 2950, 300), (None, 40, 300)])
def test_a_training_is_ten_epochs_or_300_updates_where_that_is_more(
    batch: int | None, count: int, total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, _ = a_search(Clock(monkeypatch), 60.0)
    search.bench.config = replace_batch(search.bench.config, batch)
    search.bench.labels = torch.zeros(count, dtype=torch.int64)
    monkeypatch.setattr(runs, "updates", lambda *_: None)
    monkeypatch.setattr(runs, "seconds_of", lambda *_: 1e-6)
    plan, remarks = search._plan(Initial("", "m"), 1e-9)
    assert (plan.total, plan.folds, remarks) == (total, 5, [])


def replace_batch(config: Any, batch: int | None) -> Any:
    return SimpleNamespace(data=SimpleNamespace(batch=batch), train=config.train)


def test_without_a_probe_a_head_starts_from_the_second_largest_decay() -> None:
    search: Any = SimpleNamespace(tried=[tried("kNN", "1", 5.0), tried("linear probe", "1", 0.25, "mp3")])
    assert Search.decay(search, Initial("mp3", "m")) == 0.25
    assert Search.decay(search, Initial("", "m")) == sorted(runs.DECAYS)[-2]


@pytest.mark.parametrize(("seconds", "words"), [(0.4, "0 s"), (99.4, "99 s"), (100.0, "2 min"), (3000.0, "50 min")])
def test_seconds_in_words(seconds: float, words: str) -> None:
    assert runs._clock(seconds) == words


def test_with_one_label_a_class_the_scale_is_one_that_folds_would_choose_among(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search, said = a_search(Clock(monkeypatch), 60.0)
    search.bench.labels = torch.arange(40)
    search.banks = {Initial("", "m"): torch.zeros(40, 2)}
    (remark,) = search.run(0.01)
    (only,) = search.tried
    assert only.way == "class means" and only.setting in SCALES and only.right.isnan().all() and len(only.right) == 40
    assert remark.startswith("Most classes have only one labelled sample") and said == []
