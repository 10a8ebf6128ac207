"""`GuardMod`: a Flower client's mod that attacks every Nth upload before it leaves.

    app = ClientApp(mods=[GuardMod(build, img_size=32), LocalDpMod(...)])

A mod wraps the mods after it, so the first mod sees the final upload. Arrays in replies to other messages than "train"
are not attacked: they are logged, and withheld if the guard is strict. A withheld upload is an error reply, which a
strategy counts as a failure; the reason stays with the client, in the log (situs.engines). Flower may run each message
in another process: the number of uploads is kept in the context's state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from situs.engines.uploads import AnyModule, UploadGuard
from situs.errors import SitusError

_LOG = logging.getLogger("situs.engines")

KEPT = "situs.guard"
"""The record of a context's state with the number of uploads."""

WITHHELD = 6
"""Flower's code for the precondition of a mod that failed."""


class GuardMod:
    """A mod. module and options: those of `UploadGuard`."""

    def __init__(self, module: AnyModule, **options: Any) -> None:
        self.guard, self._images = UploadGuard(module, **options), None

    def saw(self, images: Tensor) -> None:
        """Called by the client's own training: the images [B, C, H, W] of the step, as the module takes them. The
        guard then compares the recovered images with them; without this call, it relies on the attack's certificate."""
        self._images: Tensor | None = images.detach()

    def __call__(self, message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
        """The reply of the client, or an error instead of it."""
        try:
            from flwr.app import ConfigRecord, Error, Message  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise SitusError("flwr is not installed: pip install situs[flower]") from error
        trained = str(message.metadata.message_type).partition(".")[0] == "train"
        before = self._arrays(message, context) if trained else None  # the client may change or empty the message
        reply = call_next(message, context)
        images, self._images = self._images, None
        if reply.has_error():
            return reply
        withheld = Error(WITHHELD, "the client's guard withheld this upload")
        if not trained:
            strict = self.guard.act == "strict"
            if not any(reply.content.array_records.values()):
                return reply
            done = "withheld" if strict else "sent"
            kind = message.metadata.message_type
            _LOG.warning(
                "node %s: inconclusive (not a pass), because the audit does not attack arrays in a reply to %s; the "
                "reply was %s",
                context.node_id,
                kind,
                done,
            )
            return Message(withheld, reply_to=message) if strict else reply
        number = int(context.state[KEPT]["uploads"]) if KEPT in context.state else 0
        context.state[KEPT] = ConfigRecord({"uploads": number + 1})
        upload = self._arrays(reply, context)
        if upload is None:
            return reply  # no weights leave
        look = self.guard.look(number, before, upload, images=images, of=f"node {context.node_id}")
        if look is None or not self.guard.withholds(look):
            return reply
        return Message(withheld, reply_to=message)

    def _arrays(self, message: Any, context: Any) -> Mapping[str, Any] | None:
        """The arrays of a message; where they cannot be told apart, an error unless the guard only warns."""
        try:
            return _arrays(message)
        except SitusError as error:
            if self.guard.act != "warn":
                raise
            _LOG.warning("node %s: inconclusive, not a pass (%s); the upload was sent", context.node_id, error)
            return None


def _arrays(message: Any) -> Mapping[str, Any] | None:
    """The arrays of a message by name, of all its records; None if it has none."""
    arrays = [pair for record in message.content.array_records.values() for pair in record.items()]
    if len(named := dict(arrays)) < len(arrays):
        raise SitusError(
            "two records of the message contain arrays of the same name, so only one of these arrays could be audited; "
            "give the arrays different names"
        )
    return {name: array.numpy() for name, array in named.items()} or None
