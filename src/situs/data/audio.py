"""What a clip is brought to, which classes it has and what a model is given of it: one config for a set of sound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from situs.data.spectrogram import SpectrogramConfig
from situs.errors import SitusError
from situs.limits import Positive

Task = Literal["all", "commands"]
Silence = Literal["noise", "empty"]


@dataclass(frozen=True, kw_only=True)
class AudioConfig(SpectrogramConfig):
    """The clips of a set of sound and their features, [1, numbers of a frame, frames] of each."""

    seconds: Positive = 1.0
    """Length of a clip. A shorter one is filled up with silence behind it, of a longer one the beginning is kept."""

    task: Task = "all"
    """Every word a class; or commands: the ten words of Speech Commands, unknown (all others) and silence."""

    silence: Silence = "noise"
    """commands: silence is cut from the background noise at a random level, or empty, as TensorFlow evaluates it."""

    noise: str | None = None
    """Folder of background noise; by default _background_noise_ of the set."""

    level: Literal["as_is", "peak", "rms"] = "as_is"
    """Each clip at its own level, or brought to a peak of 1, or to a root mean square of 0.1."""

    snr_db: float | None = None
    """Evaluation: background noise so many decibels below each clip; none: clean."""

    def check(self) -> None:
        super().check()
        if self.samples < self.transform and not self.centred:
            raise SitusError(
                field="seconds", value=self.seconds, allowed=f"at least a frame, {self.transform / self.rate:g} s"
            )

    @property
    def samples(self) -> int:
        """Samples of a clip."""
        return max(1, round(self.rate * self.seconds))

    @property
    def size(self) -> tuple[int, int]:
        """Numbers of a frame, and frames of a clip."""
        return self.width, self.frames(self.samples)


AUDIO = AudioConfig()
