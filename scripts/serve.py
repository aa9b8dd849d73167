"""Serve a built candidate on the path that was evaluated: the same engine, environment variables and drafts.

    python scripts/serve.py CANDIDATE [--port 8000] [--host 127.0.0.1]

Prints the base URL once the server has answered what the evals ask, and serves until Ctrl-C; logs go to
`build/PRODUCT/logs/CANDIDATE/served`. One server, however many the evaluation used: their number changes no answer.
What somebody else serves (engine openai) is not started.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.errors import SettingsError  # noqa: E402
from pipeline.products.params import find_owner, load_params  # noqa: E402
from pipeline.products.text.serving.engines.registry import start_engine  # noqa: E402
from pipeline.products.text.serving_config import read_candidate  # noqa: E402
from pipeline.products.text.settings import OpenaiEngine, TextProduct  # noqa: E402
from stages.cli import run_stage  # noqa: E402

WATCH_S = 1.0  # between two looks at whether the server still runs


def main(argv: list[str]) -> int:
    """Serve one candidate; return 0 on Ctrl-C."""
    options = _parse(argv)
    product = find_owner(load_params(), options.candidate, kind=TextProduct)
    engine = product.candidates[options.candidate].engine
    if isinstance(engine, OpenaiEngine):
        raise SettingsError(
            f"candidates.{options.candidate}.engine: expected one that quantgate starts (transformers, "
            f"vllm), got openai, which somebody else serves at {engine.base_url}; start it there"
        )
    if options.port is not None and not 1 <= options.port <= 65535:
        raise SettingsError(f"--port: expected 1 to 65535, got {options.port}; leave it out for a free one")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(options, product))
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="serve", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("candidate")
    parser.add_argument("--port", type=int, help="else a free one")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (127.0.0.1)")
    return parser.parse_args(argv)


async def _serve(options: argparse.Namespace, product: TextProduct) -> None:
    candidate = read_candidate(product.build, options.candidate, product)
    resources = product.resources.model_copy(update={"num_servers": 1})
    starting = start_engine(
        candidate,
        resources,
        evals=product.evals,
        root=Path(),
        logs=product.build / "logs" / candidate.name / "served",
        host=options.host,
        port=options.port,
    )
    async with starting as (engine, _):
        print(
            f"{engine.base_urls[0]} serves {candidate.name}, fingerprint {engine.fingerprint[:12]}; Ctrl-C ends it",
            flush=True,
        )
        while True:
            engine.check_alive()
            await asyncio.sleep(WATCH_S)


if __name__ == "__main__":
    run_stage("serve", main)
