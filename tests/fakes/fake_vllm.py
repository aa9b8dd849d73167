"""Stands in for `vllm serve`: `python tests/fakes/fake_vllm.py serve --config FILE --port N`.

Speaks what quantgate asks of vLLM (models, version, resolved configuration, chat, tokenise, score), says
"FAKE_VLLM" variables' bidding when it is to go wrong, and starts a child, as vLLM does, that must not outlive it.
Tests that need a server of vLLM's kind in their own process take its parts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

Answer = Callable[[str, dict[str, Any]], tuple[int, Any]]  # of a path and a body: status and content

VERSION = "0.32.0"
TOKENS = [5, 6, 1]
# as an engine in the middle of a step: only SIGKILL ends it
IGNORES_TERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def resolve(config: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of /server_info, as far as quantgate reads it."""
    speculative = config.get("speculative-config")
    return {
        "vllm_config": {
            "model_config": {"dtype": os.environ.get("FAKE_VLLM_DTYPE", f"torch.{config['dtype']}"), "seed": 0},
            "cache_config": {"block_size": 128},
            "device_config": {"device": "cpu"},
            "parallel_config": {
                "tensor_parallel_size": int(os.environ.get("FAKE_VLLM_TP", config.get("tensor-parallel-size", 1)))
            },
            "speculative_config": speculative
            and {key: speculative[key] for key in ("num_speculative_tokens", "method")},
        },
        "system_env": {},
    }


def count_drafts(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the metrics of one answer of three tokens: one from the prompt, one step that accepts one draft."""
    if "speculative-config" not in config:
        return None
    k = config["speculative-config"]["num_speculative_tokens"]
    return {
        "speculative_decoding": {
            "acceptance_histogram": [0, 1] + [0] * (k - 1),
            "num_spec_steps": 1,
            "num_accepted_draft_tokens": 1,
            "num_draft_tokens": k,
            "num_spec_tokens": k,
        }
    }


def answer(path: str, body: dict[str, Any], config: dict[str, Any]) -> Any:
    """Return the JSON of one answer."""
    name = config["served-model-name"][0]
    if path == "/v1/models":
        return {"data": [{"id": name, "max_model_len": config["max-model-len"]}]}
    if path == "/version":
        return {"version": VERSION + "+cpu"}
    if path.startswith("/server_info"):
        return resolve(config)
    if path == "/collective_rpc":
        return {"results": [report_kernels(config)] * config.get("tensor-parallel-size", 1)}
    if path == "/tokenize":
        return {"tokens": [3, 4]}
    if path == "/v1/completions":
        return {"model": name, **score(body)}
    tokens = TOKENS[: body["max_tokens"]]
    return {
        "model": name,
        "system_fingerprint": config["fingerprint-value"],
        "prompt_token_ids": [3, 4],
        "choices": [{"message": {"content": "{}"}, "finish_reason": "stop", "token_ids": tokens}],
        "metrics": count_drafts(config) if tokens == TOKENS else None,
        "usage": {"prompt_tokens": 2, "completion_tokens": len(tokens)},
    }


def report_kernels(config: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return what the worker's extension says: it must be importable by the name in the configuration."""
    module, _, name = config["worker-extension-cls"].rpartition(".")
    assert callable(getattr(importlib.import_module(module), name).report_kernels)
    return {"QKVParallelLinear": {"CompressedTensorsWNA16 MacheteLinearKernel": 2}}


def score(body: dict[str, Any]) -> dict[str, Any]:
    """Answer a score request as vLLM does: all given tokens are equally likely."""
    rows = [{f"token_id:{t}": -1.0 - t for t in range(body["logprobs"])}]
    return {
        "choices": [
            {
                "index": i,
                "logprobs": {
                    "token_logprobs": [None] + [-1.0] * (len(ids) - 1),
                    "top_logprobs": [None] + rows * (len(ids) - 1),
                },
            }
            for i, ids in enumerate(body["prompt"])
        ]
    }


def make_handler(answer: Answer) -> type[BaseHTTPRequestHandler]:
    """Return a handler that answers with what `answer` says to a path and a JSON body: bytes as they are, else JSON."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
            status, value = answer(self.path, body)
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            with contextlib.suppress(ConnectionError):  # whoever asked has left
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def serve(config: dict[str, Any], port: int) -> None:
    """Answer until the process is told to end."""

    def reply(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/tokenize" and isinstance(body["prompt"], list):  # it takes one text
            return 400, {"error": "one text"}
        if path == "/v1/fingerprint":  # quantgate's own
            return 404, {"detail": "Not Found"}
        return 200, answer(path, body, config)

    ThreadingHTTPServer(("127.0.0.1", port), make_handler(reply)).serve_forever()


def main() -> None:
    """Read the configuration and serve, or go wrong."""
    parser = argparse.ArgumentParser(prog="vllm")
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    config = YAML(typ="safe").load(options.config.read_text())
    if "FAKE_VLLM_CHILD" in os.environ:
        child = subprocess.Popen([sys.executable, "-c", IGNORES_TERM], start_new_session=True)
        Path(os.environ["FAKE_VLLM_CHILD"]).write_text(str(child.pid))
    if "FAKE_VLLM_BREAKS" in os.environ:
        print(
            "(EngineCore pid=7) ERROR 11-21 15:12:22 [core.py:88] ValueError: no kernel for int4 in float32",
            file=sys.stderr,
        )
        sys.exit("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}")
    if "FAKE_VLLM_SLEEPS" in os.environ:
        time.sleep(600)
    serve(config, options.port)


if __name__ == "__main__":
    main()
