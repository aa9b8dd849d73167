"""Is a live endpoint still what was evaluated? For a nightly job, beside the server.

    python scripts/check_drift.py CANDIDATE --base-url http://127.0.0.1:8000 [--model NAME] [--cases 100]

Asks the endpoint the first turn of cases of the candidate's last evaluation again and compares the answers;
where the server offers a fingerprint, that is compared too. Ends with 0 when nothing differs, with 1 when
something does or nothing could be asked, and says what, and which facts could be compared. As many changed answers
as the evaluation's canary saw from run to run of one server are no drift: in reduced precision the batch alone can
flip a near tie. `--max-changed` sets another number.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.errors import SettingsError  # noqa: E402
from pipeline.products.params import find_owner, load_params  # noqa: E402
from pipeline.products.text.drift import CONCURRENCY, Comparison, Drift, check_drift  # noqa: E402
from pipeline.products.text.problems import find_address_problems  # noqa: E402
from pipeline.products.text.serving.addresses import strip_address  # noqa: E402
from pipeline.products.text.serving.client import Client  # noqa: E402
from pipeline.products.text.serving.engines.openai import read_key  # noqa: E402
from pipeline.products.text.serving_config import read_candidate  # noqa: E402
from pipeline.products.text.settings import OpenaiEngine, TextProduct  # noqa: E402
from stages.cli import run_stage  # noqa: E402

MAX_SHOWN = 5


def main(argv: list[str]) -> int:
    """Check one endpoint; return 1 on drift."""
    options = _parse(argv)
    product = find_owner(load_params(), options.candidate, kind=TextProduct)
    _check_options(options)
    drift = asyncio.run(_check(options, product))
    tolerated = drift.num_explained if options.max_changed is None else options.max_changed
    print(_describe(options.candidate, drift, tolerated, is_asked=options.max_changed is not None))
    return 1 if drift.fingerprint.differences or len(drift.changed) > tolerated else 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="check_drift", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("candidate")
    parser.add_argument("--base-url", help="of the endpoint; else that of the candidate's engine")
    parser.add_argument("--model", help="the name it serves; else the engine's, or the candidate's")
    parser.add_argument("--cases", type=int, default=100, help="of each eval that chats (100)")
    parser.add_argument("--max-changed", type=int, help="answers that may differ; else what the floor explains")
    return parser.parse_args(argv)


def _check_options(options: argparse.Namespace) -> None:
    for name, least in (("cases", 1), ("max_changed", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise SettingsError(f"--{name.replace('_', '-')}: expected {least} or more, got {value}")
    for problem in find_address_problems(options.base_url) if options.base_url is not None else ():
        raise SettingsError(f"--{problem.replace('base_url', 'base-url')}")


async def _check(options: argparse.Namespace, product: TextProduct) -> Drift:
    engine = product.candidates[options.candidate].engine
    url, model = (engine.base_url, engine.model) if isinstance(engine, OpenaiEngine) else (None, options.candidate)
    url, model = options.base_url or url, options.model or model
    if url is None:
        raise SettingsError(f"candidates.{options.candidate}.engine has no address in params.yaml: give --base-url")
    candidate = read_candidate(product.build, options.candidate, product)
    async with Client(
        [strip_address(url)],
        model,
        concurrency=CONCURRENCY,
        max_refusals=2,
        timeout_s=product.resources.request_timeout_s,
        api_key=read_key(candidate),
    ) as client:
        return await check_drift(candidate, product, client, root=Path(), num_cases=options.cases)


def _describe(name: str, drift: Drift, tolerated: int, *, is_asked: bool) -> str:
    counts = Counter(changed.kind for changed in drift.changed)
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))
    allowed = f"up to {tolerated} differences are {'tolerated' if is_asked else 'within the floor'}"
    lines = [
        f"{name}: {len(drift.changed)} of {drift.num_asked} answers changed{f' ({kinds})' if kinds else ''}, "
        f"{allowed if tolerated else 'no difference is tolerated'}; "
        f"fingerprint: {_describe_fingerprint(drift.fingerprint)}"
    ]
    lines += [f"  {difference}" for difference in drift.fingerprint.differences[:MAX_SHOWN]]
    if (more := len(drift.fingerprint.differences) - MAX_SHOWN) > 0:
        lines.append(f"  and {more} more")
    for changed in drift.changed[:MAX_SHOWN]:
        lines += [
            f"  {changed.eval_name} {changed.case_id!r}: {changed.kind}",
            f"    evaluated {changed.recorded[:200]!r}",
            f"    now       {changed.answered[:200]!r}",
        ]
    return "\n".join(lines)


def _describe_fingerprint(found: Comparison) -> str:
    """Say what came of comparing what the server says it is, and how much of it could be compared."""
    compared = ", ".join(found.compared)
    if not compared and not found.differences:
        return "it tells none, so its behaviour is all there is"
    came = "differs" if found.differences else "agrees" if found.is_whole else "no difference found"
    by = " by what each reply carries" if found.is_echoed else ""
    missing = f"; could not be compared: {', '.join(found.missing)}" if found.missing else ""
    return f"{came} (compared{by}: {compared or 'nothing'}{missing})"


if __name__ == "__main__":
    run_stage("check_drift", main)
