"""Did the engine run the numbers that were asked for? A mark on the verdict, and a refusal of a release where not.

The embedded engine imitates inputs and caches of few bits in a wider type, and says so itself. vLLM may fall back to a
kernel that leaves inputs as they are, which flatters a result: NVFP4 runs so on a GPU that can't multiply FP4.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.gate.audits import CandidateFindings
from pipeline.gate.pairing import Evidence
from pipeline.products.text.settings import TextProduct

# in the names of vLLM's kernels that leave inputs as they are, or compute in a wider type
_WEIGHTS_ALONE = ("Marlin", "Machete", "Emulat", "Dequant")
# in the names of vLLM's schemes: the first is for weights alone, and the second stands in for FP8 inputs on older GPUs
_FOR_WEIGHTS, _FALLBACK = "A16", "W8A16Fp8"


def judge_imitation(findings: CandidateFindings, evidence: Evidence, product: TextProduct) -> None:
    """Mark a candidate whose numbers its engine did not run as asked, or may not have; a release needs a reason."""
    name = evidence.candidate.name
    if problem := find_imitation(evidence):
        findings.judge_emulation(problem, name, product, remedy="serve it where they run")
    elif doubt := _find_doubt(evidence):
        findings.judge_emulation(doubt[0], name, product, remedy=doubt[1])


def find_imitation(evidence: Evidence) -> str | None:
    """Say which numbers the engine imitated or left out, by what it said of itself; None: none."""
    engine, serving = evidence.evaluation.served_by.get("engine", {}), evidence.candidate.serving
    if imitated := engine.get("imitated"):
        shown = ", ".join(f"{name} of {count} layers" for name, count in imitated.items())
        return f"it rests on emulation: the engine imitates {shown} in {serving.dtype}"
    rounded = [name for name in evidence.candidate.checkpoint.rounded if name.endswith("inputs")]
    if rounded and (kernels := sorted(set(_list_weight_kernels(engine.get("kernels") or {})))):
        return (
            f"it fell back: {serving.engine} left inputs as they are, where the checkpoint asks for "
            f"{' and '.join(rounded)}: it dispatched {', '.join(kernels)}"
        )
    return None


def describe_left_out(evidence: Evidence, who: str = "it") -> str | None:
    """Say which settings of the model its engine did not apply, by what it said of itself; None: none.

    Args:
        evidence: of either side.
        who: that is, as the sentence has it.
    """
    engine = evidence.evaluation.served_by.get("engine", {})
    if not (left_out := engine.get("left_out")):
        return None
    shown = ", ".join(f"{name} {value:g}" for name, value in left_out.items())
    return (
        f"{who} was evaluated without {shown} of its config.json, which the embedded engine leaves out, as "
        "transformers does by default; where the engine that ships applies it, as vLLM does, name that one"
    )


def _find_doubt(evidence: Evidence) -> tuple[str, str] | None:
    """Say what nobody knows of how numbers ran, and what would tell."""
    rounded, engine = evidence.candidate.checkpoint.rounded, evidence.evaluation.served_by.get("engine", {})
    if evidence.candidate.serving.engine == "transformers":
        return None
    inputs = [name for name in rounded if name.endswith("inputs")]
    if inputs and not engine.get("kernels"):
        doubt = f"whether {' and '.join(inputs)} ran as asked is not known: the engine did not say which kernels it "
        return f"{doubt}dispatched", "set engine.report_kernels, which an engine that quantgate starts can have"
    cached = [name for name in rounded if not name.endswith("inputs")]
    if cached and not _stores_floats(engine):
        doubt = (
            f"whether {' and '.join(cached)} were stored so is not known: the engine did not say that its cache holds "
        )
        return f"{doubt}floats of eight bits", "set kv-cache-dtype: fp8 in engine.options, or engine.report_kernels"
    return None


def _stores_floats(engine: Mapping[str, Any]) -> bool:
    """Whether an engine says that its cache holds floats of eight bits."""
    said = (f"{key}={value}" for key, value in _flatten(engine))  # the name of a kernel has what its layers store
    return any(re.search(r"cache_dtype=\S*fp8", one) for one in said)


def _flatten(facts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flatten(value)
        else:
            yield str(key), value


def _list_weight_kernels(kernels: Mapping[str, Any]) -> list[str]:
    """Return the kernels for weights alone, of schemes that round inputs, in a report of vLLM's workers.

    Args:
        kernels: by class of layer, "scheme kernel ..." -> number of layers; or such a report by worker.
    """
    found = []
    for name, value in kernels.items():
        scheme, _, rest = name.partition(" ")
        if isinstance(value, Mapping):
            found += _list_weight_kernels(value)
        elif _FALLBACK in scheme or (_FOR_WEIGHTS not in scheme and any(word in rest for word in _WEIGHTS_ALONE)):
            found.append(name)
    return found
