"""The gate of an audit: a limit on one metric, and whether what was found stays below it.

The worst image decides, not the mean. What was to be attacked and was not counts against the model, so that a short
time limit opens no gate; where no attack applies the gate is passed, and says that this proves nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from situs.audit.gradients import Audit
from situs.audit.metrics import HIGHER_IS_CLOSER, LOWER_IS_CLOSER
from situs.errors import SitusError, unknown_name


class Limit(NamedTuple):
    """A metric that rises with the leak, and the value it must not pass."""

    metric: str
    bound: float

    def __str__(self) -> str:
        return f"{self.metric}={self.bound:g}"


@dataclass(frozen=True)
class Ruling:
    """leaks: a sentence for each attack × defence above the limit or left undone. tested: whether any was attacked."""

    limit: Limit
    leaks: list[str]
    tested: bool

    @property
    def passed(self) -> bool:
        return not self.leaks

    @property
    def sentence(self) -> str:
        """For a reader: passed or not, and by what."""
        if self.leaks:
            return f"The gate {self.limit} is not passed: {'; '.join(self.leaks)}."
        if not self.tested:
            return f"The gate {self.limit} is passed only because no attack applies, which is no proof of privacy."
        return f"The gate {self.limit} is passed: no attack brings an image above it."

    def to_json(self) -> dict[str, Any]:
        return {"limit": str(self.limit), "passed": self.passed, "tested": self.tested, "leaks": self.leaks}


def parse_limit(text: str) -> Limit:
    """ "psnr=20" as a limit."""
    name, _, number = text.partition("=")
    if name in LOWER_IS_CLOSER:
        rising = ", ".join(sorted(HIGHER_IS_CLOSER))
        raise SitusError(
            f"fail_above={text}: {name} falls as an image leaks, so this gate would pass the worst; choose one of: "
            f"{rising} (--fail-above)"
        )
    if name not in HIGHER_IS_CLOSER:
        raise unknown_name("metric of a gate (--fail-above)", name, HIGHER_IS_CLOSER)
    try:
        bound = float(number)
    except ValueError:
        bound = math.nan
    if not math.isfinite(bound):
        raise SitusError(f"fail_above={text}: must be METRIC=NUMBER, as psnr=20 (--fail-above)")
    return Limit(name, bound)


def rule(audit: Audit, limit: Limit) -> Ruling:
    """Whether every image of every attack × defence stays at or below the limit."""
    leaks = []
    for pair in audit.pairs:
        values = pair.scores.get(limit.metric) or []
        over = [value for value in values if value > limit.bound]
        if over:
            said = f"{len(over)} of {len(values)} images have {limit.metric} above {limit.bound:g}"
            leaks.append(f"{pair.attack} against {pair.defence}: {said}, the worst {max(over):.4g}")
        elif pair.reason is None and len(values) < len(audit.images):
            said = f"only {len(values)} of {len(audit.images)} images were attacked before the stop"
            leaks.append(f"{pair.attack} against {pair.defence}: {said}")
    leaks += [f"{attack} against {defence}: not attacked before the stop" for attack, defence in audit.undone]
    return Ruling(limit, leaks, any(pair.reason is None for pair in audit.pairs))
