"""The unit of a noise's σ: the same for every batch and resumed run, by hand over the same images, and never sent."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from served import CONFIG, steps

from situs.data.open import open_source
from situs.data.sources.base import TensorSource
from situs.errors import SitusError
from situs.locks.key import Key, write_key
from situs.models.model import feature_defence_of
from situs.split.hiding import KEY, SAMPLES, Hide, Hiding, key_of, noise_scale, read_hiding
from situs.split.run import train_split
from situs.split.serving import make_server
from situs.split.whole import merge
from situs.train.run import make_method


def test_it_is_the_deviation_of_the_tokens_over_the_same_images_whatever_the_batch() -> None:
    backbone = make_method(CONFIG, list("0123456789")).backbone
    source = open_source("samples", "train", channels=1)
    found = {noise_scale(backbone, source, replace(CONFIG.data, batch=batch, seed=batch)) for batch in (1, 4, 300)}
    assert len(found) == 1
    few = TensorSource((torch.arange(5 * 28 * 28).view(5, 1, 28, 28) % 251).to(torch.uint8), None, None)
    with torch.no_grad():
        images = few.images.float() / 255
        z = backbone.assemble(backbone.embed((images - 0.5) / 0.25), backbone.positions()).z[:, backbone.num_prefix :]
    assert math.isclose(noise_scale(backbone, few, CONFIG.data), float(z.double().std()), rel_tol=1e-6)
    assert SAMPLES == 256


def test_a_run_keeps_its_scale_and_tells_nobody(tmp_path) -> None:
    """One image a step or eight, stopped and gone on with: one scale, which no message holds."""
    scales, told = set(), []
    for batch in (1, 8):
        config = replace(steps(2), data=replace(CONFIG.data, batch=batch))
        server = make_server(config, tmp_path / f"server{batch}", device="cpu")

        def call(message, _, server=server):
            told.append(repr((message.facts, {k: v.flatten()[:3].tolist() for k, v in message.tensors.items()})))
            return server.answer("me", message)

        out = tmp_path / f"split{batch}"
        train_split(config, call, Hide(defence="noise=0.5"), out=out, device="cpu", quiet=True)
        scales.add(read_hiding(out).scale)
        longer = replace(config, train=replace(config.train, max_steps=3))
        train_split(longer, call, resume=out, device="cpu", quiet=True)
        scales.add(read_hiding(out).scale)
        merge(out, tmp_path / f"server{batch}", tmp_path / f"whole{batch}")
        assert feature_defence_of(tmp_path / f"whole{batch}") == ("noise=0.5", read_hiding(out).scale)
    assert len(scales) == 1 and scales != {1.0}
    assert not any(repr(scale)[:8] in line for scale in scales for line in told)


def test_a_run_is_opened_with_the_key_it_was_trained_with(tmp_path) -> None:
    key, other = Key(bytes(range(32))), Key(bytes(32))
    assert key_of(tmp_path, Hiding(), other) is None  # nothing is hidden, so nothing is opened
    for hiding in (Hiding(("columns",), key_id=key.id), Hiding(defence="noise=0.5", key_id=key.id)):
        assert key_of(tmp_path, hiding, key) is key
        with pytest.raises(SitusError, match=f"was trained with the key {key.id}, but this key is {other.id}") as told:
            key_of(tmp_path, hiding, other)
        assert told.value.field == "key"
        with pytest.raises(SitusError, match=f"does not contain the key {key.id} of its training") as told:
            key_of(tmp_path, hiding, None)
        assert told.value.field == "key"
    write_key(key, tmp_path / KEY)
    assert key_of(tmp_path, Hiding(("rows",), key_id=key.id), None) == key
