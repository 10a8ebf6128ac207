"""The tokeniser that lies in a text model's folder."""

from __future__ import annotations

from pathlib import Path

from situs.errors import SitusError

FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model")


def token_ids(folder: Path, texts: list[str], longest: int) -> list[list[int]]:
    """Each text as the ids of its tokens, those that a model's input begins and ends with among them."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in FILES):
        raise SitusError(f"{folder}: holds no tokeniser, so texts cannot be turned into its words", field="texts")
    try:
        words = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a damaged tokeniser fails in as many ways as there are kinds of them
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise SitusError(f"{folder}: its tokeniser cannot be read: {reason}", field="texts") from error
    return words(texts, truncation=True, max_length=longest)["input_ids"]
