"""Attacks every Nth upload of a client before it leaves the engine (`situs.guard`); warns about a leak or withholds
the upload."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any, Literal

from torch import Tensor, nn

from situs.audit.attacks import create_attack
from situs.audit.attacks.base import Attack, check_server
from situs.audit.captured import Sent, load_weights
from situs.audit.chosen import check_weights
from situs.audit.defences import Defence, create_defence
from situs.audit.public import ATTACKED
from situs.audit.scores import METRICS
from situs.audit.watch import Guard, Look, guard
from situs.config import checks_arguments
from situs.errors import SitusError
from situs.gate import parse_limit
from situs.limits import Count, Positive
from situs.models.module import make_module

_LOG = logging.getLogger("situs.engines")

Act = Literal["stop", "strict", "warn"]
"""stop: withhold an upload if its verdict is above. strict: withhold every upload whose verdict is not below. warn:
withhold nothing."""

AnyModule = str | nn.Module | Callable[[], nn.Module]
"""The model: a module (a copy of it is used), a function that builds a module, or its name, as file.py:build or
package.module:build."""


class UploadGuard:
    """A guard of a client's uploads, whose module is built at the first one.

    every: the first upload and every so many are attacked. limit, attacks, defence, seconds, and options of
    `open_model` (img_size): as of `situs.guard`; defence: what the client does, as "fedavg=4:0.01" for four steps of
    that rate. batch: images behind an upload.
    """

    @checks_arguments("self")
    def __init__(
        self,
        module: AnyModule,
        *,
        act: Act = "stop",
        every: Count = 1,
        limit: str = "blind",
        attacks: Sequence[str | Attack] = ATTACKED,
        defence: str | Defence = "none",
        batch: Count = 1,
        seconds: Positive = 120.0,
        **options: Any,
    ) -> None:
        parse_limit(limit, METRICS, "limit")  # a mistake is known before the job begins
        create_defence(defence)
        if not (created := [create_attack(attack) for attack in attacks]):
            raise SitusError(field="attacks", value=attacks, allowed="one or more attacks")
        check_server(created)
        self.module, self.act, self.every, self.batch = module, act, every, batch
        self.expect = options.pop("expect", None)
        self.options = {"limit": limit, "attacks": attacks, "defence": defence, "seconds": seconds, **options}
        self._guard: Guard | None = None

    def look(
        self,
        number: int,
        before: Any,
        upload: Any,
        *,
        sent: Sent | None = None,
        images: Tensor | None = None,
        of: str = "",
        say: Callable[[int, str], None] = _LOG.log,
    ) -> Look | None:
        """The check of a client's upload; None if this upload is not checked.

        An upload that cannot be attacked, since it is not the module's or the guard is set up wrongly, raises an error
        unless the guard only warns. Without the error, the client would believe that it is guarded.

        number: of the upload. before: the weights that the server sent out; None for those of the module. of: the
        client's name, for the log. say: logs a line at a level.
        """
        if number % self.every:
            return None
        start = time.perf_counter()
        try:
            if self._guard is None:
                self._guard = guard(_built(self.module), act=lambda _: None, **self.options)
            self._guard.step = number
            if before is not None:
                load_weights(self._guard.backbone, before)
            chosen = None if self.expect is None else check_weights(self._guard.backbone, like=self.expect)
            if chosen is not None and chosen.reasons:  # those of this round, and not of the module as it was built
                limit, spent = str(self.options["limit"]), time.perf_counter() - start
                look = Look(number, "above", limit, float("nan"), None, chosen.sentence, spent)
            else:
                look = self._guard.look_upload(upload, images, batch=self.batch, sent=sent)
                if chosen is not None and chosen.status and look.answer == "below":  # the check itself is open
                    look = look._replace(answer="inconclusive", reason=chosen.sentence)
        except SitusError as error:
            if self.act != "warn":
                raise
            limit = str(self.options["limit"])
            look = Look(number, "inconclusive", limit, float("nan"), None, str(error), time.perf_counter() - start)
        level = logging.INFO if look.answer == "below" else logging.WARNING
        withheld = "withheld" if self.withholds(look) else "sent"
        say(level, f"{f'{of}, ' if of else ''}{look}; {withheld} after {look.seconds:.1f} s")
        return look

    def withholds(self, look: Look) -> bool:
        """Whether an upload stays with the client."""
        if self.act == "warn":
            return False
        return look.answer == "above" or (self.act == "strict" and look.answer != "below")


def _built(module: AnyModule) -> nn.Module:
    if isinstance(module, str):
        return make_module(module)
    return deepcopy(module) if isinstance(module, nn.Module) else module()  # it gets the weights of each round
