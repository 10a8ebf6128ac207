"""What an audit of images is made of: a test set, cases (one attack on what one model sends), and their findings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple, Self

from torch import Tensor

from situs.audit.attacks.base import Attack, Normalisation, certificate_of
from situs.audit.attacks.tokens.search import SHARP
from situs.audit.captured import Captured
from situs.audit.defences import Defence
from situs.audit.scores import BEST_PSNR, Blind, denormalise, exposures_of, gaps_of, mean_of, too_few
from situs.backbones.base import Backbone
from situs.errors import SitusError, counted
from situs.findings import Exposure, Fact, Finding, Metric, Remark, Status
from situs.methods.base import Method

EXACT = 54.15
"""PSNR in dB from which an image counts as recovered exactly: a mean error below half a grey level of 255."""

Which = Literal["original", "shuffled"]
"""An image as it is, or with some of its patches shuffled."""


class Setting(NamedTuple):
    """The images of the step, and those that what comes back is compared with."""

    trained_on: Which
    compared_with: Which

    @property
    def about(self) -> str:
        return (
            f"the attacked step trains on the {self.trained_on} images, and its reconstructions are compared with the "
            f"{self.compared_with} images"
        )


SETTINGS = {
    "a": Setting("original", "original"),
    "b": Setting("shuffled", "shuffled"),
    "c": Setting("shuffled", "original"),
}
"""The settings of MJP's Table 5 by name."""


@dataclass(frozen=True)
class TestSet:
    """The images under attack, or spectrograms. pixels: [n, C, H, W], normalised by `normalisation`. labels: [n].

    names: for a reader, by default the files'. left_out: what could not be read. stored: whether the numbers were bytes
    before; else an attacker cannot expect certain values. things: what the samples are called. notes: for a reader, by
    name. shuffled: the images with some patches shuffled, like pixels, where cases need them; mask: [n, N], those
    patches. public: other images of the same data that an attacker may have, like pixels. captured: what was sent for
    them, batch by batch; else it is computed. referenced: False where the images are not known, and pixels are blank.
    galleries: by name, pictures [m, C, H, W] in [0, 1] to compare with in place of `real`, those of the images first.
    """

    __test__: ClassVar[bool] = False  # pytest takes whatever begins with Test

    pixels: Tensor
    labels: Tensor
    normalisation: Normalisation
    names: Sequence[str] = ()
    shuffled: Tensor | None = None
    mask: Tensor | None = None
    left_out: tuple[str, ...] = ()
    stored: bool = True
    things: str = "images"
    notes: Mapping[str, str] = field(default_factory=dict)
    public: Tensor | None = None
    captured: Sequence[Captured] = ()
    referenced: bool = True
    galleries: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [*self.names, *(str(i) for i in range(len(self.names), len(self.pixels)))]
        twice = {name for name, count in Counter(names).items() if count > 1}  # a gate tells samples by their names
        unique = [f"{name} (number {i + 1})" if name in twice else name for i, name in enumerate(names)]
        object.__setattr__(self, "names", unique)

    def __len__(self) -> int:
        return len(self.pixels)

    def inputs(self, which: str) -> Tensor:
        """The normalised images."""
        if which == "original":
            return self.pixels
        assert self.shuffled is not None, "a case needs shuffled images, but there are none"
        return self.shuffled

    def real(self, which: str = "original") -> Tensor:
        """The images as pictures, [n, C, H, W] in [0, 1]; or the gallery of this name."""
        if which in self.galleries:
            return self.galleries[which]
        if which not in self._pictures:
            self._pictures[which] = denormalise(self.inputs(which), *self.normalisation)
        return self._pictures[which]

    @cached_property
    def _pictures(self) -> dict[str, Tensor]:
        return {}

    def whole_batches(self, batch: int) -> None:
        """Refuses images that do not make whole batches."""
        if len(self) % batch:
            raise SitusError(
                f"{counted(len(self), self.things)} cannot be divided into batches of {batch}",
                field=("count", "batch"),
            )


@dataclass(frozen=True, eq=False)
class Case:
    """One attack on what one model sends. model: a backbone, trained as the defence says, or a run's own method.

    trained_on: the images of the step; a method that shuffles patches itself is given the originals. informed: whether
    the attacker knows the defence and the method. compared_with: the references of its scores. images, seconds: it
    attacks the first images only, for so long at most. fallback: why an attack is run that nobody asked for, which is
    where no closed form applies. hardest: whether the step has the least likely labels instead of the images' own,
    under which gradients are largest. batch: images behind an upload. patches: of an image.
    """

    name: str
    model: Backbone | Method
    defence: Defence
    attack: Attack
    trained_on: Which = "original"
    compared_with: str = "original"
    informed: bool = True
    images: int | None = None
    seconds: float | None = None
    fallback: str = ""
    hardest: bool = False
    batch: int = 1

    @property
    def patches(self) -> int:
        return self.backbone.num_tokens

    @property
    def backbone(self) -> Backbone:
        return self.model if isinstance(self.model, Backbone) else self.model.backbone

    @property
    def setting(self) -> str:
        """a, b or c, of `SETTINGS`."""
        return next(name for name, step in SETTINGS.items() if step == (self.trained_on, self.compared_with))

    @property
    def attacker(self) -> str:
        """ "patchembed, uninformed": the attack, and whether its attacker knows the defence."""
        return f"{self.attack.name}, {'informed' if self.informed else 'uninformed'}"

    def finding(self, status: Status, numbers: Sequence[int] = (), **fields: Any) -> ImageFinding:
        """Its finding on the images of these numbers."""
        return ImageFinding(
            self.attack.name + ", least likely labels" * self.hardest,
            self.defence.label,
            status,
            [str(number) for number in numbers],
            len(numbers),
            closed=self.attack.closed_form,
            bound=self.attack.is_bound,
            hardest=self.hardest,
            case=self,
            numbers=tuple(numbers),
            **fields,
        )

    def refused(self, reason: str) -> ImageFinding:
        """The finding of an attack that does not apply."""
        return self.finding("refused", remarks=[Remark("refused", reason)])

    def same_upload(self, other: Case) -> bool:
        """Whether the same gradients are sent in both."""
        mine, theirs = ((case.model, case.defence, case.trained_on, case.hardest) for case in (self, other))
        return mine[0] is theirs[0] and mine[1:] == theirs[1:]

    def same_recovery(self, other: Case) -> bool:
        """Whether the attacker recovers the same pictures in both."""
        return self.same_upload(other) and self.attack is other.attack and self.informed == other.informed


@dataclass(frozen=True)
class ImageFinding(Finding):
    """The finding of a case. shown: the first recovered pictures, [m, C, H, W] in [0, 1]. numbers: of the attacked
    images among all."""

    case: Case = field(kw_only=True)
    numbers: Sequence[int] = field(default=(), kw_only=True)

    @property
    def key(self) -> Case:
        return self.case

    @property
    def exact(self) -> int:
        """How many images were recovered exactly."""
        return sum(value >= EXACT for value in self.scores.get("psnr") or ())

    @property
    def to_the_byte(self) -> int:
        """Of how many images the attacker can prove that every byte is right."""
        return sum(fact.get("bytes") is True for fact in self.facts) - self.others

    @property
    def others(self) -> int:
        """How many images with such a proof are not those of the data: then the data are not what was trained on."""
        pairs = zip(self.facts, self.scores.get("psnr") or (), strict=False)
        return sum(fact.get("bytes") is True and psnr < EXACT for fact, psnr in pairs)

    @property
    def mean_psnr(self) -> float:
        """Mean PSNR in dB; 0 where nothing was attacked."""
        return mean_of(self.scores.get("psnr") or [0.0]).mean

    @property
    def worst_psnr(self) -> float:
        """PSNR in dB of the most exposed image, which a gate takes and a page shows; 0 where nothing was attacked."""
        return max(self.scores.get("psnr") or [0.0])

    def against(self, blind: Blind, names: Sequence[str]) -> Self:
        """The same with the exposures that a gate reads: scores beside those of blind guesses. names: of all images."""
        if not self.attacked:
            return replace(self, asked=len(names))
        batch = self.case.batch
        chance = min(1.0, batch / len(names))
        more = gaps_of(self, self.count)
        if too_few(len(names), batch):
            reason = f"with only {counted(len(names), 'images')}, re-identification may be chance: give more images"
            more.append(Remark("few", reason))
        return replace(
            self,
            samples=[names[number] for number in self.numbers],
            asked=len(names),
            exposures=exposures_of(self.scores, names, self.numbers, blind, self.case.patches, chance),
            remarks=[*(remark for remark in self.remarks if remark.kind not in ("gap", "few")), *more],
        )


# ---------------------------------------------------------------------------------------------------------------------
# What a closed form proves of a captured upload's image without a reference, as a PSNR that it promises.
#
# Its equations must fit, have one solution and leave little of a pixel uncertain. Such an image is above any gate: also
# where a reference is given, which may be another image than the one behind the upload.


RECOGNISABLE = 30.0
"""PSNR in dB from which an image whose recovery is certified counts as above, whatever the limit."""

CERTIFIED = Metric("certified_psnr", scale=3.0, most=BEST_PSNR, unit="dB")
"""The PSNR that an attacker can promise without the image, by its equations."""


def certified_psnr(fact: Mapping[str, Fact], noise: float, normalisation: Normalisation) -> float | None:
    """The PSNR in dB that a closed form promises of an image by its own facts; None where it promises none.

    noise: deviation of the errors on the upload. `open` is the share of a pixel's variance that they leave uncertain;
    an attack that does not report it (tokens) proves its pixels up to `SHARP` where there is no noise.
    """
    if fact.get("bytes") is True:
        return BEST_PSNR
    certificate = certificate_of(fact)
    if not (certificate.holds and certificate.unique) or fact.get("verdict"):
        return None
    spread = math.sqrt(sum(deviation**2 for deviation in normalisation[1]) / len(normalisation[1]))
    share = fact.get("open")
    if isinstance(share, float):
        error = spread * math.sqrt(max(share, 0.0))
    elif noise == 0 and fact.get("proof"):
        error = spread * SHARP
    else:
        return None
    return BEST_PSNR if error <= 0 else min(BEST_PSNR, -20 * math.log10(error))


def certified_exposures(finding: ImageFinding, test: TestSet) -> list[Exposure]:
    """The images behind captured uploads of which a closed form promises a PSNR."""
    if not (test.captured and finding.closed and finding.attacked) or finding.hardest:
        return []
    rounding = max(upload.under(finding.case.defence)[1] for upload in test.captured)
    noise = max(finding.case.defence.noise_level(finding.case.batch), rounding)
    values = [certified_psnr(fact, noise, test.normalisation) for fact in finding.facts]
    return [
        Exposure(test.names[number], CERTIFIED, value, above=value >= RECOGNISABLE)
        for number, value in zip(finding.numbers, values, strict=True)
        if value is not None
    ]
