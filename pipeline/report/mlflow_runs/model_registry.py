"""MLflow's registry: which version of which candidate went out.

One registered model per candidate, as an alias names one version of a model and a release may hold several candidates.
A version links the run of its evaluation and the folder of its weights, and is tagged with the gate's outcome and the
digest of the verdict. The registry is a log, too: nothing reads a release back from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.report.mlflow_runs.tracking import GROUP, PIPELINE, name_experiment, open_store, search_runs

RELEASED = "released"  # alias of the version that went out last
_PRODUCT = "quantgate.product"
_SAME_VERSION = ("verdict_sha256", "fingerprint")


@dataclass(frozen=True)
class ReleasedVersion:
    """A candidate that went out: where its weights lie in the project, and the tags of its version."""

    candidate: str
    weights: Path
    tags: dict[str, str]  # `verdict_sha256` and `fingerprint` say which version it is


def register_versions(versions: list[ReleasedVersion], root: Path, *, product: str) -> list[str]:
    """Register what was released: one model per candidate, of which the alias `released` names the version that is.

    A second time nothing is new. Candidates of the product that are not released any more lose the alias and keep their
    versions.

    Args:
        versions: all that the product releases.
        root: the folder of the store.
        product: whose candidates they are.

    Returns:
        A line per candidate: its model, version, and whether that is new.

    Raises:
        JournalError: the store can't be locked, opened or written.
    """
    with open_store(root) as client:
        lines = {f"{name_experiment(product)} {version.candidate}": version for version in versions}
        for model in client.search_registered_models(f"tags.`{_PRODUCT}` = '{product}'"):
            if model.name not in lines and RELEASED in model.aliases:
                client.delete_registered_model_alias(model.name, RELEASED)
        return [_register_once(client, name, version, root, product) for name, version in lines.items()]


def _register_once(client: Any, name: str, version: ReleasedVersion, root: Path, product: str) -> str:
    models = client.search_registered_models(f"name = '{name}'")
    if not models:
        models = [client.create_registered_model(name, tags={PIPELINE: "quantgate", _PRODUCT: product})]
    known = client.search_model_versions(f"name = '{name}'")
    same = [v for v in known if all(v.tags.get(key) == version.tags[key] for key in _SAME_VERSION)]
    if same:
        number = str(same[0].version)
        for tag, value in version.tags.items():
            if same[0].tags.get(tag) != value:
                client.set_model_version_tag(name, number, tag, value)
    else:
        source = (root / version.weights).resolve().as_uri()
        run_id = _find_run(client, version.candidate, product)
        number = str(client.create_model_version(name, source, run_id=run_id, tags=version.tags).version)
    if str(models[0].aliases.get(RELEASED)) != number:
        client.set_registered_model_alias(name, RELEASED, number)
    return f"{name!r} version {number} is {RELEASED!r}{'' if same else ', new'}"


def _find_run(client: Any, candidate: str, product: str) -> str | None:
    """Return the run that the stage track logged of a candidate; None where this store has none."""
    experiment = client.get_experiment_by_name(name_experiment(product))
    if experiment is None:
        return None
    runs = search_runs(client, experiment.experiment_id, f"tags.`{GROUP}` = '/{candidate}'")
    return next((run.info.run_id for run in runs if run.info.lifecycle_stage == "active"), None)
