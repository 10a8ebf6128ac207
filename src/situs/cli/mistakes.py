"""What the parser refuses, as one sentence that names the word, what is allowed and the nearest flag or word."""

from __future__ import annotations

from typing import get_args

import cyclopts


def sentence(error: cyclopts.CycloptsError, prog: str) -> str:
    """One sentence for what the parser found; its own words where it is of no form that is known here."""
    said = str(error).strip().rstrip(".")
    nearest = said.partition("Did you mean ")[2].strip('"?')
    perhaps = f"; perhaps {nearest}" if nearest else ""
    match error:
        case cyclopts.UnknownOptionError():
            word = (error.token.keyword or error.token.value).partition("=")[0]
            return f"{word}: {prog} has no such flag{perhaps}"
        case cyclopts.UnusedCliTokensError():
            return f"{' '.join(error.unused_tokens or ())}: more than {prog} takes; a list is one word, apart by commas"
        case cyclopts.MissingArgumentError() if error.argument is not None:
            needs = "needs a value" if error.keyword or error.argument.tokens else "must be given"
            return f"{error.keyword or error.argument.name}: {needs}"
        case cyclopts.CoercionError() if error.token is not None and get_args(error.target_type):
            name = error.token.keyword or (error.argument.name if error.argument else "")
            *words, last = map(str, get_args(error.target_type))
            return f"{name} {error.token.value}: must be {', '.join(words)} or {last}{perhaps}"
    return said
