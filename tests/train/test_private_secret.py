"""The secret chance of DP-SGD: the same for a step whenever it is asked, independent otherwise, and truly normal."""

from __future__ import annotations

import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from situs.errors import SitusError
from situs.train.private import KEY_FILE, KEY_SIZE, Secret, forget_secret, secret_of, uniform

pytest.importorskip("cryptography")


def test_words_are_those_of_chacha20_under_a_key_of_their_own() -> None:
    import hashlib
    import hmac

    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    value = bytes(range(KEY_SIZE))
    subkey = hmac.new(value, b"situs dp noise 7" + b"\x01", hashlib.sha256).digest()  # HKDF-Expand, RFC 5869
    stream = Cipher(algorithms.ChaCha20(subkey, bytes(16)), mode=None).encryptor().update(bytes(80))
    assert Secret(value).words(7, "noise", 10).tolist() == np.frombuffer(stream, dtype="<i8").tolist()


def test_a_step_has_the_same_chance_again_and_another_step_or_purpose_other() -> None:
    secret, like = Secret(bytes(KEY_SIZE)), torch.zeros(5, 3)
    first = secret.normal(4, "a", like)
    assert first.shape == (5, 3) and first.dtype == torch.float64
    assert torch.equal(first, Secret(bytes(KEY_SIZE)).normal(4, "a", like))
    others = [secret.normal(5, "a", like), secret.normal(4, "b", like), Secret(b"1" * KEY_SIZE).normal(4, "a", like)]
    assert all(not torch.isclose(first, other).any() for other in others)


def test_the_noise_is_normal_and_the_samples_are_drawn_each_by_itself() -> None:
    secret = Secret(bytes(KEY_SIZE))
    noise = secret.normal(0, "noise", torch.zeros(200_001)).numpy()
    assert stats.kstest(noise, "norm").pvalue > 0.01
    assert abs(np.corrcoef(noise[:100_000], noise[100_001:])[0, 1]) < 0.01  # the two halves come of the same radii
    numbers = uniform(torch.tensor([0, -1, 1 << 62]))
    assert numbers.tolist() == [0.0, 1 - 2.0**-53, 0.25]
    taken = torch.stack([torch.bincount(secret.sample(step, 50, 0.2), minlength=50) for step in range(400)])
    assert int(taken.max()) == 1
    assert stats.chisquare(taken.sum(dim=0).numpy()).pvalue > 0.01
    sizes = taken.sum(dim=1).double()
    assert abs(float(sizes.mean()) - 10) < 0.5 and abs(float(sizes.var()) - 8) < 2  # binomial, not a fixed number


def test_the_secret_is_for_its_owner_alone_and_is_forgotten(tmp_path: Path) -> None:
    secret, known = secret_of(tmp_path)
    assert not known and len(secret.value) == KEY_SIZE
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    assert secret_of(tmp_path) == (secret, True)
    assert secret.value.hex() not in repr(secret) and str(secret.value) not in repr(secret)
    forget_secret(tmp_path)
    assert secret_of(tmp_path)[0] != secret
    (tmp_path / KEY_FILE).write_bytes(b"short")
    with pytest.raises(SitusError, match="must have 32 bytes"):
        secret_of(tmp_path)
