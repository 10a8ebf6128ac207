"""Generation with a server's blocks: transformers' tokens, whatever is forgotten, restarted, interleaved or hidden."""

from __future__ import annotations

import inspect
import math
import re
import time
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from hostile import Target, hostile
from served import serving
from tiny_texts import WORDS, write_folder

from situs.config import from_dict
from situs.data.tokeniser import Tokeniser
from situs.errors import SitusError
from situs.locks import lock, new_key
from situs.locks.veil import noise_unit
from situs.models import open_model
from situs.progress import notes_to
from situs.split.generate import Writer, choose, decoded, generate, open_writer
from situs.split.message import Message, RefusedError, encode
from situs.split.parts import layout
from situs.split.server import Limits, Server
from situs.split.serving import make_server
from situs.split.transport.connect import Connection
from situs.train.assemble import RunConfig

PROMPT = "w3 w7 w1 w30 w2"
IDS = [WORDS.index(word) for word in PROMPT.split()]
KINDS = {
    "gpt2": {"n_positions": 64},
    "llama": {"max_position_embeddings": 64, "num_key_value_heads": 2},
    "qwen3": {"max_position_embeddings": 64, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "gpt_neox": {"max_position_embeddings": 64},
}


def config_of(folder, init=None) -> RunConfig:
    tables = {
        "method": {"name": "language"},
        "backbone": {"name": str(folder / "config.json")},
        "init": str(init or folder),
    }
    tables["data"] = {"kind": "text", "text": {"tokeniser": str(folder), "longest": 60}}
    return from_dict(RunConfig, tables | {"train": {"precision": "fp32", "epochs": None, "max_steps": 2}})


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Kind -> a tiny model's folder, made when it is asked for."""
    place = tmp_path_factory.mktemp("models")

    def folder(kind: str):
        return place / kind if (place / kind).exists() else write_folder(place / kind, kind, **KINDS[kind])

    return folder


@pytest.fixture
def server(models, tmp_path) -> Server:
    return make_server(config_of(models("llama")), tmp_path / "server", device="cpu")


def through(server: Server, owner: str = "me", seen: list | None = None):
    """A call that sends every message as bytes would be: its header is checked first."""

    def call(message: Message, _):
        if seen is not None:
            seen.append(message)
        return taken(server, owner, encode(message))

    return call


def taken(server: Server, owner: str, chunks: Iterable[bytes]) -> Message:
    """The answer to a message that comes in as bytes."""
    first, *rest = chunks
    body = server.admit(owner, first)
    for chunk in rest:
        body.add(chunk)
    return server.answer(owner, body.message())


def by_transformers(folder, count: int, **options) -> list[int]:
    model = open_model(folder).backbone.model
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    out = model.generate(torch.tensor([IDS]), max_new_tokens=count, **options)
    return out[0, len(IDS) :].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers_and_of_the_blocks_here(kind, models, tmp_path) -> None:
    """Greedy and drawn; learned and rotary positions, grouped queries, a window shorter than the text."""
    folder, seen = models(kind), []
    server = make_server(config_of(folder), tmp_path / "server", device="cpu")
    torch.manual_seed(5)
    drawn = by_transformers(folder, 16, do_sample=True, temperature=1.5, top_k=0)
    greedy = by_transformers(folder, 16)
    assert len({*greedy}) > 3 and drawn != greedy
    for call in (None, through(server, seen=seen)):
        with open_writer(folder, call) as writer:
            assert list(writer.tokens(IDS, max_tokens=16)) == greedy
            assert list(writer.tokens(IDS, max_tokens=16, temperature=1.5, seed=5)) == drawn
            text = "".join(writer.write(PROMPT, max_tokens=16))
            assert text.split() == [WORDS[number] for number in greedy if number > 4]
    assert [len(m.tensors["z"][0]) for m in seen if m.kind == "extend"] == [5, *[1] * 15] * 3
    assert server.sessions == {}


def test_a_locked_model_generates_as_the_clear_one_and_its_server_sees_other_channels(models, tmp_path) -> None:
    folder, locked, key = models("llama"), tmp_path / "locked", new_key(tmp_path / "owner.key")
    lock(folder, key, locked)
    server, seen = make_server(config_of(folder, locked), tmp_path / "server", device="cpu"), []
    lines: list[str] = []
    with notes_to(lines.append), open_writer(locked, through(server, seen=seen), key=key) as writer:
        assert list(writer.tokens(IDS, max_tokens=16)) == by_transformers(folder, 16)
    assert not lines  # nothing that the server can read
    clear = open_model(folder).backbone.embed(torch.tensor([IDS]))
    sent = next(m for m in seen if m.kind == "extend").tensors["z"]
    assert not torch.equal(sent, clear) and torch.equal(sent.sort(-1).values, clear.detach().sort(-1).values)
    with pytest.raises(SitusError, match="is locked; give its key"), open_writer(locked, through(server)):
        pass
    for other, opener in ((folder, None), (locked, new_key(tmp_path / "other.key"))):
        with pytest.raises(SitusError), open_writer(other, through(server), key=opener):
            pass
    assert server.sessions == {}


def test_noise_is_drawn_once_for_each_token_even_if_it_is_sent_again(server, models) -> None:
    """Else a server that forgets on purpose would average the noise away."""
    folder, seen, clock = models("llama"), [], server.sessions
    with open_writer(folder, through(server, seen=seen), defence="noise=0.5") as writer:
        for number, _ in enumerate(writer.tokens(IDS, max_tokens=12)):
            if number == 6:
                next(iter(clock.values())).sequences.clear()
    sent = [m.tensors["z"] for m in seen if m.kind == "extend"]
    again = next(number for number, z in enumerate(sent) if number and z.shape[1] > 1)
    assert torch.equal(sent[again], torch.cat([*sent[: again - 1], sent[again - 1]], dim=1))
    words, scale = open_model(folder).backbone, noise_unit(open_model(folder))
    assert scale == pytest.approx(float(words.embed(torch.arange(60)[None]).double().std()), rel=0.05)
    noise = sent[0] - words.embed(torch.tensor([IDS])).detach()
    assert float(noise.std()) == pytest.approx(0.5 * scale, rel=0.15)
    with pytest.raises(SitusError, match="none or noise"), open_writer(folder, through(server), defence="lowpass=0.5"):
        pass


def test_who_hides_nothing_is_told_so(server, models) -> None:
    lines: list[str] = []
    with notes_to(lines.append):
        for defence in ("noise=0.1", "none"):
            with open_writer(models("llama"), through(server), defence=defence) as writer:
                told = "its blocks are not locked and its tokens are not hidden, so the server can read the text"
                assert lines == ([] if defence != "none" else [f"{open_model(models('llama')).name}: {told}"])
                assert next(iter(writer.tokens(IDS, max_tokens=1))) >= 0


def test_what_a_server_forgets_is_sent_again(server, models) -> None:
    """Too many texts, too many bytes, too old, a session that is gone: the same tokens."""
    folder, seen = models("llama"), []
    expected = by_transformers(folder, 20)
    with open_writer(folder, through(server, seen=seen)) as writer:
        session = next(iter(server.sessions.values()))
        session.sequences.count = 2
        texts = [writer.tokens(IDS, max_tokens=20) for _ in range(4)]
        assert [list(words) for words in zip(*texts, strict=True)] == [[word] * 4 for word in expected]
        assert len(session.sequences) == 2 and len([m for m in seen if m.facts.get("start") == 0]) > 70
        session.sequences.count, session.sequences.nbytes = 8, 30 * session.blocks.token_bytes
        texts = [writer.tokens(IDS, max_tokens=20) for _ in range(2)]
        assert [list(words) for words in zip(*texts, strict=True)] == [[word] * 2 for word in expected]
        assert sum(each.past.nbytes for each in session.sequences._kept.values()) <= session.sequences.nbytes
        words = []
        for word in writer.tokens(IDS, max_tokens=20):
            words.append(word)
            (current,) = server.sessions.values()
            if len(words) == 7:
                current.last_message -= Limits.cached + 1
            if len(words) == 12:
                assert current is not session
                kept = current.sequences._kept
                kept |= {n: replace(each, last_message=-math.inf) for n, each in kept.items()}
        assert words == expected
        assert [m.kind for m in seen].count("hello") == 2
        starts = [m.facts["start"] for m in seen if m.kind == "extend"]
        assert starts[-15:] == [11, 0, *range(12, 17), 0, *range(17, 24)]


def test_what_a_client_left_is_forgotten_although_no_message_comes(models, tmp_path) -> None:
    """Keys and values of a text, and a session that only reads, end with their time."""
    folder, limits = models("llama"), Limits(cached=2.0)
    with (
        serving(tmp_path / "server", None, config_of(folder), device="cpu", limits=limits) as server,
        Connection(server.address, None) as call,
        open_writer(folder, call) as writer,
    ):
        next(writer.tokens(IDS, max_tokens=12))
        (session,) = server.server.sessions.values()
        assert len(session.sequences) == 1
        end = time.monotonic() + 20
        while (len(session.sequences) or server.server.sessions) and time.monotonic() < end:
            time.sleep(0.1)
        assert not len(session.sequences) and not server.server.sessions
        assert list(writer.tokens(IDS, max_tokens=12)) == by_transformers(folder, 12)  # a new session


def test_two_clients_and_a_server_that_restarts_in_the_middle(models, tmp_path) -> None:
    """Over a socket: each one's tokens are as if it were alone."""
    folder = models("llama")
    expected = by_transformers(folder, 12), by_transformers(folder, 12)
    with serving(tmp_path / "server", None, config_of(folder), device="cpu") as server:
        with Connection(server.address, None) as one, Connection(server.address, None) as two:
            with open_writer(folder, one) as first, open_writer(folder, two) as second:
                together = zip(first.tokens(IDS, max_tokens=12), second.tokens(IDS, max_tokens=12), strict=True)
                words = [next(together) for _ in range(5)]
                server.close()
                server.start()
                words += together
                assert len(server.server.sessions) == 2
            assert tuple(map(list, zip(*words, strict=True))) == expected
        assert server.server.sessions == {}


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_200_hostile_messages_are_refused_in_one_sentence_and_nothing_leaks(server, models, seed) -> None:
    """From one of two clients, which knows all names of the other; both then go on, each with its own text."""
    folder, other = models("llama"), [WORDS.index(word) for word in ("w9", "w4", "w40")]
    with open_writer(folder, None) as alone:
        expected = list(alone.tokens(IDS, max_tokens=20)), list(alone.tokens(other, max_tokens=20))
    with open_writer(folder, through(server, "me")) as me, open_writer(folder, through(server, "eve")) as eve:
        mine, hers = me.tokens(IDS, max_tokens=20), eve.tokens(other, max_tokens=20)
        words = [next(mine) for _ in range(4)], [next(hers) for _ in range(6)]
        one, two = server.sessions.values()
        assert (one.owner, two.owner) == ("me", "eve")
        target = Target(
            two.name,
            two.incarnation,
            8,
            one.name,
            one.incarnation,
            layout(server.first.backbone, any_length=True),
            48,
            server.first.backbone.num_tokens,
        )
        before, reasons = (dict(one.sequences._kept), dict(two.sequences._kept)), {}
        assert [each.past.length for part in before for each in part.values()] == [8, 8]
        for what, chunks in hostile(target, 200, seed):
            with pytest.raises(RefusedError) as refused:
                taken(server, "eve", chunks)
            reasons[what] = str(refused.value)
            assert 5 < len(reasons[what]) < 400 and "\n" not in reasons[what], what
        assert len(reasons) > 70
        assert [*server.sessions.values()] == [one, two]
        assert (one.sequences._kept, two.sequences._kept) == before  # nothing was added, replaced or forgotten
        assert [each.past.length for part in before for each in part.values()] == [8, 8]
        assert ([*words[0], *mine], [*words[1], *hers]) == expected
        gone = two.name, two.incarnation
    facts = {"session": gone[0], "incarnation": gone[1], "sequence": 1, "start": 0}
    with pytest.raises(RefusedError, match="not open on this server"):  # after its bye
        taken(server, "eve", encode(Message("extend", facts, {"z": torch.zeros(1, 1, 48)})))


def test_a_text_that_is_too_long_or_empty_and_models_that_do_not_generate(server, models, tmp_path) -> None:
    folder = models("llama")
    with open_writer(folder, through(server)) as writer:
        with pytest.raises(
            SitusError, match="max_tokens=57: must be 1 to 56, because a text has at most 60 tokens here"
        ):
            writer.tokens(IDS, max_tokens=57)
        assert len(list(writer.tokens(IDS, max_tokens=56))) == 56
        with pytest.raises(SitusError, match="the prompt is empty"):
            writer.write("")
        with pytest.raises(SitusError, match="temperature=-1"):
            writer.tokens(IDS, max_tokens=1, temperature=-1)
        with pytest.raises(SitusError, match="the prompt has 61 tokens, but a text has at most 60 here"):
            writer.tokens([5] * 61, max_tokens=1)
        with pytest.raises(SitusError, match="seed=-1: must be 0 to"):
            writer.tokens(IDS, max_tokens=1, seed=-1)
        for wrong in (1.5, "12", None, True):
            with pytest.raises(SitusError, match=r"max_tokens=.*: must be an integer"):
                writer.write(PROMPT, max_tokens=wrong)  # type: ignore[arg-type]
        with pytest.raises(SitusError, match=r"ids=.*: must be a list of"):
            writer.tokens(["w3"], max_tokens=1)  # type: ignore[list-item]
        for number in (60, -1):
            with pytest.raises(SitusError, match=f"the id {number}, but the model knows only the ids 0 to 59"):
                writer.tokens([*IDS, number], max_tokens=1)
        assert list(writer.tokens(IDS, max_tokens=5, temperature=1e-300)) == by_transformers(folder, 5)
    bert = write_folder(tmp_path / "bert", "bert")
    with pytest.raises(SitusError, match="has no head that predicts the next word"):
        next(generate(bert, PROMPT))
    with pytest.raises(SitusError, match="the same preset and model"):
        next(generate(models("gpt2"), PROMPT, through(server)))


def test_text_comes_in_whole_characters(tmp_path) -> None:
    """A tokeniser of bytes: characters of one to four ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    coder = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    coder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    coder.decoder = decoders.ByteLevel()
    coder.save(str(tmp_path / "tokenizer.json"))
    tokeniser, text = Tokeniser(tmp_path), "naïve – 東京 🙂 end"
    ids = [int(number) for number in tokeniser.encode([text]).flat]
    assert len(ids) > len(text) + 8
    for prompt in ([], ids[:3]):
        pieces = list(decoded(tokeniser, prompt, iter(ids)))
        assert "".join(pieces) == text and all(len(piece) == 1 for piece in pieces)
        cut = list(decoded(tokeniser, prompt, iter(ids[:-6])))  # within the face
        assert "".join(cut).rstrip("\ufffd") == text[:-5]


def test_a_text_ends_before_the_word_that_ends_texts(server, models) -> None:
    folder = models("llama")
    words = by_transformers(folder, 6)
    end = next(number for number in words[2:] if number not in words[:2])
    with open_writer(folder, through(server)) as writer:
        assert end not in writer.ends
        writer.ends = frozenset({end})
        assert list(writer.tokens(IDS, max_tokens=6)) == words[: words.index(end)]
        assert writer.count == words.index(end)
        writer.ends = frozenset({words[0]})
        assert list(writer.write(PROMPT, max_tokens=6)) == []


def test_one_prompt_is_continued_as_a_writer_does(server, models) -> None:
    folder, options = models("llama"), {"max_tokens": 5, "temperature": 0.7}
    with open_writer(folder, through(server)) as writer:
        wanted = [list(writer.write(PROMPT, seed=seed, **options)) for seed in (1, 2)]
    assert wanted[0] != wanted[1]
    for seed, pieces in zip((1, 2), wanted, strict=True):
        assert list(generate(folder, PROMPT, through(server), seed=seed, **options)) == pieces


def test_all_ways_to_generate_have_the_same_defaults() -> None:
    ways = [inspect.signature(way).parameters for way in (generate, Writer.write, Writer.tokens)]
    for name in ("max_tokens", "temperature", "seed"):
        assert len({way[name].default for way in ways}) == 1


def test_logits_that_are_no_numbers_choose_no_word() -> None:
    chance = torch.Generator().manual_seed(0)
    assert choose(torch.tensor([0.0, 3.0, 1.0]), 0.0, chance) == 1
    for odd in (float("nan"), float("inf"), -float("inf")):
        for temperature in (0.0, 1.0):
            with pytest.raises(SitusError, match="the logits computed from the server's output contain NaN") as told:
                choose(torch.tensor([0.0, odd, 1.0]), temperature, chance)
            assert told.value.field == "server"


def test_words_are_drawn_by_their_shares() -> None:
    chance, logits = torch.Generator().manual_seed(0), torch.tensor([0.0, 1.0, 2.0, -1.0])
    for temperature in (0.5, 1.0, 2.0):
        drawn = torch.tensor([choose(logits, temperature, chance) for _ in range(2000)]).bincount(minlength=4) / 2000
        shares = (logits / temperature).exp() / (logits / temperature).exp().sum()
        assert float((drawn - shares).abs().max()) < 0.05
    assert choose(logits, 1e-308, chance) == 2  # the quotients are beyond float64, their shares are not


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, None),
        ({"length": 0}, "the prompt is empty"),
        ({"length": 8, "max_tokens": 1}, None),
        ({"length": 9, "max_tokens": 1}, "the prompt has 9 tokens, but a text has at most 8 here"),
        ({"length": 3, "max_tokens": 6}, None),  # the last token is never read
        ({"length": 3, "max_tokens": 7}, "max_tokens=7: must be 1 to 6, because a text has at most 8 tokens here"),
        ({"max_tokens": 0}, "max_tokens=0: must be 1 to"),
        ({"temperature": -0.01}, "temperature=-0.01: must be at least 0"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 0.0}, None),
        ({"seed": -1}, "seed=-1"),
        ({"seed": (1 << 63) - 1}, None),
        ({"seed": 1 << 63}, "seed="),
    ],
)
def test_what_a_writer_is_asked_at_its_bounds(given, said) -> None:
    writer = object.__new__(Writer)
    writer.longest = 8
    asked = {"length": 2, "max_tokens": 2, "temperature": 0.5, "seed": 0, **given}
    if said is None:
        writer._check(**asked)
    else:
        with pytest.raises(SitusError, match=re.escape(said)):
            writer._check(**asked)
