"""Attaching to a server that somebody else runs: what is asked of it first, and what a user is told."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import socket
import threading
import time
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import EngineError
from pipeline.products.text.serving import sending
from pipeline.products.text.serving.engines.registry import start_engine
from pipeline.products.text.serving.readiness import PROBE_TOKENS
from pipeline.products.text.settings import (
    EvalSettings,
    HarnessEval,
    PerplexityEval,
    ResourceSettings,
    ToolCallsEval,
    TrajectoriesEval,
)
from pipeline.records.evaluations import Candidate, Checkpoint
from pipeline.records.serving import ServingConfig
from tests.fakes.fake_vllm import make_handler, score

CONTEXT = 256
PROSE = PerplexityEval(kind="perplexity", evalset="e")
CHOICES = HarnessEval(kind="harness", task="t")
CALLS = ToolCallsEval(kind="tool_calls", evalset="e")
TOOLS = TrajectoriesEval(kind="trajectories", evalset="e", max_turns=2, send_tools=True)
CHAT = {
    "choices": [{"message": {"content": "yes"}, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1},
}


class Endpoint:
    """A server of vLLM's kind; `answers` puts another (status, content) in the place of a path's own answer."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self.model: dict[str, Any] = {"id": "m"}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.released = threading.Event()
        self.hangs_at: str | None = None
        self.shows_tools = True
        self.busy_once: set[str] = set()  # paths of which the next request is turned away
        self.url = ""

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.asked.append((path, body))
        if self.hangs_at == path:
            self.released.wait(30)
        if path in self.busy_once:
            self.busy_once.remove(path)
            return 503, {"detail": "busy"}
        if path in self.answers:
            return self.answers[path]
        if path == "/v1/models":
            return 200, {"data": [self.model]}
        if path == "/tokenize":
            return 200, {"tokens": [[1] for _ in body["prompt"]]}
        if path == "/v1/chat/completions":
            return 200, self.chat(body)
        return (200, score(body)) if path == "/v1/completions" else (404, {"detail": "Not Found"})

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        shown = self.shows_tools and len(body.get("tools", ()))
        return CHAT | {"usage": {"prompt_tokens": 3 + 20 * shown, "completion_tokens": 1}}

    @property
    def posted(self) -> list[str]:
        return [path for path, body in self.asked if body]


class Server(ThreadingHTTPServer):
    daemon_threads = True


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()

    server = Server(("127.0.0.1", 0), make_handler(endpoint.answer))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    endpoint.url = f"http://127.0.0.1:{server.server_port}"
    yield endpoint
    endpoint.released.set()
    server.shutdown()
    server.server_close()


def attach(
    url: str,
    evals: dict[str, EvalSettings],
    timeout_s: float = 5.0,
    api_key_env: str | None = None,
    stated: dict[str, Any] | None = None,
) -> str:
    """Attach for these evals; return what the user is told, or "" when the endpoint is ready, with its facts."""
    stated = {} if stated is None else stated
    checkpoint = Checkpoint(
        path="c", kind="llama", format="dense", dtype="float32", num_parameters=1, num_bytes=1, digest="d"
    )
    serving = ServingConfig(
        engine="openai",
        base_url=url,
        model="m",
        context_length=CONTEXT,
        concurrency=4,
        max_tokens=8,
        api_key_env=api_key_env,
    )
    resources = ResourceSettings(num_servers=1, request_timeout_s=timeout_s, start_timeout_s=5)
    candidate = Candidate(name="there", checkpoint=checkpoint, serving=serving)

    async def run() -> None:
        async with start_engine(candidate, resources, evals=evals, root=Path(), logs=Path()) as (engine, _):
            stated.update(engine.facts)

    try:
        asyncio.run(run())
    except EngineError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


def test_only_what_the_evals_will_use_is_asked_first(endpoint: Endpoint) -> None:
    assert attach(endpoint.url, {"calls": CALLS}) == ""
    assert set(endpoint.posted) == {"/v1/chat/completions"}
    endpoint.asked.clear()
    assert attach(endpoint.url, {"prose": PROSE, "choices": CHOICES}) == ""
    assert endpoint.posted == ["/tokenize", "/v1/completions"]


def test_every_request_carries_the_key(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    answering: Any = make_handler(endpoint.answer)

    class Handler(answering):
        def do_GET(self) -> None:
            seen.add(self.headers.get("authorization"))
            super().do_GET()

        do_POST = do_GET

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("SOME_KEY", "s3cret")
    assert attach(url, {"calls": CALLS, "prose": PROSE}, api_key_env="SOME_KEY") == ""
    assert seen == {"Bearer s3cret"}
    monkeypatch.delenv("SOME_KEY")
    said = attach(url, {"calls": CALLS}, api_key_env="SOME_KEY")
    assert said == (
        "candidates.there.engine.api_key_env: expected the key in the environment variable SOME_KEY, found none; set it"
    )
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("path", ["/version", "/server_info?config_format=json"])
def test_a_server_that_is_busy_for_a_moment_is_the_same_server(endpoint: Endpoint, path: str) -> None:
    """As another one, what was finished before would be asked again, and its benchmark refused."""
    endpoint.answers["/version"] = 200, {"version": "0.32.0"}
    info = {"vllm_config": {"model_config": {"dtype": "torch.bfloat16"}}}
    endpoint.answers["/server_info?config_format=json"] = 200, info
    facts: tuple[dict[str, Any], ...] = ({}, {})
    assert attach(endpoint.url, {"calls": CALLS}, stated=facts[0]) == ""
    endpoint.busy_once.add(path)
    assert attach(endpoint.url, {"calls": CALLS}, stated=facts[1]) == ""
    assert facts[0]["engine"] == {"model_config.dtype": "torch.bfloat16"} and facts[0] == facts[1]


@pytest.mark.parametrize("path", ["/version", "/server_info?config_format=json"])
def test_a_server_that_is_away_while_its_facts_are_asked_is_not_one_without_facts(
    endpoint: Endpoint, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "BASE_BACKOFF_S", 0.001)
    endpoint.answers["/version"] = 200, {"version": "0.32.0"}
    endpoint.answers["/server_info?config_format=json"] = 200, {}

    def answer(asked: str, body: dict[str, Any]) -> tuple[int, Any]:
        if asked == path:
            endpoint.answers["/v1/models"] = endpoint.answers[path] = 503, {"detail": "starting"}
        return own(asked, body)

    own = endpoint.answer
    monkeypatch.setattr(endpoint, "answer", answer)
    server = Server(("127.0.0.1", 0), make_handler(answer))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    said = attach(f"http://127.0.0.1:{server.server_port}", {"calls": CALLS})
    server.shutdown()
    server.server_close()
    assert said.endswith("/v1/models: HTTP 503: starting (tried 3 times); expected the server that was there before")


def test_a_gateway_that_fails_at_paths_it_does_not_know_has_no_facts(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "BASE_BACKOFF_S", 0.001)
    for path in ("/v1/fingerprint", "/version"):
        endpoint.answers[path] = 502, {"detail": "no such route"}
    assert attach(endpoint.url, {"calls": CALLS}) == ""


def test_an_endpoint_without_scores_serves_evals_that_chat(endpoint: Endpoint) -> None:
    refusal = {"error": {"message": "echo is not supported"}}
    endpoint.answers["/v1/completions"] = 400, refusal
    assert attach(endpoint.url, {"calls": CALLS, "flows": TOOLS}) == ""
    said = attach(endpoint.url, {"calls": CALLS, "prose": PROSE})
    assert re.fullmatch(
        r"evals\.prose: perplexity needs the log-probabilities of given tokens \(/tokenize, and /v1/completions with "
        r"echo and logprobs\), got: http://.*/v1/completions: HTTP 400: echo is not supported; if the server "
        r"can't give that, serve candidates\.there\.engine with vLLM, or remove the eval",
        said,
    )


def test_an_endpoint_without_tokenize_is_told_before_any_case(endpoint: Endpoint) -> None:
    endpoint.answers["/tokenize"] = 404, {"detail": "Not Found"}
    assert "evals.choices: harness needs the log-probabilities" in attach(endpoint.url, {"choices": CHOICES})


def test_an_endpoint_that_can_not_chat_names_the_eval(endpoint: Endpoint) -> None:
    endpoint.answers["/v1/chat/completions"] = 400, {"message": "the model has no chat template"}
    assert attach(endpoint.url, {"prose": PROSE}) == ""
    said = attach(endpoint.url, {"prose": PROSE, "calls": CALLS})
    assert "evals.calls: tool_calls needs chat answers (/v1/chat/completions), got: " in said
    assert said.endswith(
        "HTTP 400: the model has no chat template; if the server can't give that, serve "
        "candidates.there.engine with a chat template, or remove the eval"
    )


def test_tools_are_asked_for_when_an_eval_sends_them(endpoint: Endpoint) -> None:
    assert attach(endpoint.url, {"calls": CALLS, "flows": TOOLS}) == ""
    chats = [body for path, body in endpoint.asked if path == "/v1/chat/completions"]
    assert ["tools" in body for body in chats[:3]] == [False, True, False]
    assert [body["max_tokens"] for body in chats] == [1, 1, 1, PROBE_TOKENS, PROBE_TOKENS]
    assert all(body["temperature"] == 0 for body in chats)
    endpoint.answers["/v1/chat/completions"] = 400, {"message": '"auto" tool choice requires --enable-auto-tool-choice'}
    said = attach(endpoint.url, {"flows": TOOLS})
    assert "evals.flows: trajectories needs chat answers to requests with tools" in said
    assert said.endswith("with automatic tool choice, set send_tools to false, or remove the eval")


def test_tools_that_cost_no_prompt_token_were_not_shown_to_the_model(endpoint: Endpoint) -> None:
    endpoint.shows_tools = False
    assert attach(endpoint.url, {"calls": CALLS}) == "", "it sends none"
    said = attach(endpoint.url, {"calls": CALLS, "flows": TOOLS})
    assert said.startswith("evals.flows: a request took 3 prompt tokens with a tool and without; ")
    assert said.endswith("use a template that shows them to the model, or set send_tools to false")


def test_a_server_that_counts_no_prompt_tokens_is_believed(endpoint: Endpoint) -> None:
    endpoint.answers["/v1/chat/completions"] = 200, CHAT | {"usage": {"prompt_tokens": 0, "completion_tokens": 1}}
    assert attach(endpoint.url, {"flows": TOOLS}) == ""


def test_a_server_that_samples_is_told_before_any_case(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    words = itertools.count()

    def speak(body: dict[str, Any]) -> dict[str, Any]:
        message = {"content": f"word {next(words)}"}
        return CHAT | {"choices": [{"message": message, "finish_reason": "length"}]}

    monkeypatch.setattr(endpoint, "chat", speak)
    said = attach(endpoint.url, {"prose": PROSE, "calls": CALLS})
    assert said == (
        "evals.calls: expected one answer to one request, got 'word 1', then 'word 2'; the server samples "
        "as if it ignored temperature 0, or others keep it busy: have it decode greedily, and to itself"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"usage": {"prompt_tokens": 3, "completion_tokens": 9}},
            "expected at most 1 completion tokens, as max_tokens asks, got 9; the server ignores max_tokens: use "
            "one that "
            "obeys it",
        ),
        (
            {"model": "other"},
            "expected an answer of model 'm', got one of 'other'; the server ignores which model is asked "
            "for: correct its name, or serve that model alone",
        ),
    ],
    ids=["max_tokens", "model"],
)
def test_a_field_that_was_ignored_is_named_with_the_request(
    endpoint: Endpoint, change: dict[str, Any], said: str
) -> None:
    endpoint.answers["/v1/chat/completions"] = 200, CHAT | change
    assert attach(endpoint.url, {"calls": CALLS}) == f"evals.calls: {endpoint.url}/v1/chat/completions: {said}"


@pytest.mark.parametrize(
    ("longest", "evals", "is_ready"),
    [
        (CONTEXT + 2, {"prose": PROSE}, True),
        (CONTEXT + 1, {"prose": PROSE}, False),
        (CONTEXT, {"calls": CALLS}, True),  # an answer fits into the context; only scores take two tokens more
        (CONTEXT - 1, {"calls": CALLS}, False),
        (None, {"prose": PROSE}, True),
    ],
    ids=["just-fits", "one-short", "just-fits-chat", "one-short-chat", "not-told"],
)
def test_a_context_longer_than_the_servers_is_refused_before_any_case(
    endpoint: Endpoint, longest: int | None, evals: dict[str, EvalSettings], is_ready: bool
) -> None:
    endpoint.model["max_model_len"] = longest
    said = attach(endpoint.url, evals)
    assert (said == "") is is_ready
    if not is_ready:
        assert longest is not None
        most = longest - 2 if "prose" in evals else longest
        assert endpoint.posted == []
        assert f"serving.context_length: expected at most {most}" in said
        assert f"max_model_len {longest}" in said and f"got {CONTEXT}" in said
        assert f"set it to {most}, or start the server with --max-model-len {CONTEXT + longest - most}" in said


def test_nothing_at_the_port_is_told_within_seconds_with_what_to_do() -> None:
    with socket.socket() as bound:  # bound, and listens to nobody
        bound.bind(("127.0.0.1", 0))
        start = time.monotonic()
        said = attach(f"http://127.0.0.1:{bound.getsockname()[1]}/v1", {"calls": CALLS})
    assert time.monotonic() - start < 2
    assert re.search(
        r"/v1/models: no connection: .*Connect call failed.*tried 2 times.; expected a running server of "
        r"the OpenAI API: start it, or correct candidates\.there\.engine\.base_url$",
        said,
    )


@pytest.mark.parametrize("path", ["/v1/models", "/tokenize", "/v1/completions", "/v1/chat/completions"])
def test_a_server_that_never_answers_is_told_after_two_timeouts(endpoint: Endpoint, path: str) -> None:
    endpoint.hangs_at = path
    start = time.monotonic()
    said = attach(endpoint.url, {"prose": PROSE, "calls": CALLS}, timeout_s=0.3)
    assert time.monotonic() - start < 2 * 0.3 + 0.3
    assert f"{path}: no answer within 0.3 s, which is resources.request_timeout_s (tried 2 times); " in said


def test_another_models_name_says_what_to_correct(endpoint: Endpoint) -> None:
    endpoint.model["id"] = "other"
    said = attach(endpoint.url, {"calls": CALLS})
    assert said.endswith("expected 'm' among the served models, got ['other']; correct candidates.there.engine.model")


def test_a_host_that_drops_connections_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "CONNECT_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as waiting:
        for _ in range(4):  # nobody accepts them, and then the system drops what else comes
            connection = waiting.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(full.getsockname())
        said = attach(f"http://127.0.0.1:{full.getsockname()[1]}", {"calls": CALLS})
    assert "/v1/models: no connection within 0.1 s (tried 2 times)" in said


PAGE = b"<html>\n  <body>" + b"not here " * 50
NONSENSE = {
    "models-a-page": ("/v1/models", PAGE, "/v1/models: expected JSON, got '<html> <body>not here"),
    "models-a-list": ("/v1/models", ["m"], """/v1/models: expected a list of models, got '["m"]'"""),
    "chat-a-page": ("/v1/chat/completions", PAGE, "/v1/chat/completions: expected JSON, got '<html> <body>not"),
    "chat-empty": ("/v1/chat/completions", b"", "/v1/chat/completions: expected JSON, got nothing"),
    "chat-another-api": (
        "/v1/chat/completions",
        {"hello": 1},
        """expected a chat completion with its usage, got '{"hello":1}'""",
    ),
    "chat-no-usage": (
        "/v1/chat/completions",
        {"choices": CHAT["choices"]},
        """with its usage, got '{"choices":[{"message":""",
    ),
    "scores-another-api": (
        "/v1/completions",
        {"hello": 1},
        """/v1/completions: expected echoed logprobs, got '{"hello":1}'""",
    ),
    "scores-of-none": ("/v1/completions", {"choices": []}, "expected echoed logprobs of each sequence (1 sent), got 0"),
    "scores-not-given": (
        "/v1/completions",
        {"choices": [{"index": 0, "text": "x", "logprobs": None}]},
        "expected echoed logprobs of 3 tokens, got 'null'",
    ),
    "scores-not-echoed": (
        "/v1/completions",
        {"choices": [{"index": 0, "logprobs": {"token_logprobs": [-1.0], "top_logprobs": [{"token_id:1": -1.0}]}}]},
        "expected echoed logprobs of 3 tokens, got those of 1",
    ),
    "scores-by-text": (
        "/v1/completions",
        {
            "choices": [
                {
                    "index": 0,
                    "logprobs": {"token_logprobs": [None, -1.0, -1.0], "top_logprobs": [None, {"a": 1}, {"b": 1}]},
                }
            ]
        },
        """expected echoed logprobs of 3 tokens, got '{"token_logprobs":[null,-1.0,-1.0]""",
    ),
    "scores-of-no-token": (
        "/v1/completions",
        {
            "choices": [
                {
                    "index": 0,
                    "logprobs": {
                        "token_logprobs": [None, -1.0, -1.0],
                        "top_logprobs": [None, {"token_id:99999999999": -1.0}, {"token_id:1": -1.0}],
                    },
                }
            ]
        },
        "expected echoed logprobs of 3 tokens, got ",
    ),
    "tokens-another-api": ("/tokenize", [[1]], "/tokenize: expected token ids for each text (1 sent), got '[[1]]'"),
}


@pytest.mark.parametrize(("path", "content", "said"), NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_is_shown_as_it_came(
    endpoint: Endpoint, path: str, content: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "BASE_BACKOFF_S", 0.001)
    endpoint.answers[path] = 200, content
    line = attach(endpoint.url, {"prose": PROSE, "calls": CALLS})
    assert said in line
    assert not re.search(r"Error|Exception|Traceback|not here " + "not here " * 12, line)


def test_a_port_that_speaks_another_language_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "BASE_BACKOFF_S", 0.001)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as connection:
                        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                        connection.recv(4096)

        threading.Thread(target=greet, daemon=True).start()
        said = attach(f"http://127.0.0.1:{server.getsockname()[1]}", {"calls": CALLS})
        server.shutdown(socket.SHUT_RDWR)
    assert "expected HTTP, got Bad status line: " in said and "b'SSH-2.0-OpenSSH_9.6'" in said
    assert "correct candidates.there.engine.base_url" in said
