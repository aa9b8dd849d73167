"""The rows of the fault table: each fault, and what has to come of it.

A fault strikes cases only, unless it is one that is to be noticed when the client gets to know the
server: what it asks then is no concern of the table's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from tests.certify.fault_project import MODEL, NUM_CASES
from tests.certify.fault_table import Row
from tests.fakes.faulty_proxy import (
    CHAT,
    MODELS,
    SCORE,
    Exchange,
    Fault,
    after,
    ask_instead,
    at,
    cut,
    edit,
    every,
    hang,
    pass_on,
    sample,
    say,
    say_retry_at,
    trickle,
    where,
)

PAGE = b"<html>\n <body>502 Bad Gateway</body></html>"
BUSY = {"error": {"message": "slow down"}}
BROKEN = {"error": {"message": "out of memory"}}


def is_case(exchange: Exchange) -> bool:
    """Tell a case's request from those by which the client gets to know the server."""
    if exchange.path == CHAT:
        return str(exchange.body["messages"][0]["content"]).startswith("Task ")
    return exchange.path == SCORE and len(exchange.body["prompt"][0]) > 3


def to_chats(fault: Fault) -> Fault:
    """Break every chat about a case."""
    return at(CHAT, where(is_case, fault))


def from_seventh(fault: Fault) -> Callable[[], Fault]:
    """Break all chats about cases but the first six."""
    return lambda: to_chats(after(6, fault))


def now_and_then(*faults: Fault) -> Callable[[], Fault]:
    """Break one chat in four, with each fault in turn."""
    return lambda: to_chats(every(4, in_turn(*faults)))


def in_turn(*faults: Fault) -> Fault:
    """Break one exchange with each, over and over."""
    ring = itertools.cycle(faults)
    return lambda exchange: next(ring)(exchange)


def first(count: int, fault: Fault) -> Fault:
    """Break the first so many exchanges."""
    numbers = itertools.count(1)
    return lambda exchange: fault(exchange) if next(numbers) <= count else exchange.forward()


def silence(answer: Any) -> Any:
    """Make a reply one without text."""
    answer["choices"][0]["message"]["content"] = ""
    answer["usage"]["completion_tokens"] = 0
    return answer


def without_choices(answer: Any) -> Any:
    """Make a reply one that was never made."""
    return answer | {"choices": []}


def without_logprobs(answer: Any) -> Any:
    """Answer as a server that ignores `logprobs`."""
    return answer | {"choices": [choice | {"logprobs": None} for choice in answer["choices"]]}


def without_echo(answer: Any) -> Any:
    """Answer as a server that ignores `echo`: what it would generate next, and not what it was given."""
    last = [{name: values[-1:] for name, values in choice["logprobs"].items()} for choice in answer["choices"]]
    return answer | {
        "choices": [choice | {"logprobs": one} for choice, one in zip(answer["choices"], last, strict=True)]
    }


def by_another_model(answer: Any) -> Any:
    """Answer under another name than was asked for."""
    return answer | {"model": "other"}


KEPT = {"calls": "[0-6] of 16", "flows": "[0-6] of 32"}  # which of the two is asked first is not said; a row counts all


def ends(last: str, *, path: str = CHAT, kept: Mapping[str, str] = KEPT) -> str:
    """Return the pattern of the line that eight failures in a row end with, of whichever eval has them first."""
    lines = (
        rf"{name}: 8 cases in a row failed, last: http://[\w.:]+{path}: {last}; {name}: {count} cases are "
        r"finished and kept, run `dvc repro` to go on"
        for name, count in kept.items()
    )
    return f"(?:{'|'.join(lines)})"


def in_vain(last: str) -> str:
    """Return the pattern of the same after every try."""
    return ends(rf"{last} \(tried 5 times\)")


ROWS = [
    Row(
        "engine killed mid-eval",
        None,
        num_kept=6,
        said=r"server server-0: killed by signal 9: .+ \(log: build/agent/logs/there/server-0\.log\); "
        r"(calls|flows|prose): \d+ of \d+ cases are finished and kept, run `dvc repro` to go on",
    ),
    Row(
        "429 with Retry-After in seconds",
        lambda: to_chats(first(2, say(429, BUSY, retry_after="2"))),
        num_kept=NUM_CASES,
        verdict="pass",
        wait_s=2.0,
    ),
    Row(
        "429 with Retry-After as a date",
        lambda: to_chats(first(2, say_retry_at)),
        num_kept=NUM_CASES,
        verdict="pass",
        wait_s=1.0,
    ),
    Row("429 for ever", from_seventh(say(429, BUSY)), num_kept=6, said=in_vain("HTTP 429: slow down")),
    Row(
        "500, 502, 503 now and then",
        now_and_then(say(500, BROKEN), say(502, PAGE), say(503, b"")),
        num_kept=NUM_CASES,
        verdict="pass",
    ),
    Row("500 for ever", from_seventh(say(500, BROKEN)), num_kept=6, said=in_vain("HTTP 500: out of memory")),
    Row(
        "500 for ever while documents are scored",
        lambda: at(SCORE, where(is_case, say(500, BROKEN))),
        said=ends(r"HTTP 500: out of memory \(tried 5 times\)", path=SCORE, kept={"prose": "0 of 32"}),
    ),
    Row(
        "reply that trickles for ever",
        from_seventh(trickle),
        num_kept=6,
        timeout_s=1.0,
        said=ends(r"no answer within 1 s, which is resources\.request_timeout_s \(tried 2 times\)"),
    ),
    Row(
        "reply that never begins",
        from_seventh(hang),
        num_kept=6,
        timeout_s=1.0,
        said=ends(r"no answer within 1 s, which is resources\.request_timeout_s \(tried 2 times\)"),
    ),
    Row("connection cut in mid-reply, now and then", now_and_then(cut), num_kept=NUM_CASES, verdict="pass"),
    Row(
        "connection cut in mid-reply, always",
        from_seventh(cut),
        num_kept=6,
        said=in_vain("expected an answer, got .*payload is not completed.*"),
    ),
    Row(
        "garbage instead of JSON",
        from_seventh(say(200, b'{"choices": [{"mess\xff')),
        num_kept=6,
        said=in_vain("""expected JSON, got '{"choices": .{"mess.*'"""),
    ),
    Row(
        "a proxy's page",
        from_seventh(say(200, PAGE)),
        num_kept=6,
        said=in_vain("expected JSON, got '<html> <body>502 Bad Gateway</body></html>'"),
    ),
    Row("empty body", from_seventh(say(200, b"")), num_kept=6, said=in_vain("expected JSON, got nothing")),
    Row(
        "`choices: []`",
        from_seventh(edit(without_choices)),
        num_kept=6,
        said=ends("""expected a chat completion with its usage, got '{.*"choices":.],.*'"""),
    ),
    Row(
        "one empty reply",
        lambda: to_chats(first(1, edit(silence))),
        num_kept=NUM_CASES,
        verdict="pass",
        num_differing=1,
    ),
    Row(
        "every reply empty",
        lambda: to_chats(edit(silence)),
        num_kept=NUM_CASES,
        because="calls: all 16 replies of there are empty, .*",
    ),
    Row(
        "`max_tokens` ignored",
        lambda: at(CHAT, ask_instead(max_tokens=9)),
        said=rf"evals\.calls: .*{CHAT}: expected at most 1 completion tokens, as max_tokens asks, got 9; the server "
        "ignores max_tokens.*",
    ),
    Row(
        "`max_tokens` ignored from some case on",
        from_seventh(ask_instead(max_tokens=9)),
        num_kept=6,
        said=ends("expected at most 4 completion tokens, as max_tokens asks, got 9; .*"),
    ),
    Row(
        "`temperature` ignored",
        lambda: at(CHAT, sample),
        said=r"evals\.calls: expected one answer to one request, got '.*', then '.*'; .* ignored temperature .*",
    ),
    Row(
        "`tools` ignored",
        lambda: at(CHAT, ask_instead(tools=...)),
        said=r"evals\.calls: a request took \d+ prompt tokens with a tool and without; .*",
    ),
    Row(
        "`logprobs` ignored",
        lambda: at(SCORE, edit(without_logprobs)),
        said=rf"evals\.prose: .*{SCORE}: expected echoed logprobs of 3 tokens, got 'null'; .*",
    ),
    Row(
        "`echo` ignored",
        lambda: at(SCORE, edit(without_echo)),
        said=rf"evals\.prose: .*{SCORE}: expected echoed logprobs of 3 tokens, got those of 1; .*",
    ),
    Row(
        "`model` ignored, another one is listed",
        lambda: at(MODELS, say(200, {"data": [{"id": "other"}]})),
        said=rf"http://[\w.:]+{MODELS}: expected '{MODEL}' among the served models, got \['other'\]; correct .*",
    ),
    Row(
        "`model` ignored, another one answers",
        lambda: at(CHAT, edit(by_another_model)),
        said=rf"evals\.calls: .*{CHAT}: expected an answer of model '{MODEL}', got one of 'other'; .*",
    ),
    Row(
        "`model` ignored from some case on",
        from_seventh(edit(by_another_model)),
        num_kept=6,
        said=ends(f"expected an answer of model '{MODEL}', got one of 'other'; .*"),
    ),
    Row(
        "another model scores",
        lambda: at(SCORE, where(is_case, edit(by_another_model))),
        said=ends(
            f"expected an answer of model '{MODEL}', got one of 'other'; .*", path=SCORE, kept={"prose": "0 of 32"}
        ),
    ),
    Row(
        "the reference's weights answer",
        lambda: pass_on,
        num_kept=NUM_CASES,
        checkpoint="models/other",
        because=r"prose: the endpoint answers with the reference's weights: over 32 documents .*",
    ),
]
