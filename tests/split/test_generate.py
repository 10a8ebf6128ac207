"""Generation with a server's blocks: transformers' tokens, whatever is forgotten, restarted, interleaved or hidden."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from served import on_a_socket, serving
from tiny_texts import WORDS, write_folder

from situs.config import from_dict
from situs.errors import SitusError
from situs.locks import lock, new_key
from situs.models import open_model
from situs.split.generate import generate, open_writer, vocabulary_scale
from situs.split.message import Body, Message, RefusedError
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
    tables = {"method": {"name": "language"}, "backbone": {"name": str(folder / "config.json")}, "init": str(init or folder)}
    tables["data"] = {"kind": "text", "text": {"tokeniser": str(folder), "longest": 64}}
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
        return ask(server, message, owner)

    return call


def ask(server: Server, message: Message, owner: str = "me") -> Message:
    from situs.split.message import encode

    chunks = iter(encode(message))
    body: Body = server.admit(owner, next(chunks))
    for chunk in chunks:
        body.add(chunk)
    return server.answer(owner, body.message())


def by_transformers(folder, count: int, **options) -> list[int]:
    model = open_model(folder).backbone.model
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    out = model.generate(torch.tensor([IDS]), max_new_tokens=count, **options)
    return out[0, len(IDS) :].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers_and_of_the_blocks_here(kind, models, tmp_path) -> None:
    """Greedy and drawn; learned, rotary and partly rotary positions, grouped queries, a window shorter than the text."""
    folder, seen = models(kind), []
    server = make_server(config_of(folder), tmp_path / "server", device="cpu")
    torch.manual_seed(5)
    drawn = by_transformers(folder, 30, do_sample=True, temperature=1.5, top_k=0)
    greedy = by_transformers(folder, 30)
    assert len({*greedy}) > 3 and drawn != greedy
    for call in (None, through(server, seen=seen)):
        with open_writer(folder, call) as writer:
            assert list(writer.tokens(IDS, max_tokens=30)) == greedy
            assert list(writer.tokens(IDS, max_tokens=30, temperature=1.5, seed=5)) == drawn
            text = "".join(writer.write(PROMPT, max_tokens=30))
            assert text.split() == [WORDS[number] for number in greedy if number > 4]
    assert [len(m.tensors["z"][0]) for m in seen if m.kind == "extend"] == [5, *[1] * 29] * 3
    assert server.sessions == {}
