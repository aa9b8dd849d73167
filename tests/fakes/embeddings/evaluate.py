"""Let each query of an eval look for its passage among those of all cases, and write the evaluation folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.evalsets.cards import Evalset, load_evalset
from pipeline.products.embeddings.encoder import encode, load_projection
from pipeline.products.embeddings.serving import EmbeddingCandidate
from pipeline.products.embeddings.settings import EmbeddingsProduct
from pipeline.records.digests import digest_json
from pipeline.records.evaluations import CaseRecord, Evaluation
from pipeline.records.record_files import write_cases
from pipeline.running.evaluation_folder import make_evaluation
from pipeline.running.stage_code import digest_code

_NUM_LISTED = 10  # passages of each query, the nearest first


def evaluate_embeddings(
    candidate: EmbeddingCandidate, product: EmbeddingsProduct, *, root: Path, build: Path
) -> Evaluation:
    """Evaluate one candidate and write `evaluations/<name>/` under `build`."""
    projection = load_projection(root / candidate.checkpoint.path)[:, : candidate.serving.num_dimensions]
    files = {}
    with make_evaluation(candidate, build) as working:
        for name, settings in product.evals.items():
            evalset = load_evalset(root / settings.evalset)
            key = digest_json([settings.model_dump(), evalset.digest, digest_code("evaluate", product.kind)])
            records = judge_cases(evalset, projection, candidate.fingerprint)
            write_cases(working.path / f"{name}.jsonl", records)
            files[name] = working.build_eval_file(name, settings, evalset, key=key)
        return working.finish(files, candidate.facts, proof="loaded and run by the process that judged")


def judge_cases(evalset: Evalset, projection: NDArray[np.float32], fingerprint: str) -> list[CaseRecord]:
    """Return a record of each case: the passages that its query finds, and whether its own is among them."""
    cases = evalset.cases
    passages = encode([case.passage for case in cases], projection)
    similarities = encode([case.query for case in cases], projection) @ passages.T
    nearest = np.argsort(-similarities, axis=1, kind="stable")[:, :_NUM_LISTED]
    return [
        CaseRecord(
            case_id=case.id,
            input_digest=case.digest,
            cluster=case.cluster,
            buckets=case.buckets,
            prompt=case.query,
            output="\n".join(cases[j].passage for j in row),
            scores={f"hit_{k}": float(i in row[:k]) for k in (1, _NUM_LISTED)},
            fingerprint=fingerprint,
        )
        for i, (case, row) in enumerate(zip(cases, nearest, strict=True))
    ]
