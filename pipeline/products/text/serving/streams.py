"""Streams of the library whose pieces of text say how many tokens they took: so the tokens of a cut answer are known.

Generation runs ahead of whoever reads a stream, and with drafts a step gives several tokens. What the library counts
when a stop string is found is more than the answer has.

Not covered: cutting, which is `cutting`'s.
"""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from transformers.cli.serving.utils import (
    CBStreamer,
    DirectStreamer,
    GenerateManager,
    _GenerationCancelled,
    _StreamError,
)

from pipeline.products.text.serving.loading import LoadedModel


class Piece(str):
    """Text of a stream."""

    num_tokens: int  # of the answer, up to the end of this text


def build_piece(text: str, num_tokens: int) -> Piece:
    """Return a text with the number of tokens of the answer up to its end."""
    piece = Piece(text)
    piece.num_tokens = num_tokens
    return piece


class PieceStreamer(DirectStreamer):
    """The library's streamer of serial generation, also for steps of several tokens; it ends when told, not before."""

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for more."""
        return self._cancelled.is_set()

    def put(self, value: torch.Tensor) -> None:
        super().put(value.flatten())

    def _enqueue(self, item: Any) -> None:
        super()._enqueue(build_piece(item, self.total_tokens) if type(item) is str else item)

    def end(self) -> None:
        """Generation is over; what follows it is still to come."""

    def finish(self) -> None:
        super().end()


class SerialManager(GenerateManager):
    """The library's serial generation, one request at a time; its streams are of pieces."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__()
        self._loaded = loaded

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: dict[str, Any],
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], PieceStreamer]:
        """Stream from the library's inference thread; arguments and result as in the base class."""
        queue: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        streamer = PieceStreamer(processor._tokenizer, loop, queue, response_parser=response_parser)

        def run() -> None:
            try:
                self._run_stream(inputs, gen_config, streamer, request_id)
                streamer.finish()
            except _GenerationCancelled:
                loop.call_soon_threadsafe(queue.put_nowait, None)
            except Exception as error:  # whatever it is, the client must not wait for more
                loop.call_soon_threadsafe(queue.put_nowait, _StreamError(" ".join(str(error).split())))

        self.submit(run)
        return queue, streamer

    def _run_stream(self, inputs: dict[str, Any], config: Any, streamer: PieceStreamer, request_id: str) -> None:
        tokenizer = self._loaded.tokenizer
        self._loaded.model.generate(**inputs, generation_config=config, streamer=streamer, tokenizer=tokenizer)


class _PieceQueue:
    """Stands before the queue of a batched stream, whose tokens are counted on the thread that reads them."""

    def __init__(self, queue: asyncio.Queue[Any], streamer: CBStreamer) -> None:
        self._queue, self._streamer = queue, streamer

    def put_nowait(self, item: Any) -> None:
        self._queue.put_nowait(build_piece(item, self._streamer.total_tokens) if type(item) is str else item)


def build_pieces(streamer: Any) -> None:
    """Make a stream of continuous batching one of pieces; call it before the event loop goes on."""
    if isinstance(streamer, CBStreamer):
        streamer._queue = _PieceQueue(streamer._queue, streamer)
