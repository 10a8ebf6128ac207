"""What a closed form proves of a captured upload's image without a reference, as a PSNR that it promises.

Its equations must fit, have one solution and leave little of a pixel uncertain. Such an image is above any gate: also
where a reference is given, which may be another image than the one behind the upload.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from situs.audit.attacks.base import Normalisation, certificate_of
from situs.audit.attacks.tokens.search import SHARP
from situs.audit.cases import ImageFinding, TestSet
from situs.audit.scores.metrics import BEST_PSNR
from situs.findings import Exposure, Fact, Metric

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
