"""Evaluate a candidate, and stop as soon as harm beyond a tolerance is proven: `python scripts/screen.py CANDIDATE`.

For products of kind `text`. The reference must be evaluated and the candidate built before. Cases of the evals that
chat are asked in a random order and paired with the reference's as they finish (`pipeline/gate/harm_stop.py`). Ends
with 20 when harm is proven: a pass is not to be had, so the rest need not be asked. Otherwise with 0, and the finished
evaluation is what `dvc repro` takes over: nothing is asked twice. Either way finished cases stay in the journal.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import uvloop

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.errors import EvidenceError, HarmFound, SettingsError  # noqa: E402
from pipeline.evalsets.cards import load_evalset  # noqa: E402
from pipeline.gate.harm_stop import HarmWatch  # noqa: E402
from pipeline.gate.pairing import Evidence, load_evidence  # noqa: E402
from pipeline.products.params import find_owner, load_params  # noqa: E402
from pipeline.products.text.evals.evaluate import evaluate_candidate  # noqa: E402
from pipeline.products.text.serving.failures import find_error  # noqa: E402
from pipeline.products.text.serving_config import read_candidate  # noqa: E402
from pipeline.products.text.settings import ChatEval, TextProduct  # noqa: E402
from pipeline.settings.metrics import MetricDefinition  # noqa: E402
from stages.cli import read_name, run_stage  # noqa: E402

HARM = 20  # exit code


def main(argv: list[str]) -> int:
    """Evaluate the candidate named on the command line; return 20 when harm was proven."""
    name = read_name(argv, "candidate")
    product = find_owner(load_params(), name, kind=TextProduct)
    candidate = read_candidate(product.build, name, product)
    if candidate.name == product.reference:
        raise SettingsError(f"expected a candidate to screen, got the reference {candidate.name!r}")
    start, watches = time.monotonic(), make_watches(product)
    try:
        uvloop.run(evaluate_candidate(candidate, product, root=Path(), build=product.build, watches=watches))
    except HarmFound as found:
        print(f"{candidate.name}: stopped after {time.monotonic() - start:.0f} s: {found}")
        return HARM
    except ExceptionGroup as group:
        if (unfit := find_error(group, EvidenceError)) is None:
            raise
        raise unfit from None
    print(f"{candidate.name}: no harm beyond a tolerance was proven; `dvc repro` judges it with all cases")
    return 0


def make_watches(product: TextProduct) -> dict[str, HarmWatch]:
    """Return a watch for each eval that chats, against the reference's records.

    Raises:
        EvidenceError: the reference was not evaluated, its records are not fit, or an evalset was edited since.
    """
    reference = read_candidate(product.build, product.reference, product)
    evidence = load_evidence(product.build, reference, product.evals)
    watched = {name: list(_list_watched(product, name)) for name in product.chat_evals if name in evidence.records}
    for name in watched:
        _check_same_cases(name, product.chat_evals[name], evidence)
    num_metrics = sum(map(len, watched.values()))
    return {
        name: HarmWatch(evidence.records[name], metrics, alpha=product.gate.alpha, num_metrics=num_metrics)
        for name, metrics in watched.items()
        if metrics
    }


def _check_same_cases(name: str, settings: ChatEval, evidence: Evidence) -> None:
    asked, own = evidence.evaluation.evals[name].evalset_digest, load_evalset(Path(settings.evalset)).digest
    if asked != own:
        raise EvidenceError(
            f"{name}: expected {settings.evalset} as the reference was asked it ({asked[:12]}), found "
            f"another one ({own[:12]}); evaluate the reference anew with `dvc repro`"
        )


def _list_watched(product: TextProduct, eval_name: str) -> list[tuple[str, MetricDefinition, float]]:
    """Return the rates of an eval that can stop a release, with their tolerances."""
    found = []
    for definition in product.evals[eval_name].metrics:
        tolerance = product.gate.tolerances.get(name := f"{eval_name}/{definition.name}")
        if (
            tolerance
            and tolerance.overall is not None
            and tolerance.tier != "advisory"
            and (definition.estimator == "proportion")
        ):
            found.append((name, definition, tolerance.overall))
    return found


if __name__ == "__main__":
    run_stage("screen", main)
