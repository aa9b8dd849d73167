"""Cut an answer while it is generated: at a stop string, and where a tool call begins.

The text of an answer comes in pieces, of a token or so. A piece that may be the beginning of a stop string is held
back until more has come. At the stop string the text ends, and so does generation. Where a request has tools, what
may be a call is held back to the end, as a call can be read as a whole alone.

Not covered: the ids of a stopped answer's tokens; their number alone is known here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from transformers.cli.serving.utils import ReasoningText, ToolCall, _StreamError

from pipeline.products.text.serving.streams import Piece
from pipeline.products.text.serving.tool_call_text import TAG, may_be_calls, read_calls


class Cutter:
    """Lets text through up to the first of some strings, and holds the rest."""

    def __init__(self, ends: Sequence[str]) -> None:
        self._ends = ends
        self.held = ""
        self.is_cut = False

    def feed(self, piece: str) -> str:
        """Take a piece; return the text that surely lies before every end."""
        text = self.held + piece
        if self.is_cut:
            self.held = text
            return ""
        places = [place for end in self._ends if (place := text.find(end)) >= 0]
        self.is_cut = bool(places)
        place = min(places) if places else len(text) - self._count_begun(text)
        self.held = text[place:]
        return text[:place]

    def _count_begun(self, text: str) -> int:
        """Return how many characters at the end of a text may be the beginning of an end."""
        longest = max(map(len, self._ends), default=1) - 1
        counts = range(min(longest, len(text)), 0, -1)
        return next((n for n in counts if any(end.startswith(text[-n:]) for end in self._ends)), 0)


class CallReader:
    """Lets text through that is no tool call, and reads the rest when it has ended."""

    def __init__(self) -> None:
        self._start = ""  # of the text, as long as all of it may be calls
        self._may_be_calls = True
        self._tagged = Cutter([TAG])

    def feed(self, piece: str) -> str:
        """Take a piece; return the text that surely belongs to no call."""
        if not self._may_be_calls:
            return self._tagged.feed(piece)
        self._start += piece
        self._may_be_calls = may_be_calls(self._start)
        if self._may_be_calls:
            return ""
        piece, self._start = self._start, ""
        return self._tagged.feed(piece)

    def finish(self) -> list[Any]:
        """Return the text and the calls that were held back."""
        text, calls = read_calls(self._start + self._tagged.held)
        return [*([text] if text else []), *(ToolCall(call.name, call.arguments) for call in calls)]


class CutQueue:
    """Stands before the queue of one of the library's streams, and cuts the text that comes."""

    def __init__(
        self,
        source: asyncio.Queue[Any],
        streamer: Any,
        stops: Sequence[str],
        *,
        reads_calls: bool = False,
        calls_once: bool = False,
    ) -> None:
        """Prepare to cut.

        Args:
            source: pieces of text, calls and reasoning that the library has read, an error, and None at the end.
            streamer: of the same stream; it can end generation, and counts its tokens.
            stops: strings that end the text.
            reads_calls: read tool calls out of the text.
            calls_once: drop all calls after the first.
        """
        self._source, self._streamer = source, streamer
        self._stop = Cutter(stops)
        self._reader = CallReader() if reads_calls else None
        self._calls_once, self._has_called = calls_once, False
        self._ready: deque[Any] = deque()
        self._is_over = False
        self._num_tokens: int | None = None  # up to the stop string

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._stop.is_cut

    @property
    def total_tokens(self) -> int:
        """Tokens so far; they end with the one that completes a stop string, whatever was generated after it."""
        return self._streamer.total_tokens if self._num_tokens is None else self._num_tokens

    def cancel(self) -> None:
        """End generation."""
        self._streamer.cancel()

    async def get(self) -> Any:
        """Return the next item."""
        while not self._ready:
            self._take(await self._source.get())
        return self._ready.popleft()

    def get_nowait(self) -> Any:
        """Return the next item, or raise `asyncio.QueueEmpty` when it has not come yet."""
        while not self._ready:
            self._take(self._source.get_nowait())
        return self._ready.popleft()

    def _take(self, item: Any) -> None:
        if self._is_over:  # generated while the stop was on its way
            return
        if isinstance(item, str) and not isinstance(item, ReasoningText):
            self._add_text(self._stop.feed(item))
            if self.is_stopped:
                self._num_tokens = item.num_tokens if isinstance(item, Piece) else 0  # the parser's own, before any
                self.cancel()
                self._finish()
        elif item is None:
            self._add_text(self._stop.held)
            self._finish()
        else:
            self._add(item)

    def _add_text(self, text: str) -> None:
        if text := self._reader.feed(text) if self._reader else text:
            self._ready.append(text)

    def _add(self, item: Any) -> None:
        if isinstance(item, ToolCall):
            if self._calls_once and self._has_called:
                return
            self._has_called = True
        self._ready.append(item)

    def _finish(self) -> None:
        for item in self._reader.finish() if self._reader else ():
            self._add(item)
        self._ready.append(None)
        self._is_over = True


async def collect(queue: CutQueue) -> list[Any]:
    """Return all items of a stream.

    Raises:
        RuntimeError: generation has failed.
    """
    items: list[Any] = []
    while (item := await queue.get()) is not None:
        if isinstance(item, _StreamError):
            raise RuntimeError(item.msg)
        items.append(item)
    return items
