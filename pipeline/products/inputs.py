"""What each stage's result depends on beside the files that dvc.yaml names: digests, by stage and product or candidate.

Stage `env` writes them to build/env/inputs.json, where DVC watches a key a stage: settings that can change the result,
checkpoints, cases and other files, and the code. A name says what changed; the settings themselves would stand in
dvc.lock once for each candidate. A checkpoint is no dependency in dvc.yaml: a pinned model is no path of the project,
and DVC would read a large folder once more.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.errors import EvidenceError
from pipeline.gate.loosening import digest_serving
from pipeline.product import Watched
from pipeline.products import KINDS
from pipeline.products.params import Params
from pipeline.records.digests import digest_text
from pipeline.running.kept_digests import digest_code_once, digest_watched
from pipeline.settings.base import RELEASE, Product
from pipeline.settings.hub_names import parse_pinned

WARNED = "QUANTGATE_WARNED"  # a variable of a process whose user has read the warnings of stage `env` already
WORKS = "QUANTGATE_WORKS"  # a variable of stage `env` where whoever starts it then makes here what is out of date
Digests = dict[str, dict[str, dict[str, str]]]  # stage -> candidate or product -> what -> digest


def digest_inputs(params: Params, root: Path) -> Digests:
    """Return the digests of every stage's inputs.

    Args:
        params: the whole file.
        root: of the project.
    """
    digests: Digests = {}
    listed = [(product.kind, _list_inputs(product, root)) for product in params.products.values()]
    code = digest_code_once({(stage, kind) for kind, stages in listed for stage in stages}, root=root)
    for kind, stages in listed:
        for stage, keyed in stages.items():
            for key, watched in keyed.items():
                # order counts: the prompts of the first eval are measured, the first tolerance is the headline
                settings = {what: digest_text(json.dumps(value)) for what, value in watched.items()}
                # no kind's word for its code takes the place of what was read
                digests.setdefault(stage, {})[key] = settings | {"code": code[stage, kind]}
    return digests


def digest_references(products: Iterable[Product], root: Path) -> dict[str, str]:
    """Return the digest of the weights of each product's reference, where a release pins it, by product.

    That of a folder: a model of a hub is known by its name alone before it is evaluated, and one that a step changes by
    what the step makes.
    """
    references = {product.name: product.candidates[product.reference] for product in _list_pinned(products, root)}
    return {
        name: digest_watched(own.checkpoint, root)
        for name, own in references.items()
        if not own.steps and not parse_pinned(own.checkpoint)
    }


def digest_servings(products: Iterable[Product], root: Path) -> dict[str, str]:
    """Return the digest of how each product's reference is run, by product, where a release pins it and it is made.

    What was made of other weights says nothing: how those were run may follow from their format.
    """
    digests = {}
    for product in _list_pinned(products, root):
        with contextlib.suppress(EvidenceError):  # not made yet, or with other steps: the gate tells then
            auditor = KINDS[product.kind].get_auditor()
            reference = auditor.read_candidate(root / product.build, product.reference, product)
            made = reference.checkpoint
            weights = digest_watched(product.candidates[product.reference].checkpoint, root)
            if weights in (made.digest, made.parent_digest, made.path):  # the last of a hub
                digests[product.name] = digest_serving(reference.serving)
    return digests


def _list_pinned(products: Iterable[Product], root: Path) -> list[Product]:
    """Return the products of which a release pins what candidates are judged by."""
    return [product for product in products if (root / RELEASE / product.name).is_dir()]


def _list_inputs(product: Product, root: Path) -> dict[str, dict[str, Watched]]:
    """Return what a product's stages depend on: by stage, and by candidate or the product's name."""
    inputs = KINDS[product.kind].list_inputs(product, root)
    references = {candidate.checkpoint for candidate in product.candidates.values()}  # most share one
    weights = {reference: digest_watched(reference, root) for reference in references}
    judged = {"settings": _list_judged(product)}
    return {
        "optimize": {
            name: watched | {"weights": weights[product.candidates[name].checkpoint]}
            for name, watched in inputs.optimize.items()
        },
        "evaluate": dict(inputs.evaluate),
        "benchmark": {product.name: inputs.benchmark},
        "compare": {product.name: judged},
        "track": {product.name: {}},
        "gate": {product.name: judged},
        "release": {product.name: judged},
    }


def _list_judged(product: Product) -> dict[str, Any]:
    """Return the settings that a verdict rests on: all but how much of the machine is taken."""
    return product.model_dump(mode="json", exclude={"resources"})
