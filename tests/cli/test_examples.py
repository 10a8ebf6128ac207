"""`situs VERB --example`: each verb has one in its help, its words are words of the verb, and what it needs comes
before it."""

from __future__ import annotations

import shlex

import pytest

from situs.cli.examples import examples_of, own_example
from situs.cli.main import VERBS, find_verb, main, verb_type
from situs.cli.parser.arguments import layers_of, parse_flags
from situs.cli.parser.flags import configured_of, flags_of
from situs.config import convert, from_dict
from situs.presets import merge_layers

MODULES = {verb: module for verb, (module, _) in VERBS.items()}


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_the_example_of_a_verb_is_a_command_of_it(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = own_example(MODULES[verb])
    program, *words = shlex.split(command)
    assert program == "situs"
    found, rest = find_verb(words)
    assert found == verb
    kind = verb_type(verb)
    held, start = configured_of(kind), None
    if held is not None:
        below = [word for at, word in enumerate(rest) if word != "--from" and (not at or rest[at - 1] != "--from")]
        start = from_dict(held[1].cls, merge_layers(held[1].cls, layers_of(kind, below).values()))
    for flag, value in parse_flags(flags_of(kind, start), rest, f"situs {verb}"):
        convert(flag.kind, value, flag.fields[0])
    made, told = {flag_value(each, "--out") for each in examples_of(verb, MODULES)}, own_example(MODULES[verb], "needs")
    for word in rest:  # nothing is named that is neither made before, nor said to be the reader's own
        folder = word.split("/")[0] if word.endswith(".json") else word
        if "/" in word or word.endswith((".txt", ".key")):
            assert word in made or folder in made or folder in told, word


def flag_value(command: str, flag: str) -> str | None:
    words = shlex.split(command, comments=True)
    return words[words.index(flag) + 1] if flag in words else None


def test_what_an_example_needs_stands_before_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "lock", "--example"]) == 0
    commands = capsys.readouterr().out.splitlines()
    assert [find_verb(shlex.split(each)[1:])[0] for each in commands] == [
        "pretrain",
        "finetune",
        "export",
        "keygen",
        "lock",
        "audit lock",
    ]
    served = examples_of("split infer", MODULES)
    assert [each for each in served if each.endswith(" &")] == [own_example(MODULES["split serve"]) + " &"]
    assert served.index(served[-2]) == len(served) - 2 and "split train" in served[-2]
