"""The server, independent of transport: its sessions, who may continue them, and their checkpoints.

    OUT/sessions/ID/checkpoints/…      a run folder for each client, with only the blocks
    OUT/shared/checkpoints/…           if all clients train the same blocks

`Server.expected` says, from a message's header, which tensors may follow; `Server.answer` acts on the message. Both
raise `RefusedError` with a reason, which is all that the client gets.
"""

from __future__ import annotations

import copy
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from situs.config import Checked
from situs.limits import Count, Positive
from situs.methods.base import Method
from situs.split.blocks import Blocks
from situs.split.message import KINDS, READING, Body, Expected, Message, RefusedError, check_tensors, open_message
from situs.split.parts import digest, layout, side_names
from situs.split.sequences import Sequences
from situs.split.session import MOST_STEPS, Session
from situs.train.checkpoint import Checkpoint, RunFolder
from situs.train.checkpoint.files import read_table
from situs.train.optim import OptimConfig

AGREED = ("weight_decay", "betas", "eps", "layer_decay", "clip", "clip_mode", "ema")
"""Fields of the optimiser that must be equal on both sides; the learning rate comes with each step."""

_SESSION = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class Limits(Checked):
    """What a client may request from a server."""

    clients: Count = 8
    """Largest number of trainings in memory at the same time. Each training has its own blocks and optimiser state,
    unless clients share the blocks."""

    batch: Count = 1024
    """Largest number of samples in a message."""

    idle: Positive = 3600.0
    """A training is idle after this many seconds without a message. Another training may then replace it in memory. The
    idle training later continues from its last checkpoint."""

    sequences: Count = 8
    """Largest number of texts that a client generates at the same time; keys and values of the oldest are forgotten."""

    cache_gib: Positive = 4.0
    """Memory for keys and values, divided equally among the clients, in GiB."""

    cached: Positive = 600.0
    """Seconds without a message after which a text's keys and values are forgotten. The client then sends all of its
    text again."""

    lease: Positive = 60.0
    """With shared blocks: time limit for one step of a client, in seconds."""

    kept: Count = 100
    """Largest number of trainings of a client on disk. Further trainings are refused until old ones are removed."""

    keep: Count = 2
    """Number of newest checkpoints to keep. It is at least 2, so that client and server always have a common
    checkpoint."""


class Server:
    """All trainings of one server; not thread-safe."""

    def __init__(
        self,
        make: Callable[[], Method],
        optim: OptimConfig,
        out: Path,
        *,
        seed: int = 0,
        precision: str = "fp32",
        limits: Limits = Limits(),  # noqa: B008  (frozen)
        shared: bool = False,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """make: the method with the weights that every training starts from."""
        self.optim, self.out, self.seed, self.precision = optim, out, seed, precision
        self.limits, self.shared, self.say = limits, shared, say
        self.first = make()
        self.layout = layout(self.first.backbone)
        self.digest = digest(self.first.state_dict(), side_names(self.first, "server"))
        self.sessions: dict[str, Session] = {}
        self.common: Blocks | None = None
        self.fixed: Blocks | None = None  # for sessions that only read
        self.holder: Session | None = None
        if shared:
            self.common = self._new_blocks()
            self.common_folder = self._folder(out / "shared", {"layout": self.layout})
            if (checkpoint := self.common_folder.latest()) is not None:
                self.common.restore(checkpoint)

    def _new_blocks(self) -> Blocks:
        return Blocks(copy.deepcopy(self.first), self.optim, seed=self.seed, precision=self.precision)

    @staticmethod
    def _folder(path: Path, facts: Mapping[str, Any]) -> RunFolder:
        config = {"split": dict(facts)}
        if not (path / "config.json").exists():
            return RunFolder.create(path, config)
        return RunFolder.open(path)

    def expected(self, owner: str, kind: str, facts: Mapping[str, Any]) -> dict[str, Expected]:
        """The tensors that may follow the header of a message, or a refusal."""
        if kind in ("hello", "bye"):
            return {}
        return self._session(owner, facts).expected(kind, facts, self.limits.batch)

    def admit(self, owner: str, chunk: bytes) -> Body:
        """Checks the first chunk of a message and returns a receiver for the rest, or refuses it."""
        opening = open_message(chunk, KINDS)
        check_tensors(opening, self.expected(owner, opening.kind, opening.facts), optional=("mask", "share"))
        return Body(opening)

    def answer(self, owner: str, message: Message) -> Message:
        """Acts on a client's message. owner: the name in its certificate."""
        self.forget()
        if message.kind == "hello":
            return self._hello(owner, message.facts)
        session = self._session(owner, message.facts)
        if message.kind == "bye":
            del self.sessions[session.name]
            if self.holder is session:
                self._release()
            return Message("ok")
        if self.shared and session.folder is not None:
            self._take_turn(session, keep=message.kind not in READING)
        answer = session.answer(message)
        if self.holder is session and not session.forwards:
            self.holder = None
        return answer

    def _take_turn(self, session: Session, *, keep: bool) -> None:
        """Refuses a message during another client's step; evaluation too, which swaps in the running mean."""
        if self.holder is not None and self.holder is not session:
            if time.monotonic() - self.holder.last_message < self.limits.lease:
                raise RefusedError("another client's step is running", "busy")
            self.say(
                f"the session {self.holder.name}: its step took longer than {self.limits.lease:g} s and was abandoned"
            )
            self._release()
        if keep:
            self.holder = session

    def _release(self) -> None:
        """Abandons the current shared step; its client has to repeat it."""
        assert self.common is not None
        assert self.holder is not None
        self.common.abandon()
        self.holder.restart(self.holder.step)
        self.holder = None

    def _session(self, owner: str, facts: Mapping[str, Any]) -> Session:
        name, incarnation = facts.get("session"), facts.get("incarnation")
        session = self.sessions.get(name) if isinstance(name, str) else None
        if session is None:
            raise RefusedError(f"the session {name!r:.40} is not open on this server", "anew")
        if session.owner != owner:
            raise RefusedError(f"the session {name!r:.40} belongs to another client", "owner")
        if session.incarnation != incarnation:
            raise RefusedError(f"the session {name!r:.40} has been restarted", "anew")
        return session

    def _hello(self, owner: str, facts: Mapping[str, Any]) -> Message:
        """Opens a session, or goes back to the newest checkpoint that both sides have."""
        name, steps = facts.get("session"), facts.get("steps")
        if not isinstance(name, str) or not _SESSION.fullmatch(name):
            raise RefusedError(f"session={name!r:.40}: must be 32 hexadecimal digits")
        if (
            not isinstance(steps, list)
            or len(steps) > 1000
            or not all(type(step) is int and 0 <= step < MOST_STEPS for step in steps)
        ):
            raise RefusedError("steps: must be the numbers of the client's checkpoints")
        reads = facts.get("reads") is True
        self._check_agreed(facts, reads=reads)
        session = self.sessions.get(name)
        if session is not None and session.owner != owner:
            raise RefusedError(f"the session {name} belongs to another client", "owner")
        if session is not None and reads != (session.folder is None):
            raise RefusedError(f"the session {name} is open for {'training' if reads else 'use without training'}")
        if session is None:
            self._evict_for(owner)
            session = self._open_reading(name, owner) if reads else self._open(name, owner)
        if reads:
            session.restart(0)
        elif self.shared:
            if self.holder is session:
                self._release()
            session.restart(max(steps, default=0))
        else:
            self._go_back(session, {0, *steps})
        self.sessions[name] = session
        answer = {"step": session.step, "incarnation": session.incarnation, "digest": self.digest}
        return Message("ok", {**answer, "shared": self.shared, "tokens": self.first.backbone.num_tokens})

    def _check_agreed(self, facts: Mapping[str, Any], *, reads: bool) -> None:
        model = self.first.backbone
        if facts.get("layout") != (layout(model, any_length=True) if reads else self.layout):
            raise RefusedError(
                f"start both sides with the same preset and model: this server has {model.name} with {model.depth} "
                f"blocks of width {model.dim} and {model.num_tokens} tokens, and the client has another model",
                "model",
            )
        if reads:
            return
        theirs = facts.get("training")
        for field, value in agreed(self.optim, self.precision).items():
            other = theirs.get(field) if isinstance(theirs, dict) else None
            if other != value:
                raise RefusedError(
                    f"{field} is {value!r} on the server and {other!r:.60} on the client: set both to the same value",
                    "model",
                )

    def _evict_for(self, owner: str) -> None:
        """Removes a training from memory if all sessions are in use: an idle one, or one of the client with the most
        sessions."""
        if len(self.sessions) < self.limits.clients:
            return
        count = Counter(session.owner for session in self.sessions.values())
        evicted = min(self.sessions.values(), key=lambda session: session.last_message)
        of_largest = min(self.sessions.values(), key=lambda session: (-count[session.owner], session.last_message))
        if time.monotonic() - evicted.last_message >= self.limits.idle:
            self.say(f"the session {evicted.name} was idle, so it is unloaded for another client")
        elif count[owner] + 1 < count[of_largest.owner]:
            evicted = of_largest
            most = f"its owner has the most sessions ({count[evicted.owner]})"
            self.say(f"the session {evicted.name} is unloaded for another client, because {most}")
        else:
            raise RefusedError(f"all {self.limits.clients} sessions are in use; try again later", "full")
        if self.holder is evicted:
            self._release()
        del self.sessions[evicted.name]

    def forget(self) -> None:
        """Drops what no message needed for a while: keys and values, and sessions that only read."""
        oldest = time.monotonic() - self.limits.cached
        for name, session in list(self.sessions.items()):
            session.sequences.forget(self.limits.cached)
            if session.folder is None and session.last_message < oldest:
                del self.sessions[name]

    def _sequences(self) -> Sequences:
        return Sequences(self.limits.sequences, int(self.limits.cache_gib * (1 << 30)) // self.limits.clients)

    def _open_reading(self, name: str, owner: str) -> Session:
        if (self.out / "sessions" / name).exists():
            raise RefusedError(f"the session {name} belongs to a training, so it cannot generate text")
        if self.fixed is None:
            self.fixed = self._new_blocks()
        return Session(name, owner, self.fixed, None, self._sequences())

    def _open(self, name: str, owner: str) -> Session:
        keep = max(2, self.limits.keep)
        if self.common is not None:
            return Session(name, owner, self.common, self.common_folder, self._sequences(), keep=keep, shared=True)
        path = self.out / "sessions" / name
        if not path.exists():
            tables = map(read_table, (self.out / "sessions").glob("*/config.json"))
            owners = [table.get("split", {}).get("owner") for table in tables if not isinstance(table, str)]
            if owners.count(owner) >= self.limits.kept:
                reason = f"this server already stores {self.limits.kept} trainings and accepts no more"
                raise RefusedError(reason, "full")
        folder = self._folder(path, {"owner": owner, "layout": self.layout, "digest": self.digest})
        recorded = folder.config.get("split", {})
        if recorded.get("owner") != owner:
            raise RefusedError(f"the session {name} belongs to another client", "owner")
        if recorded.get("digest") != self.digest:
            raise RefusedError(f"the session {name} began with other weights than this server has now", "model")
        session = Session(name, owner, self._new_blocks(), folder, self._sequences(), keep=keep)
        if not folder.steps():
            session.save()
        return session

    @staticmethod
    def _go_back(session: Session, steps: set[int]) -> None:
        assert session.folder is not None
        checkpoint = common_checkpoint(session.folder, steps)
        if checkpoint is None:
            have = ", ".join(map(str, sorted(session.folder.steps()))) or "none"
            raise RefusedError(
                "client and server have no checkpoint in common: the client has the steps "
                f"{', '.join(map(str, sorted(steps)))}, and the server has {have}",
                "steps",
            )
        session.blocks.restore(checkpoint)
        session.restart(checkpoint.step)


def common_checkpoint(folder: RunFolder, steps: set[int]) -> Checkpoint | None:
    """The newest complete checkpoint of a folder among `steps`."""
    for step in sorted(steps & {*folder.steps()}, reverse=True):
        if (checkpoint := folder.whole(step)) is not None:
            return checkpoint
    return None


def agreed(optim: OptimConfig, precision: str) -> dict[str, Any]:
    """The settings that must be equal on both sides, as JSON holds them."""
    values = {f"optim.{name}": getattr(optim, name) for name in AGREED}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return {**values, "train.precision": precision}
