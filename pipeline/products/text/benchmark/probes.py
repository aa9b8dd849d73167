"""Ask a server prompts of the timed ones' kind, and in turn copies of them that nobody can have asked.

A copy has a random word where its prompt begins to be its own. One prompt in twenty shares the text before it (a
system prompt, a preamble). A cache holds that for both and would hold it for users. Further words make way until
both have about the same number of tokens. The prompts are sent once to each server, and each server gets other
copies, so a cache that both servers share shows too. `prefix_cache.py` judges the times.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeline.products.text.benchmark.prompts import Prompt
from pipeline.products.text.benchmark.rounds import Contender
from pipeline.products.text.evals.generation import count_tokens
from pipeline.records.benchmarks import Probe

_SHARED_BY = 0.05  # of all prompts: what is common to so many is no prompt's own
_MOST_CUT = 12  # words that make way for the random one
_END = "\0"  # of a message
_LAST = "\U0010ffff"  # sorts behind whatever text goes on with


async def probe(
    prompts: Mapping[tuple[int, int], Sequence[Prompt]], side: Contender, all_texts: Sequence[str], *, num_tokens: int
) -> tuple[Probe, ...]:
    """Time known and fresh prompts, one request in flight, who comes first changing from pair to pair.

    Args:
        prompts: by band, none of which is timed in the rounds.
        side: the server, which has been warmed up.
        all_texts: the prompts of all evals, each in the words of `read_text`, sorted.
        num_tokens: completion tokens of every request.
    """
    probes = []
    for band, some in prompts.items():
        for number, known in enumerate(some):
            pair = [known, await _freshen(known, side, all_texts)]
            order = pair if number % 2 == 0 else pair[::-1]
            times = [(await side.answer([prompt], concurrency=1, num_tokens=num_tokens))[0].ttft_ms for prompt in order]
            known_ms, fresh_ms = times if number % 2 == 0 else times[::-1]
            probes.append(Probe(prompt_tokens=band, known_ttft_ms=known_ms, fresh_ttft_ms=fresh_ms))
    return tuple(probes)


def read_text(prompt: Prompt) -> str:
    """Return the text of a prompt, of a conversation message after message."""
    return _END.join(_list_texts(prompt))


def _list_texts(prompt: Prompt) -> list[str]:
    content = prompt.content
    return [content] if isinstance(content, str) else [message["content"] for message in content]


def _put_text(prompt: Prompt, number: int, text: str) -> Prompt:
    """Return the prompt with another text in the place of one of its texts."""
    if isinstance(prompt.content, str):
        return replace(prompt, content=text)
    messages = list(prompt.content)
    messages[number] = messages[number] | {"content": text}
    return replace(prompt, content=messages)


async def _freshen(prompt: Prompt, side: Contender, all_texts: Sequence[str]) -> Prompt:
    """Return a copy with a random word at its own beginning, of about the same number of tokens."""
    number, start = find_own_start(prompt, all_texts)
    text, word = _list_texts(prompt)[number], secrets.token_hex(3)
    rests = [text[start:].split(" ", cut)[-1] for cut in range(1, _MOST_CUT + 1)]
    copies = [
        _put_text(prompt, number, f"{text[:start]}{word} {rest}".rstrip(" ")) for rest in dict.fromkeys([*rests, ""])
    ]
    sizes = await asyncio.gather(*(count_tokens(side.client, c.content, tools=c.tools) for c in copies))
    return min(zip(copies, sizes, strict=True), key=lambda pair: abs(pair[1] - prompt.num_tokens))[0]


def find_own_start(prompt: Prompt, all_texts: Sequence[str]) -> tuple[int, int]:
    """Return where a prompt stops being like others: the number of the message, and the start of a word in it.

    Args:
        prompt: one of those that `all_texts` lists.
        all_texts: of all prompts, sorted.
    """
    text = read_text(prompt)
    least = 1 + max(1, math.ceil(_SHARED_BY * len(all_texts)))

    def is_own(length: int) -> bool:
        """Too few begin like this, itself counted."""
        start = text[:length]
        return bisect_right(all_texts, start + _LAST) - bisect_left(all_texts, start) < least

    own_length = bisect_left(range(len(text) + 1), True, key=is_own)
    before = text[: max(own_length - 1, 0)]
    number, content = before.count(_END), before.rpartition(_END)[2]
    return number, max(content.rfind(space) for space in " \n") + 1
