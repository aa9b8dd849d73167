"""Which fields of OpenAI's API a greedy server honours, accepts and refuses."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.products.text.serving.request_fields import FieldError, read_chat, read_completion

PLAINEST: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
NEUTRAL = {
    "temperature": 0,
    "top_p": 0.3,
    "n": 1,
    "seed": 7,
    "user": "u",
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "logit_bias": {},
    "stream": False,
    "stream_options": {"include_usage": False},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "stop": [],
    "logprobs": False,
    "max_tokens": None,
    "tools": None,
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_changes_no_greedy_answer_is_asked_as_if_it_were_not_there(name: str) -> None:
    """An openai client that sends its defaults must not fail, nor get another answer."""
    assert read_chat({**PLAINEST, name: NEUTRAL[name]}) == read_chat(PLAINEST)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0.7),
        ("temperature", "0"),
        ("n", 2),
        ("n", True),
        ("frequency_penalty", 0.1),
        ("presence_penalty", -1),
        ("logit_bias", {"5": 1}),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("reasoning_effort", "low"),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_completion_tokens", "5"),
        ("stop", [""]),
        ("stop", {"a": 1}),
        ("stream", "yes"),
        ("stream_options", {"include_usage": "yes"}),
        ("tools", [{"name": "f"}]),
        ("tools", "f"),
        ("top_logprobs", 2),
        ("parallel_tool_calls", "no"),
        ("messages", []),
    ],
)
def test_what_would_change_an_answer_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(FieldError) as caught:
        read_chat({**PLAINEST, field: value})
    assert (caught.value.status_code, caught.value.field) == (400, field)
    assert caught.value.detail.startswith(f"{field}: ") and "\n" not in caught.value.detail


CALLS = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
TEXT = {"type": "text", "text": "x"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


@pytest.mark.parametrize(
    "message",
    [
        "x",
        {"content": "x"},
        {"role": 1, "content": "x"},
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "user", "content": []},
        {"role": "user", "content": 5},
        {"role": "user", "content": [TEXT, IMAGE]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "assistant", "content": [IMAGE], "tool_calls": CALLS},
        {"role": "assistant", "content": None, "tool_calls": []},
    ],
)
def test_a_message_that_a_template_would_drop_in_silence_is_refused(message: Any) -> None:
    """A picture was left out, and a message without a word answered, as if nothing had been asked."""
    with pytest.raises(FieldError, match="^400: messages: expected .* message 1") as caught:
        read_chat({**PLAINEST, "messages": [*PLAINEST["messages"], message]})
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": ""},
        {"role": "ipython", "content": "x"},  # roles are the template's
        {"role": "user", "content": [TEXT, TEXT]},
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "assistant", "tool_calls": CALLS},
    ],
)
def test_messages_of_text_and_calls_are_read(message: dict[str, Any]) -> None:
    read_chat({**PLAINEST, "messages": [message]})


@pytest.mark.parametrize("beside", [{"stream": True}, {"stop": "x"}])
@pytest.mark.parametrize("field", ["logprobs", "return_token_ids"])
def test_tokens_are_not_promised_where_they_are_not_known(field: str, beside: dict[str, Any]) -> None:
    with pytest.raises(FieldError, match=f"{field}: expected neither stream nor stop beside it"):
        read_chat({**PLAINEST, field: True, **beside})


def test_both_names_of_the_limit_count_and_must_agree() -> None:
    assert read_chat({**PLAINEST, "max_completion_tokens": 5}).max_tokens == 5
    assert read_chat({**PLAINEST, "max_completion_tokens": 5, "max_tokens": 5}).max_tokens == 5
    with pytest.raises(FieldError, match="max_completion_tokens: expected the number of max_tokens"):
        read_chat({**PLAINEST, "max_completion_tokens": 5, "max_tokens": 6})


def test_tools_that_no_call_is_wanted_of_are_not_shown() -> None:
    assert read_chat({**PLAINEST, "tools": [TOOL]}).tools == [TOOL]
    assert read_chat({**PLAINEST, "tools": [TOOL], "tool_choice": "none"}).tools == []


def test_what_lm_eval_sends_to_completions_is_read() -> None:
    generating = {"model": "m", "prompt": [[1]], "max_tokens": 256, "temperature": 0, "stop": list("abcde"), "seed": 1}
    assert read_completion(generating).stops == tuple("abcde")
    scoring = {"model": "m", "prompt": [[1]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1, "echo": True}
    assert not read_completion(scoring).scores_alone
    assert read_completion(scoring | {"return_tokens_as_token_ids": True}).scores_alone


@pytest.mark.parametrize(
    ("field", "value"), [("stream", 1), ("best_of", 2), ("suffix", "x"), ("max_tokens", 0), ("logprobs", 101)]
)
def test_completions_refuse_by_name_too(field: str, value: Any) -> None:
    with pytest.raises(FieldError, match=f"^400: {field}: "):
        read_completion({"model": "m", "prompt": "x", field: value})
