"""Generation with the blocks of a server: the text, the embedding, the final norm, the head and the key stay here.

    with open_writer("locked", call, key="owner.key") as writer:
        for piece in writer.write("Once upon a time"): ...

Each token is one message: its row, hidden as in training, goes to the server, which keeps keys and values of the rows
before it (`sequences`) and returns one row. Without a server the blocks run here; the tokens are the same.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.backbones.halves import enter, extend, leave
from situs.config import checks_arguments
from situs.data.tokeniser import Tokeniser
from situs.errors import SitusError
from situs.locks.key import SEED_BYTES, AnyKey, Key, as_key
from situs.locks.owner import unlocking
from situs.locks.veil import Cut, Veil, noise_unit, parse_veil
from situs.methods import create_method
from situs.models import open_model
from situs.models.model import Model
from situs.models.open import is_locked
from situs.progress import note
from situs.split.client import Call, Client, RewoundError
from situs.split.hiding import FACTS, Hiding, make_cut
from situs.split.message import finite
from situs.split.parts import cut, digest, layout, side_names
from situs.split.remote import Remote
from situs.split.run import keyed
from situs.split.whole import open_split

MAX_TOKENS = 128
"""Default for the number of tokens to generate."""

Extend = Callable[[Tensor], Tensor]
"""The rows [1, n, D] of the next tokens of one text -> the blocks' output for the last, [1, 1, D]."""


class Writer:
    """A causal model that continues texts. begin: starts a new text at the blocks. longest: tokens of a text."""

    def __init__(self, model: Model, entrance: Cut, begin: Callable[[], Extend], longest: int) -> None:
        self.backbone, self.entrance, self.begin, self.longest = model.backbone, entrance, begin, longest
        folder = None if model.input is None else model.samples.text.tokeniser
        self.tokeniser = Tokeniser(folder or "")
        self.ends = end_ids(self.backbone, self.tokeniser)
        self.count = 0  # tokens so far

    @checks_arguments("self")
    def write(
        self, prompt: str, *, max_tokens: int = MAX_TOKENS, temperature: float = 0.0, seed: int = 0
    ) -> Iterator[str]:
        """What follows `prompt`, in pieces as it comes; the arguments of `tokens`."""
        ids = [int(number) for number in self.tokeniser.encode([prompt]).flat]
        words = self.tokens(ids, max_tokens=max_tokens, temperature=temperature, seed=seed)
        return decoded(self.tokeniser, ids, words)

    @checks_arguments("self")
    def tokens(
        self, ids: Sequence[int], *, max_tokens: int = MAX_TOKENS, temperature: float = 0.0, seed: int = 0
    ) -> Iterator[int]:
        """The ids that follow `ids`, until the model ends its text or there are `max_tokens`.

        temperature: 0 takes the most probable word; else words are drawn by softmax(logits / temperature), with `seed`.
        """
        self._check(len(ids), max_tokens, temperature, seed)
        words = self.backbone.input.words
        if unknown := [number for number in ids if not 0 <= number < words]:
            raise SitusError(
                f"the prompt contains the id {unknown[0]}, but the model knows only the ids 0 to {words - 1}",
                field="generate",
            )
        return self._tokens(ids, max_tokens, temperature, torch.Generator().manual_seed(seed))

    def _tokens(
        self, ids: Sequence[int], max_tokens: int, temperature: float, chance: torch.Generator
    ) -> Iterator[int]:
        extends, rows, start, device = self.begin(), list(ids), 0, self._device
        for _ in range(max_tokens):
            with torch.no_grad():
                z = enter(self.backbone, torch.tensor([rows], device=device), start=start).z
                z, _, back = self.entrance.enter(z, None, None)
                logits = leave(self.backbone, back(extends(z)))[0, -1]
            start, rows = start + len(rows), [choose(logits, temperature, chance)]
            if rows[0] in self.ends:
                return
            self.count += 1
            yield rows[0]

    @property
    def _device(self) -> torch.device:
        return self.backbone.model.get_input_embeddings().weight.device

    def _check(self, length: int, max_tokens: int, temperature: float, seed: int) -> None:
        if not length:
            raise SitusError("the prompt is empty, so there is nothing to continue", field="generate")
        if length > self.longest:
            reason = f"the prompt has {length:,} tokens, but a text has at most {self.longest:,} here"
            raise SitusError(reason, field="generate")
        if max_tokens < 1 or length + max_tokens - 1 > self.longest:
            allowed = f"1 to {self.longest + 1 - length:,}, because a text has at most {self.longest:,} tokens here"
            raise SitusError(field="max_tokens", value=max_tokens, allowed=f"{allowed}, and the prompt has {length:,}")
        if not 0 <= temperature < math.inf:
            raise SitusError(field="temperature", value=temperature, allowed="at least 0")
        if not 0 <= seed < 1 << 63:
            raise SitusError(field="seed", value=seed, allowed="0 to 2^63 - 1")


def generate(
    source: str | Path,
    prompt: str,
    call: Call | None = None,
    *,
    max_tokens: int = MAX_TOKENS,
    temperature: float = 0.0,
    seed: int = 0,
    key: AnyKey | None = None,
    defence: str = "none",
) -> Iterator[str]:
    """What follows one prompt, in pieces as it comes: `open_writer`, then `Writer.write`."""
    with open_writer(source, call, key=key, defence=defence) as writer:
        yield from writer.write(prompt, max_tokens=max_tokens, temperature=temperature, seed=seed)


@contextlib.contextmanager
def open_writer(
    source: str | Path,
    call: Call | None = None,
    *,
    key: AnyKey | None = None,
    withheld: str | Path | None = None,
    defence: str = "none",
    device: str = "cpu",
) -> Iterator[Writer]:
    """A model whose blocks are at a server. call: sends a message, as in `train_split`; None: no server.

    source: the client's part of a split run, hidden as in its training; or a model, whose blocks the server has: of a
    locked folder with the columns permuted by `key`. defence: for a model: none or noise=σ, a multiple of `noise_unit`.
    """
    if call is not None and (Path(source) / FACTS).is_file():
        if defence != "none":
            raise SitusError(
                f"{source}: this run always uses the defence that it was trained with; do not set `defence`",
                field="defence",
            )
        with open_split(source, call, key=key, device=device) as model:
            entrance = model.backbone.entrance
            assert isinstance(entrance, Remote)
            yield _at_server(model, entrance.client, entrance.cut)
        return
    if is_locked(source) and key is None:
        raise SitusError(f"{source}: is locked; give its key", field="key")
    unlock = unlocking(key, withheld) if key is not None and is_locked(source) else None
    model = open_model(source, unlock=unlock, device=device)
    if not model.backbone.next_words:
        raise SitusError(
            f"{model.name}: has no head that predicts the next word, so it generates no text", field="generate"
        )
    veil = parse_veil(defence)
    if veil.kind not in ("none", "noise"):
        raise SitusError(
            field="defence",
            value=defence,
            allowed="none or noise=σ, because here the defence changes one token at a time",
        )
    if call is None:
        yield _here(model, veil)
        return
    hiding = Hiding(session=secrets.token_hex(16), locked=str(source) if unlock is not None else None)
    client = hiding.client(call)
    try:
        entrance = _opened(model, client, veil, hiding, None if unlock is None or key is None else as_key(key))
        yield _at_server(model, client, entrance)
    finally:
        with contextlib.suppress(RewoundError, SitusError):
            client.bye()


def _at_server(model: Model, client: Client, entrance: Cut) -> Writer:
    longest = min(model.backbone.num_tokens, client.tokens or model.backbone.num_tokens)
    return Writer(model, entrance, lambda: client.text().extend, longest)


def _here(model: Model, veil: Veil) -> Writer:
    backbone = model.backbone

    def begin() -> Extend:
        past = backbone.new_past()
        return lambda z: extend(backbone, z, past)[:, -1:]

    return Writer(model, _entrance(model, veil, None, Hiding()), begin, backbone.num_tokens)


def _opened(model: Model, client: Client, veil: Veil, hiding: Hiding, key: Key | None) -> Cut:
    """Opens a session that reads, and removes the blocks here; refuses a server with other blocks."""
    method, backbone = create_method("language", model.backbone), model.backbone
    entrance = _entrance(model, veil, key, hiding)
    welcome, state = client.hello_reading(layout(backbone, any_length=True)), method.state_dict()
    if key is not None:
        state |= keyed(backbone, state, key, hiding)
    elif veil.kind == "none":
        note(f"{model.name}: its blocks are not locked and its tokens are not hidden, so the server can read the text")
    if digest(state, side_names(method, "server")) != welcome.digest:
        reason = f"{model.name}: the server's blocks come from other weights"
        raise SitusError(
            f"{reason}; start the server from the same model (from the locked folder if the model is locked)",
            field="server",
        )
    cut(method, "client")
    return entrance


def _entrance(model: Model, veil: Veil, key: Key | None, hiding: Hiding) -> Cut:
    """The veil of a model whose blocks a server has. Noise is new for every token, so it needs no key."""
    scale = noise_unit(model) if veil.kind == "noise" else 1.0
    veil = Veil(veil.kind, veil.strength, columns=key is not None)
    secret = Key(secrets.token_bytes(SEED_BYTES)) if key is None else key
    return make_cut(model.backbone, veil, secret, run=hiding.session, locked=hiding.locked, scale=scale)


def choose(logits: Tensor, temperature: float, chance: torch.Generator) -> int:
    """One word by its logits [V]: the most probable, or one drawn by softmax(logits / temperature)."""
    if not finite(logits):
        raise SitusError("the logits computed from the server's output contain NaN or infinite numbers", field="server")
    if not temperature:
        return int(logits.argmax())
    precise = logits.to("cpu", torch.float64)  # a low temperature would overflow in float32
    shares = ((precise - precise.max()) / temperature).softmax(dim=-1)
    return int(torch.multinomial(shares.float(), 1, generator=chance))


def end_ids(backbone: Backbone, tokeniser: Tokeniser) -> frozenset[int]:
    """The ids that end a text, by the model's config and its tokeniser."""
    ends = backbone.model.config.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    return frozenset(ends if tokeniser.end is None else [*ends, tokeniser.end])


def decoded(tokeniser: Tokeniser, prompt: Sequence[int], ids: Iterable[int]) -> Iterator[str]:
    """The text of `ids` after `prompt`, in pieces; an id that ends within a character waits for the next."""
    before, after = list(prompt), []
    for number in ids:
        after.append(number)
        text = _text_after(tokeniser, before, after)
        if text and not text.endswith("\ufffd"):
            yield text
            before, after = after, []
    if after:
        yield _text_after(tokeniser, before, after)


def _text_after(tokeniser: Tokeniser, before: list[int], after: list[int]) -> str:
    return tokeniser.decode([*before, *after])[len(tokeniser.decode(before)) :]
