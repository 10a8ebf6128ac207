"""Each verb has an example in its help, whose words are words of the verb."""

from __future__ import annotations

import inspect
import re
import shlex

import pytest

from situs.cli.main import VERBS, find_verb, main, verb_type
from situs.cli.parser.arguments import layers_of, parse_flags
from situs.cli.parser.flags import configured_of, flags_of
from situs.config import convert, from_dict
from situs.presets import merge_layers

EXAMPLE = re.compile(r"For example(?: \(.+?\))?:\s(situs .+?)(?:\n\n|\Z)", re.DOTALL)


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_the_example_of_a_verb_is_a_command_of_it(verb: str) -> None:
    kind = verb_type(verb)
    example = EXAMPLE.search(inspect.getdoc(kind) or "")
    assert example is not None
    named, words = find_verb(shlex.split(example[1])[1:])
    assert named == verb
    configured, start = configured_of(kind), None
    if configured is not None:
        cls = configured[1].cls
        below = [word for at, word in enumerate(words) if word != "--from" and (not at or words[at - 1] != "--from")]
        start = from_dict(cls, merge_layers(cls, layers_of(kind, below).values()))
    for flag, value in parse_flags(flags_of(kind, start), words, f"situs {verb}"):
        convert(flag.kind, value, flag.fields[0])


def test_the_flag_of_earlier_versions_names_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "lock", "--example"]) == 2
    assert "--example was removed: the help of each verb contains an example" in capsys.readouterr().err
