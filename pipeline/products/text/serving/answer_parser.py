"""Parse an answer by the template that its tokenizer, or the type of its model, has for answers.

The library's parser ends with an error at a tool call that is no JSON, is cut, or is no call. A model that writes one
gives a wrong answer; a server that fails at it ends an evaluation. So what can't be read is text, as it was written.

Not covered: calls in the text of other models, which `tool_call_text` reads.
"""

from __future__ import annotations

from typing import Any

from transformers.cli.serving.utils import ToolCall, get_response_template, response_events_to_chunks
from transformers.utils.chat_parsing import ResponseParser


class AnswerParser(ResponseParser):
    """The library's parser, of one answer; it reads all answers."""

    _start = 0  # of the current region in what was read, its opening included

    def __init__(
        self, template: dict[str, Any], tokenizer: Any, prompt: list[int], tools: list[dict[str, Any]]
    ) -> None:
        self._marks = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
        super().__init__(template, prefix=tokenizer.decode(prompt), tools=tools)

    def read(self, text: str) -> list[Any]:
        """Return text, thoughts and calls of a whole answer, whose special tokens the text still has."""
        events = [*self.initial_events, *self.feed(text)]
        return response_events_to_chunks([*events, *self.finalize()[1]])

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return the last events; that an answer lacks a field is no error."""
        events: list[dict[str, Any]] = []
        self._process(events, eos=True)
        return self._output, events

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
        super()._open_explicit(events, field, m)
        self._start = m.start()

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        written, num_events = self._buffer[self._start : self._pos], len(events)
        try:
            if self._opened and self._current == "tool_calls":
                _check_closed(self._spec.fields["tool_calls"].close_re, written)
            super()._close_current(events)
            _check_calls(response_events_to_chunks(events[num_events:]))
        except Exception:  # of whatever type: a model may write anything
            del events[num_events:]
            self._reset_to_implicit()
            for mark in self._marks:
                written = written.replace(mark, "")
            events.append({"type": "region_chunk", "field": "content", "text": written})

    def _reset_to_implicit(self) -> None:
        super()._reset_to_implicit()
        self._start = self._pos


def build_parser(tokenizer: Any, model: Any, prompt: Any, tools: list[dict[str, Any]]) -> AnswerParser | None:
    """Return the parser of the answer to a prompt; None where answers are text.

    Args:
        tokenizer: may have a template of its own.
        model: its type may have one.
        prompt: token ids, a list or int64 [1, n].
        tools: of the request; arguments in tags, which are all text, get the types of their schemas.
    """
    template = get_response_template(tokenizer, model)
    ids = prompt if isinstance(prompt, list) else prompt[0].tolist()
    return None if template is None else AnswerParser(template, tokenizer, ids, tools)


def _check_closed(close: Any, written: str) -> None:
    """Raise where a call was cut: of one in tags the library would make one with the arguments that were there."""
    if close is not None and not close.search(written):
        raise ValueError("the answer ended within a call")


def _check_calls(items: list[Any]) -> None:
    """Raise where a call can't be sent: its name or its arguments are no text, or half of a pair of escapes."""
    for item in items:
        if isinstance(item, ToolCall):
            (item.name + item.arguments).encode()
