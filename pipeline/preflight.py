"""Check params.yaml against the files it names, before any work: the second half of validation.

`params.py` sees params.yaml alone; this sees the layers of each checkpoint, every case of each evalset
and of the calibration texts. Of weights it reads headers only, so it costs a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from pipeline.cases import check_distinct
from pipeline.drafts import check_draft
from pipeline.errors import QuantgateError, SettingsError
from pipeline.evalsets import CARD_FILE, CASES_FILE, Card, Evalset, load_evalset
from pipeline.optimize.layers import plan_folder
from pipeline.params import Calibration, CandidateSettings, EvalSettings, HarnessEval, Params, SpeculativeStep, Step

Load = Callable[[Path], Evalset]

_CARD_KINDS = {"perplexity": "documents", "tool_calls": "tool_calls", "trajectories": "trajectories"}


def check_project(params: Params, root: Path) -> None:
    """Refuse settings that the named files contradict.

    Raises:
        SettingsError: with the path of the key, what it names, and what there is.
        EvalsetError: with file and line, what `load_evalset` refuses.
    """
    load = cache(load_evalset)  # two evals may name one folder
    texts = _load_kind(load, root / params.optimize.calibration_texts, "optimize.calibration_texts", "documents")
    for name, candidate in params.candidates.items():
        _check_candidate(f"candidates.{name}", candidate, texts.card, root)
    evalsets = {name: _check_eval(load, f"evals.{name}", settings, root) for name, settings in params.evals.items()}
    for metric, tolerance in params.gate.tolerances.items():
        evalset = evalsets[metric.split("/")[0]]
        for bucket in tolerance.buckets:
            if evalset is not None and bucket not in evalset.card.buckets:
                raise SettingsError(f"gate.tolerances.{metric}.buckets.{bucket}: evalset {evalset.card.name!r} has no "
                                    f"such bucket; it has {', '.join(evalset.card.buckets) or 'none'}")  # fmt: skip


def _check_candidate(where: str, candidate: CandidateSettings, calibration: Card, root: Path) -> None:
    folder = root / candidate.checkpoint
    if not folder.is_dir():
        raise SettingsError(f"{where}.checkpoint: expected a checkpoint folder, found none at {str(folder)!r}")
    for i, step in enumerate(candidate.steps):
        at = f"{where}.steps.{i}"
        if not isinstance(step, SpeculativeStep):
            _check_sources(f"{at}.calibration.sources", step.calibration, calibration)
        try:
            _check_folders(step, folder, root)
        except QuantgateError as error:
            raise SettingsError(f"{at}: {error}") from None


def _check_sources(where: str, asked: Calibration, calibration: Card) -> None:
    for source in asked.sources:
        if source not in calibration.buckets:
            raise SettingsError(f"{where}: {source!r} is no bucket of the calibration texts; "
                                f"they have {', '.join(calibration.buckets) or 'none'}")  # fmt: skip


def _check_folders(step: Step, folder: Path, root: Path) -> None:
    if not isinstance(step, SpeculativeStep):
        plan_folder(folder, step)
    elif step.draft is not None:
        check_draft(root / step.draft, target=folder)


def _check_eval(load: Load, where: str, settings: EvalSettings, root: Path) -> Evalset | None:
    evalset = _load_eval(load, where, settings, root)
    if evalset is not None:
        folder = settings.include_path if isinstance(settings, HarnessEval) else settings.evalset
        check_distinct(root / str(folder) / CASES_FILE, evalset.cases)
    return evalset


def _load_eval(load: Load, where: str, settings: EvalSettings, root: Path) -> Evalset | None:
    if not isinstance(settings, HarnessEval):
        return _load_kind(load, root / settings.evalset, f"{where}.evalset", _CARD_KINDS[settings.kind])
    if settings.include_path is None:
        return None
    folder = root / settings.include_path
    if not folder.is_dir():
        raise SettingsError(f"{where}.include_path: expected a folder with task YAML, found none at {str(folder)!r}")
    return load(folder) if (folder / CARD_FILE).is_file() else None


def _load_kind(load: Load, folder: Path, where: str, kind: str) -> Evalset:
    if not (folder / CASES_FILE).is_file():
        raise SettingsError(f"{where}: expected an evalset folder with card.yaml and {CASES_FILE}, got {str(folder)!r}")
    evalset = load(folder)
    card = evalset.card
    if card.kind != kind:
        raise SettingsError(f"{where}: expected an evalset of kind {kind!r}, {card.name!r} is of kind {card.kind!r}")
    return evalset
