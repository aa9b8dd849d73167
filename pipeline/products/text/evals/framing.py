"""What stands round a text that is scored: one BOS before it, as the model was trained, and never a second one.

Most tokenizers put a BOS before a text themselves, some none, and some an EOS behind it. One letter,
read with special tokens and without them, shows what a tokenizer adds. Texts are read without and get them here.

lm-eval 0.4.13 differs. Where the tokenizer adds BOS, its `hf` model puts another before a whole text and counts the
probability of the second. With `add_bos_token=False` it does not. Where the tokenizer adds EOS, it takes the first
token of an answer for one of the question.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import CheckpointError
from pipeline.products.text.serving.client import Client

LETTER = "a"


@dataclass(frozen=True)
class Frame:
    """The special tokens round a text.

    `first` stands before a document whose every token is predicted; `head` and `tail` are what the tokenizer adds.
    """

    first: int
    head: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()

    def frame_document(self, ids: list[int]) -> list[int]:
        """Return what is predicted of a document behind `first`, which its own text may begin with, too."""
        start = next((i for i, token in enumerate(ids) if token != self.first), len(ids))
        return ids[start:] + list(self.tail)

    def frame_context(self, ids: list[int]) -> list[int]:
        """Return the ids of a text that goes on: with the tokenizer's head, unless the text has one itself."""
        head = list(self.head)
        return ids if ids[: len(head)] == head else head + ids


async def read_frame(client: Client, checkpoint: Path) -> Frame:
    """Ask a server what its tokenizer adds to a text.

    Raises:
        CheckpointError: the tokenizer has neither BOS nor EOS, or changes a text where it adds something to it.
    """
    (bare,) = await client.tokenize([LETTER], add_special_tokens=False)
    (whole,) = await client.tokenize([LETTER])
    start = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), None)
    if start is None:
        raise CheckpointError(
            f"{checkpoint}: expected a tokenizer that adds special tokens round a text, got {whole!r} for {LETTER!r} "
            f"with them and {bare!r} without; correct tokenizer.json"
        )
    head, tail = tuple(whole[:start]), tuple(whole[start + len(bare) :])
    return Frame(head[-1] if head else await _read_first_token(client, checkpoint), head, tail)


async def _read_first_token(client: Client, checkpoint: Path) -> int:
    """Return the id of BOS, or of EOS where there is no BOS."""
    path = checkpoint / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: expected the tokenizer's settings: {error}") from None
    token = config.get("bos_token") or config.get("eos_token")
    text = token["content"] if isinstance(token, dict) else token
    if not text:
        raise CheckpointError(f"{path}: expected a bos_token or an eos_token, found neither")
    ids = (await client.tokenize([text], add_special_tokens=False))[0]
    if len(ids) != 1:
        raise CheckpointError(f"{path}: expected {text!r} to be one token, the server reads it as {ids!r}")
    return ids[0]


def rolling_windows(tokens: Sequence[int], *, first: int, max_tokens: int) -> list[tuple[list[int], int]]:
    """Return windows of at most `max_tokens` + 1 ids, and how many of each one's last ids it predicts.

    Args:
        tokens: what is predicted, each once.
        first: the token before them.
        max_tokens: the model's context.
    """
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    windows = get_rolling_token_windows(list(tokens), first, max_tokens, 1)
    pairs = (make_disjoint_window(window) for window in windows)
    return [(context + continuation, len(continuation)) for context, continuation in pairs]
