"""The sequences that a client generates: keys and values of their tokens, kept at the server between messages.

extend sequence s from position k on     the rows of the next tokens; the answer is the blocks' output for the last one

A sequence belongs to a session, and so to one client's certificate. Number, bytes and age are limited, and a sequence
that was forgotten is no loss: its client sends all rows again, from position 0 on.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from situs.backbones.base import Past
from situs.split.blocks import Blocks
from situs.split.message import Message, RefusedError, number, packed

MOST_SEQUENCES = 1 << 31


@dataclass(frozen=True)
class _Sequence:
    """weights: which weights computed `past`. check, answer: of the last message."""

    past: Past
    weights: tuple[int, bool]
    check: int
    answer: Message
    last_message: float


class Sequences:
    """The sequences of one session. count, nbytes: limits of all together; the oldest ones are forgotten."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.count, self.nbytes = count, nbytes
        self._kept: dict[int, _Sequence] = {}  # in the order of their last messages

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        """Forgets all sequences."""
        self._kept.clear()

    def forget(self, seconds: float) -> None:
        """Forgets the sequences without a message for so long."""
        oldest = time.monotonic() - seconds
        self._kept = {name: each for name, each in self._kept.items() if each.last_message >= oldest}

    def extend(self, message: Message, blocks: Blocks) -> Message:
        """Appends the rows of a message to its sequence; the same message again gets the same answer."""
        most, mean = blocks.backbone.num_tokens, message.facts.get("mean") is True
        name, start = number(message.facts, "sequence", MOST_SEQUENCES), number(message.facts, "start", most)
        weights, check = (blocks.updates, mean), message.check()
        known = self._kept.get(name)
        if known is not None and known.weights != weights:
            known = None
        if known is not None and known.check == check:
            return known.answer
        length = 0 if known is None else known.past.length
        if start not in (0, length):
            reason = f"sequence {name} has {length} tokens on the server, but this message starts at token {start}"
            raise RefusedError(f"{reason}; send the whole sequence again", "length")
        z = message.tensors["z"].to(blocks.dtype)
        total = start + z.shape[1]
        if total > most:
            raise RefusedError(f"sequence {name} would have {total:,} tokens, but this server takes at most {most:,}")
        if (needed := total * blocks.token_bytes) > self.nbytes:
            raise RefusedError(
                f"sequence {name} would need {needed:,} bytes on the server, but at most {self.nbytes:,} are allowed"
            )
        self._kept.pop(name, None)  # an error while it is computed leaves half a sequence
        self._make_room(needed)
        past = known.past if known is not None and start else blocks.backbone.new_past()
        last = blocks.extend(z, past, mean=mean)[:, -1:].clone()  # a view would keep all rows
        answer = Message("ok", {}, {"z": packed(last, message.facts)})
        self._kept[name] = _Sequence(past, weights, check, answer, time.monotonic())
        return answer

    def _make_room(self, needed: int) -> None:
        used = sum(each.past.nbytes for each in self._kept.values())
        while self._kept and (len(self._kept) >= self.count or used + needed > self.nbytes):
            used -= self._kept.pop(next(iter(self._kept))).past.nbytes
