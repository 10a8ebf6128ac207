from __future__ import annotations

import torch
from builders import small_vit

from situs.measure.features import extract
from situs.measure.hooks import OnlineProbe
from situs.measure.knn import knn_accuracy
from situs.measure.position.head import position_curve
from situs.methods import MAE, MP3, Batch, MAEConfig, Method, MP3Config
from situs.train.contract import RunState
from situs.train.step import Ema


def method(kind: type[Method] = MP3) -> Method:
    torch.manual_seed(0)
    backbone = small_vit(8)
    config = MP3Config(0.5) if kind is MP3 else MAEConfig(0.5, 16, 1, 2)
    return kind(backbone, config)


def batches(seed: int, labels: bool = True) -> list[Batch]:
    torch.manual_seed(seed)
    images, classes = torch.randn(24, 3, 8, 8), torch.randint(3, (24,))
    images += classes.view(-1, 1, 1, 1)
    return [Batch(images[i : i + 9], torch.arange(24)[i : i + 9], {"label": classes[i : i + 9]} if labels else {})
            for i in (0, 9, 18)]  # fmt: skip


def probe(labels: bool = True, **config) -> OnlineProbe:
    return OnlineProbe(batches(1, labels), batches(2, labels), **config)


def state(subject: Method, step: int, total: int = 100, ema: Ema | None = None) -> tuple[RunState, dict[str, float]]:
    log: dict[str, float] = {}
    return RunState(subject, ema, step, (step - 1) // 10, total, 10, log.update), log


def test_the_numbers_are_those_of_the_evaluations() -> None:
    subject = method()
    found = probe(every=1, k=5).measure(subject)
    train, test = (extract(subject.backbone, batches(seed), positions=False) for seed in (1, 2))
    expected = knn_accuracy(train.features, train.labels, test.features, test.labels, 5)
    assert found["knn_accuracy"] == expected
    assert expected > 0.5  # the classes are there to be seen
    assert found["position_accuracy_test"] == position_curve(subject, batches(2), (0.5,)).accuracy[0.5]


def test_a_method_that_uses_positions_is_probed_with_them() -> None:
    subject = method(MAE)
    torch.nn.init.normal_(subject.backbone.model.pos_embed, std=3.0)
    found = probe(every=1, k=5).measure(subject)
    with_, without = (
        [extract(subject.backbone, batches(seed), positions=on) for seed in (1, 2)] for on in (True, False)
    )
    scores = [knn_accuracy(a.features, a.labels, b.features, b.labels, 5) for a, b in (with_, without)]
    assert scores[0] != scores[1]
    assert found == {"knn_accuracy": scores[0]}


def test_it_measures_every_few_epochs_and_at_the_end() -> None:
    """Also where the run ends in the middle of an epoch."""
    subject, watcher = method(), probe(every=2)
    for total, expected in ((50, [20, 40, 50]), (45, [20, 40, 45])):
        looks = []
        for step in (10, 20, 30, 40, 45, 50):
            seen, log = state(subject, step, total)
            watcher.after_step(seen)
            if step % 10 == 0:
                watcher.after_epoch(seen)
            looks += [step] if log else []
        assert looks[: len(expected)] == expected


def test_the_mean_of_the_weights_is_what_it_sees_and_the_weights_come_back() -> None:
    subject = method().train()
    ema = Ema(subject, 0.9)
    with torch.no_grad():
        for parameter in subject.parameters():
            parameter.normal_()
    weights = {name: tensor.clone() for name, tensor in subject.state_dict().items()}
    seen, log = state(subject, 10, ema=ema)
    probe(every=1).after_epoch(seen)
    assert log == probe(every=1).measure(method())  # the mean is still what the method was made with
    assert log != probe(every=1).measure(subject)
    assert all(torch.equal(weights[name], tensor) for name, tensor in subject.state_dict().items())
    assert subject.training


def test_without_labels_only_positions_are_probed() -> None:
    assert list(probe(labels=False, every=1).measure(method())) == ["position_accuracy_test"]
    assert probe(labels=False, every=1).measure(method(MAE)) == {}
