"""`GuardFilter`: a filter of NVFlare's task results that attacks every Nth upload before it leaves.

    recipe.add_client_output_filter(GuardFilter("net:build", options={"img_size": 32}), tasks=["train"])

Put it after all other result filters, so it sees the final upload. A withheld upload ends as NVFlare's
TASK_RESULT_FILTER_ERROR; the reason stays in the site's log. The weights before the step are those of the task's data.
What is no weights, and weights whose task brought none, cannot be attacked: it is logged, and withheld if the guard is
strict.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from situs.audit.public import ATTACKED
from situs.audit.watch import LeakError
from situs.engines.uploads import Act, UploadGuard
from situs.errors import SitusError

try:
    from nvflare.apis.dxo import DataKind, from_shareable  # pyright: ignore[reportMissingImports]
    from nvflare.apis.dxo_filter import DXOFilter  # pyright: ignore[reportMissingImports]
    from nvflare.apis.event_type import EventType  # pyright: ignore[reportMissingImports]
    from nvflare.apis.fl_constant import FLContextKey, ReturnCode  # pyright: ignore[reportMissingImports]
except ImportError:  # said when a filter is made
    DataKind: Any = None
    EventType: Any = None
    FLContextKey: Any = None
    ReturnCode: Any = None
    from_shareable: Any = None
    DXOFilter: Any = object


class GuardFilter(DXOFilter):
    """The filter; its settings are those of `UploadGuard`, in the form of a job's config.

    module: file.py:build or package.module:build, which the site can import. options: of `open_model`, as
    {"img_size": 32}.
    """

    def __init__(
        self,
        module: str,
        act: Act = "stop",
        every: int = 1,
        limit: str = "blind",
        attacks: Sequence[str] = ATTACKED,
        defence: str = "none",
        batch: int = 1,
        seconds: float = 120.0,
        options: dict[str, Any] | None = None,
    ) -> None:
        if DataKind is None:
            raise SitusError("nvflare is not installed: pip install situs[nvflare]")
        kinds = [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF]
        super().__init__(supported_data_kinds=kinds, data_kinds_to_filter=kinds)
        self.module, self.act, self.every, self.limit, self.attacks = module, act, every, limit, list(attacks)
        self.defence, self.batch, self.seconds, self.options = defence, batch, seconds, options
        settings = {"limit": limit, "attacks": self.attacks, "defence": defence, "batch": batch, "seconds": seconds}
        self._guard = UploadGuard(module, act=act, every=every, **{**(options or {}), **settings})
        self._before: Mapping[str, Any] | None = None
        self._number = 0

    def handle_event(self, event_type: str, fl_ctx: Any) -> None:
        """Stores the weights that a task brings."""
        if event_type == EventType.BEFORE_TASK_EXECUTION:
            self._before = _weights(fl_ctx.get_prop(FLContextKey.TASK_DATA))

    def process(self, shareable: Any, fl_ctx: Any) -> Any:
        """The upload, unchanged; an error if it is withheld."""
        if shareable.get_return_code() != ReturnCode.OK:
            return shareable
        kinds = _kinds(shareable) - {DataKind.WEIGHTS, DataKind.WEIGHT_DIFF}
        if kinds:
            self._not_attacked(f"data of the kind {', '.join(sorted(kinds))}", fl_ctx)
        result = super().process(shareable, fl_ctx)
        self._number += 1
        return result

    def process_dxo(self, dxo: Any, shareable: Any, fl_ctx: Any) -> None:  # noqa: ARG002
        """A part of the upload, unchanged; LeakError if it is withheld."""
        if self._before is None:
            self._not_attacked("weights if the task contained no initial weights", fl_ctx)
            return
        sent = "difference" if dxo.data_kind == DataKind.WEIGHT_DIFF else None
        site = str(fl_ctx.get_identity_name())

        def say(level: int, line: str) -> None:
            (self.log_info if level < logging.WARNING else self.log_warning)(fl_ctx, line)

        look = self._guard.look(self._number, self._before, dxo.data, sent=sent, of=site, say=say)
        if look is not None and self._guard.withholds(look):
            raise LeakError(look)

    def _not_attacked(self, what: str, fl_ctx: Any) -> None:
        strict = self.act == "strict"
        who = f"{fl_ctx.get_identity_name()}, step {self._number}"
        line = f"{who}: inconclusive (not a pass), because the audit does not attack {what}"
        self.log_warning(fl_ctx, f"{line}; the upload is {'withheld' if strict else 'sent'}")
        if strict:
            raise SitusError(line)


def _kinds(shareable: Any) -> set[str]:
    """The kinds of all data in a result."""
    try:
        parts = [from_shareable(shareable)]
    except Exception:  # noqa: BLE001  (a result without a DXO)
        return {"unknown"}
    kinds = set[str]()
    for part in parts:
        if part.data_kind == DataKind.COLLECTION:
            parts += part.data.values() if isinstance(part.data, dict) else part.data
        elif part.data:
            kinds.add(part.data_kind)
    return kinds


def _weights(task: Any) -> Mapping[str, Any] | None:
    """A copy of the weights in a task's data, which the client may train in place; None if it brings none."""
    try:
        dxo = from_shareable(task)
    except Exception:  # noqa: BLE001  (a task without a DXO)
        return None
    return deepcopy(dxo.data) if dxo.data_kind == DataKind.WEIGHTS and dxo.data else None
