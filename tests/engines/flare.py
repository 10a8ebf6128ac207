"""The few names of NVFlare that its filter uses, as NVFlare describes them, for tests without NVFlare."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


class Shareable(dict):
    def get_return_code(self) -> str:
        return self.get("code", "OK")


@dataclass
class DXO:
    data_kind: str
    data: Any

    def to_shareable(self) -> Shareable:
        return Shareable(dxo=self)


def from_shareable(shareable: Shareable) -> DXO:
    return shareable["dxo"]


class DXOFilter:
    """Calls `process_dxo` with every part of a result that has data of one of the kinds."""

    def __init__(self, supported_data_kinds: list[str], data_kinds_to_filter: list[str]) -> None:
        self.kinds = supported_data_kinds, data_kinds_to_filter

    def process(self, shareable: Shareable, context: Context) -> Shareable:
        parts = [shareable["dxo"]] if "dxo" in shareable else []
        for part in parts:
            if part.data_kind == "COLLECTION":
                parts += part.data.values() if isinstance(part.data, dict) else part.data
            elif part.data and part.data_kind in self.kinds[1]:
                assert self.process_dxo(part, shareable, context) is None  # unchanged
        return shareable


@dataclass
class Context:
    """Of a site's name, during a task."""

    name: str
    task: Shareable

    def get_identity_name(self) -> str:
        return self.name

    def get_prop(self, key: str) -> Any:
        return {"TASK_DATA": self.task}[key]


def _constants(*names: str) -> SimpleNamespace:
    return SimpleNamespace(**{name: name for name in names})


MODULES = {
    "nvflare": {},
    "nvflare.apis": {},
    "nvflare.apis.dxo": {
        "DataKind": _constants("WEIGHTS", "WEIGHT_DIFF", "METRICS", "COLLECTION"), "from_shareable": from_shareable,
    },
    "nvflare.apis.dxo_filter": {"DXOFilter": DXOFilter},
    "nvflare.apis.event_type": {"EventType": _constants("BEFORE_TASK_EXECUTION")},
    "nvflare.apis.fl_constant": {"FLContextKey": _constants("TASK_DATA"), "ReturnCode": _constants("OK")},
}  # fmt: skip
"""Module of NVFlare -> its names."""
