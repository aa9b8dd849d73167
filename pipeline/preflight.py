"""Check params.yaml against the files it names, before any work: the second half of validation.

`params.py` sees params.yaml alone; this sees the layers of each checkpoint, the buckets of each
evalset and of the calibration texts. It reads headers and cards only, so it costs milliseconds.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import QuantgateError, SettingsError
from pipeline.evalsets import CASES_FILE, Card, load_card
from pipeline.optimize.layers import plan_folder
from pipeline.params import CandidateSettings, EvalSettings, HarnessEval, Params

_CARD_KINDS = {"perplexity": "documents", "tool_calls": "tool_calls", "trajectories": "trajectories"}


def check_project(params: Params, root: Path) -> None:
    """Refuse settings that the named files contradict.

    Raises:
        SettingsError: with the path of the key, what it names, and what there is.
    """
    calibration = _read_card(root / params.calibration_texts, "calibration_texts", "documents")
    for name, candidate in params.candidates.items():
        _check_candidate(f"candidates.{name}", candidate, calibration, root)
    cards = {name: _check_eval(f"evals.{name}", settings, root) for name, settings in params.evals.items()}
    for metric, tolerance in params.gate.tolerances.items():
        card = cards[metric.split("/")[0]]
        for bucket in tolerance.buckets:
            if card is not None and bucket not in card.buckets:
                raise SettingsError(f"gate.tolerances.{metric}.buckets.{bucket}: evalset {card.name!r} has no such "
                                    f"bucket; it has {', '.join(card.buckets) or 'none'}")  # fmt: skip


def _check_candidate(where: str, candidate: CandidateSettings, calibration: Card, root: Path) -> None:
    folder = root / candidate.checkpoint
    if not folder.is_dir():
        raise SettingsError(f"{where}.checkpoint: expected a checkpoint folder, found none at {str(folder)!r}")
    for i, step in enumerate(candidate.steps):
        at = f"{where}.steps.{i}"
        for source in step.calibration.sources:
            if source not in calibration.buckets:
                raise SettingsError(f"{at}.calibration.sources: {source!r} is no bucket of the calibration texts; "
                                    f"they have {', '.join(calibration.buckets) or 'none'}")  # fmt: skip
        try:
            plan_folder(folder, step)
        except QuantgateError as error:
            raise SettingsError(f"{at}: {error}") from None


def _check_eval(where: str, settings: EvalSettings, root: Path) -> Card | None:
    if not isinstance(settings, HarnessEval):
        return _read_card(root / settings.evalset, f"{where}.evalset", _CARD_KINDS[settings.kind])
    if settings.include_path is None:
        return None
    folder = root / settings.include_path
    if not folder.is_dir():
        raise SettingsError(f"{where}.include_path: expected a folder with task YAML, found none at {str(folder)!r}")
    return load_card(folder) if (folder / "card.yaml").is_file() else None


def _read_card(folder: Path, where: str, kind: str) -> Card:
    if not (folder / CASES_FILE).is_file():
        raise SettingsError(f"{where}: expected an evalset folder with card.yaml and {CASES_FILE}, got {str(folder)!r}")
    card = load_card(folder)
    if card.kind != kind:
        raise SettingsError(f"{where}: expected an evalset of kind {kind!r}, {card.name!r} is of kind {card.kind!r}")
    return card
