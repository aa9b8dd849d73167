"""Render messages with a checkpoint's chat template, before they are served.

A template is code that comes with the checkpoint. It may refuse messages (roles that do not
alternate), stumble over them, or be damaged. The library's handler would answer a bare HTTP 500 to all
of these.

A template may have no place for tool calls either, as the shipped agent's has none. Calls of earlier turns are then
written as the text that such a model wrote.

The library parses answers by the type of the model, as if each came with the template of its makers. One that was
trained with another template would get prompt and end marks as part of its answer, so that is tried before.

Not covered: whether the model was trained on the text that it renders.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers.cli.serving.utils import BaseHandler, Modality, get_response_template, parse_assistant_message

from pipeline.errors import EngineError
from pipeline.products.text.serving.request_fields import FieldError
from pipeline.products.text.serving.tool_call_text import write_calls

_GREETING = [{"role": "user", "content": "Hello"}]
_ANSWER = "Good day"
_NO_TYPE = SimpleNamespace(config=SimpleNamespace(model_type=""))  # the library parses no answer of such a model
_NO_CALLS: tuple[str, list[Any]] = ("tool_calls", [])


def check_template(tokenizer: Any) -> None:
    """Prove that a checkpoint's template, when it has one, renders a user's message.

    Raises:
        EngineError: with the template's file and its own words.
    """
    if tokenizer.chat_template and (problem := find_problem(tokenizer, _GREETING)):
        folder = Path(tokenizer.name_or_path)
        file = folder / "chat_template.jinja"
        file = file if file.is_file() else folder / "tokenizer_config.json"
        raise EngineError(f"{file}: {problem} (asked to render one user message); correct it")


def find_problem(tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Any = None) -> str | None:
    """Return why messages can't be rendered, in the template's own words; None when they can."""
    if not tokenizer.chat_template:
        return "the checkpoint has no chat template; add chat_template.jinja to it"
    try:
        # as the handler does it, but for the tokens
        inputs = BaseHandler.get_processor_inputs_from_messages(messages, Modality.LLM)
        tokenizer.apply_chat_template(inputs, tools=tools, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template raises its own errors, and whatever Python does
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        return f"the checkpoint's chat template fails: {' '.join(reason.split())[:300]}"
    return None


def choose_parsed_type(tokenizer: Any, model: Any) -> Any:
    """Return what the library is to parse answers as those of: the model, or one of no type, whose answers are plain.

    A parser fits where it finds an answer, or a thought, between the template's opening and the end that the template
    writes behind an answer. The tokenizer loses one that does not.
    """
    if not tokenizer.chat_template or get_response_template(tokenizer, model) is None or _is_parsed(tokenizer, model):
        return model
    tokenizer.response_template = None
    return _NO_TYPE


def _is_parsed(tokenizer: Any, model: Any) -> bool:
    ids = tokenizer.encode(_ANSWER, add_special_tokens=False)
    answer = tokenizer.decode(ids, skip_special_tokens=True).strip()
    try:
        fields = get_response_template(tokenizer, model).get("fields", {})
        thought_end = fields.get("thinking", {}).get("close")
        prompt = tokenize_messages(tokenizer, _GREETING)
        for end in _list_ends(tokenizer, model):
            content, thought, _ = parse_assistant_message(tokenizer, model, [*ids, end], prompt)
            if not content and answer in (thought or "") and isinstance(thought_end, str):
                # the template has begun to think, so that an answer comes after a thought
                thinking = [*ids, *tokenizer.encode(thought_end, add_special_tokens=False)]
                content, *_ = parse_assistant_message(tokenizer, model, [*thinking, *ids, end], prompt)
            if content.strip() != answer:
                return False
    except Exception:  # of a template or a parser that came with the checkpoint
        return False
    return True


def _list_ends(tokenizer: Any, model: Any) -> list[int]:
    """Return the model's ends of an answer: those that the template writes behind one; all, where it writes none."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    turns = [*_GREETING, {"role": "assistant", "content": _ANSWER}, *_GREETING]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # of the template: it may refuse such turns, and serve others
        return ends
    behind = text.partition(_ANSWER)[2].partition(_GREETING[0]["content"])[0]
    return [end for end in ends if (word := tokenizer.decode([end])) and word in behind] or ends


def prepare_messages(tokenizer: Any, messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages as the handler and the template take them.

    OpenAI's clients send `null` for what a message has not, which the handler would stumble over.

    Raises:
        FieldError: a message is no object, or its calls can't be read.
    """
    has_place = "tool_calls" in str(tokenizer.chat_template)
    prepared = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise FieldError("messages", f"expected objects, got {message!r:.80} as message {i}")
        known = {key: value for key, value in message.items() if value is not None and (key, value) != _NO_CALLS}
        if "tool_calls" in known and not has_place:
            try:
                known["content"] = write_calls(known.pop("tool_calls"))
            except (TypeError, ValueError) as error:
                raise FieldError("messages", f"tool_calls of message {i}: {error}") from None
        prepared.append(known)
    return prepared


def tokenize_messages(tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Any = None) -> list[int]:
    """Return the token ids of prepared messages as the template renders them, the answer begun."""
    inputs = BaseHandler.get_processor_inputs_from_messages(messages, Modality.LLM)
    return tokenizer.apply_chat_template(inputs, tools=tools, add_generation_prompt=True, return_dict=True)["input_ids"]
