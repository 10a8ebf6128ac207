"""Secret randomness that a resumed run can repeat: ChaCha20 under a key of the run's own.

An attacker who knows the noise of a step subtracts it, and one who knows which samples a step took loses the
amplification by sampling. So both come from 32 bytes of the operating system, never from the run's seed, which is in
its config. They are in the run's folder, readable by its owner alone, until the run is complete, and are then deleted.
The library's other draws are fast hashes whose outputs reveal their seed, so they are not used here. Each step has its
own words, so that a run resumes at any step as if it had never stopped.
"""

from __future__ import annotations

import math
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from situs.errors import SitusError, missing_extra

FILE = "dp.secret"
SIZE = 32


@dataclass(frozen=True)
class Secret:
    """The key of all private draws of a run."""

    value: bytes = field(repr=False)

    def words(self, step: int, purpose: str, count: int) -> Tensor:
        """Independent uniform 64-bit words, [count] int64; for another step or purpose, others."""
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher
            from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
        except ImportError:
            raise missing_extra("cryptography", "dp", "training with differential privacy") from None
        subkey = HKDFExpand(SHA256(), SIZE, f"situs dp {purpose} {step}".encode()).derive(self.value)
        stream = Cipher(ChaCha20(subkey, bytes(16)), mode=None).encryptor().update(bytes(8 * count))
        return torch.frombuffer(bytearray(stream), dtype=torch.int64) if count else torch.empty(0, dtype=torch.int64)

    def normal(self, step: int, purpose: str, like: Tensor) -> Tensor:
        """Standard normal numbers in float64, shaped as `like` and on its device (Box and Muller)."""
        half = -(-like.numel() // 2)
        words = self.words(step, purpose, 2 * half).to(like.device)
        radius, angle = uniform(words).view(2, half)
        radius = torch.sqrt(-2.0 * torch.log1p(-radius))
        turned = torch.stack([radius * torch.cos(2 * math.pi * angle), radius * torch.sin(2 * math.pi * angle)])
        return turned.flatten()[: like.numel()].view(like.shape)

    def sample(self, step: int, count: int, rate: float) -> Tensor:
        """The samples of a step: each of `count` independently with probability `rate`, [b] int64."""
        return (uniform(self.words(step, "samples", count)) < rate).nonzero().squeeze(1)


def uniform(words: Tensor) -> Tensor:
    """Words as numbers in [0, 1), float64."""
    return ((words >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def secret_of(run: Path) -> tuple[Secret, bool]:
    """A run's secret, and whether it was there before; else a new one, which is written."""
    path = run / FILE
    try:
        if path.exists():
            value = path.read_bytes()
            if len(value) != SIZE:
                raise SitusError(f"{path}: must have {SIZE} bytes; delete it to continue with a new one")
            return Secret(value), True
        value = secrets.token_bytes(SIZE)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(value)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise SitusError(
            f"{path}: the secret of the noise cannot be read or written: {error.strerror or error}"
        ) from error
    return Secret(value), False


def forget(run: Path) -> None:
    """Deletes a complete run's secret."""
    (run / FILE).unlink(missing_ok=True)
