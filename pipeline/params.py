"""params.yaml as a typed, strict, frozen object: the only validator of user settings.

Every stage calls `load_params` first, so whichever runs first validates the whole file: unknown
keys, wrong types and impossible combinations are refused with the path of the key. Checks that
need a file beside params.yaml (layer shapes, an evalset's buckets) are in `preflight.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from ruamel.yaml.error import YAMLError

from pipeline.errors import SettingsError, describe_problem
from pipeline.image_params import IMAGE_STEP_KINDS, ImageTrack, find_image_problems
from pipeline.network_params import NETWORK_STEP_KINDS, DetectorTrack, UpscalerTrack, find_network_problems
from pipeline.settings import TRACKS, Track, describe_yaml_error
from pipeline.text_params import TextTrack
from pipeline.text_problems import find_text_problems
from pipeline.yaml_files import read_yaml

T = TypeVar("T", bound=Track)


class Params(TextTrack):
    """The whole of params.yaml: the text track, and beside it the others."""

    # other products, each gated on its own
    images: ImageTrack | None = None
    detector: DetectorTrack | None = None
    upscaler: UpscalerTrack | None = None


def load_params(path: Path = Path("params.yaml")) -> Params:
    """Read and validate params.yaml.

    Raises:
        SettingsError: with the key's path, what was expected and what came.
    """
    try:
        data = read_yaml(path)
    except FileNotFoundError:
        raise SettingsError(f"{path}: expected the settings file, found none; run from the project root") from None
    except YAMLError as error:
        raise SettingsError(f"{path}: not valid YAML: {describe_yaml_error(error)}") from None
    return parse_params(data, where=str(path))


def get_track(params: Params, name: str, *, kind: type[T]) -> T:
    """Return a track by its name.

    Args:
        params: the whole file.
        name: one of TRACKS.
        kind: of track that it must be; `Track` is any.

    Raises:
        SettingsError: there is no such track of this kind, or params.yaml has no section for it.
    """
    kinds: dict[str, type[Track]] = {t.name: t for t in (Params, ImageTrack, DetectorTrack, UpscalerTrack)}
    names = [known for known in TRACKS if issubclass(kinds[known], kind)]
    if name not in names:
        raise SettingsError(f"track: expected {' or '.join(names)}, got {name!r}")
    track = params if name == "text" else getattr(params, name)
    if track is None:
        raise SettingsError(f"{name}: expected this section in params.yaml, found none; add it, or remove its stages "
                            "from dvc.yaml")
    assert isinstance(track, kind)
    return track


def check_candidate(track: Track, argv: list[str]) -> str:
    """Return the candidate that a stage was given on its command line.

    Raises:
        SettingsError: not one word, or no candidate of the track.
    """
    if len(argv) != 1 or argv[0] not in track.candidates:
        where = "candidates" if track.name == "text" else f"{track.name}.candidates"
        raise SettingsError(f"{where}: expected one of {', '.join(track.candidates)}, got {' '.join(argv)!r}")
    return argv[0]


def parse_params(data: Any, where: str = "params.yaml") -> Params:
    """Validate settings that were already read from YAML."""
    try:
        params = Params.model_validate(data)
    except ValidationError as error:
        raise SettingsError(f"{where}: {_one_line(error)}") from None
    for problem in _contradictions(params):
        raise SettingsError(f"{where}: {problem}")
    return params


def _contradictions(params: Params) -> list[str]:
    problems = find_text_problems(params)
    problems += find_image_problems(params.images) if params.images else []
    for network in (params.detector, params.upscaler):
        problems += find_network_problems(network) if network else []
    return problems


def _one_line(error: ValidationError) -> str:
    problems = error.errors(include_url=False)
    # a misspelled key is two problems, and the spelling that came says more than the one that is missing
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    tags = {"gptq", "awq", "speculative", "perplexity", "harness", "tool_calls", "trajectories", "transformers", "vllm",
            "openai", *IMAGE_STEP_KINDS, *NETWORK_STEP_KINDS}
    loc = [str(p) for p in problem["loc"]]
    # pydantic puts the union's tag into the path; the file has no such level
    where = ".".join(p for i, p in enumerate(loc) if not (p in tags and i and loc[i - 1].isdigit())
                     and not (p in tags and i == 2 and loc[0] == "evals")
                     and not (p in tags and loc[i - 1] == "engine"))
    return f"{where or '(whole)'}: {describe_problem(problem)}"
