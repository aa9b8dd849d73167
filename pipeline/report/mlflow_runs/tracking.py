"""Write runs to MLflow: the only module that imports it.

MLflow is the log, never the judge: nothing reads a verdict back from it. Writing is idempotent. A
run is found by a digest of what it says; when it is there nothing is written, and when something
else is said about the same candidate, the earlier run goes to MLflow's bin: the list and the
compare page then hold one run per candidate, and the bin ("State: Deleted" in the list, Restore)
keeps the history. A verdict that returns takes its run out of the bin again. Runs of a DVC
experiment never displace those of the workspace or of another experiment.

The store is a sqlite file in the project root. Creating it takes seconds and breaks for good when
two processes do it at once, so all writing happens under a file lock.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipeline.errors import JournalError
from pipeline.gate.wording import escape_markdown
from pipeline.records.files import write_text
from pipeline.report.mlflow_runs.picture_view import COLUMN, VIEW, build_view
from pipeline.report.mlflow_runs.review_view import REVIEW, build_review
from pipeline.report.mlflow_runs.run_contents import RunContents
from pipeline.report.pictures.shown import draw_pictures
from pipeline.running.tracing import TRACES

STORE_FILE = "mlflow.db"
ARTIFACTS_FOLDER = "mlartifacts"
LOCK_FILE = ".mlflow.lock"
LOCK_TIMEOUT_S = 120
_VIEWS = "mlflow.sharedViewState."  # starts the tags that hold an experiment's saved views
PIPELINE, _KEY, GROUP = "pipeline", "quantgate.key", "quantgate.group"


@dataclass(frozen=True)
class LoggedRun:
    """Where a run is; `is_new` is False when MLflow already had it."""

    candidate: str
    run_id: str
    experiment_id: str
    is_new: bool


def name_experiment(product: str) -> str:
    """Return the name of a product's experiment: metrics of several have nothing in common."""
    return f"quantgate {product}"


def log_runs(
    runs: list[RunContents],
    root: Path,
    *,
    product: str,
    attachments: Iterable[Path] = (),
    dvc_experiment: str = "",
) -> list[LoggedRun]:
    """Log every run that MLflow does not hold yet and bin those they replace.

    Args:
        runs: what to log, in the order in which they should be listed.
        root: the folder of the store: the project root, also when DVC runs elsewhere.
        product: whose experiment they go to.
        attachments: files to attach to each new run.
        dvc_experiment: name of the DVC experiment that is running, or "".

    Raises:
        JournalError: the store can't be locked, opened or written.
    """
    files = [file for file in attachments if file.is_file()]
    with open_store(root) as client:
        experiment_id = _find_experiment(client, name_experiment(product), root)
        # MLflow lists the newest first
        logged = [_log_once(client, experiment_id, run, files, dvc_experiment) for run in reversed(runs)]
        _save_views(client, experiment_id, runs)
        return logged[::-1]


@contextlib.contextmanager
def open_store(root: Path) -> Iterator[Any]:
    """Yield MLflow's client on the project's store, which nobody else writes meanwhile.

    Raises:
        JournalError: the store can't be locked, opened or written.
    """
    from filelock import FileLock, Timeout

    open_client, errors = _import_mlflow()
    try:
        with FileLock(root / LOCK_FILE, timeout=LOCK_TIMEOUT_S):
            yield open_client(tracking_uri=f"sqlite:///{(root / STORE_FILE).resolve()}")
    except Timeout:
        raise JournalError(
            f"{root / LOCK_FILE}: another process has been writing to MLflow for {LOCK_TIMEOUT_S} s; "
            "wait for it or end it"
        ) from None
    except errors as error:
        reason = str(error).strip().splitlines()[0].partition(". ")[0]  # then comes advice on other databases
        # without --force DVC may take the stage's output from its cache and not run it
        raise JournalError(
            f"{root / STORE_FILE}: expected a store that MLflow can write, got {type(error).__name__}: "
            f"{reason}; if it is damaged or of another version, move it away and run `dvc repro "
            "--single-item --force track`, which writes the runs of the last verdict again"
        ) from None


def _import_mlflow() -> tuple[Any, tuple[type[Exception], ...]]:
    """Return MLflow's client class, and what it raises when the store can't be used."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read while mlflow is imported
    logging.getLogger("alembic").setLevel(logging.WARNING)
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    from alembic.util import CommandError
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowClient, (MlflowException, SQLAlchemyError, CommandError, OSError)


def _find_experiment(client: Any, name: str, root: Path) -> str:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        return client.create_experiment(name, artifact_location=(root / ARTIFACTS_FOLDER).resolve().as_uri())
    if experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
    return experiment.experiment_id


def _log_once(client: Any, experiment_id: str, run: RunContents, files: list[Path], dvc_experiment: str) -> LoggedRun:
    group = f"{dvc_experiment}/{run.candidate}".replace("'", "%27")  # which ends a text in a query
    earlier = search_runs(client, experiment_id, f"tags.`{GROUP}` = '{group}'")
    same = next((r for r in earlier if r.data.tags.get(_KEY) == run.key and r.info.status == "FINISHED"), None)
    for other in earlier:
        if other is not same and other.info.lifecycle_stage == "active":
            client.delete_run(other.info.run_id)
    if same is not None:
        if same.info.lifecycle_stage == "deleted":
            client.restore_run(same.info.run_id)
        for tag, value in _place(run, dvc_experiment).items():
            if same.data.tags.get(tag) != value:
                client.set_tag(same.info.run_id, tag, value)
        return LoggedRun(run.candidate, same.info.run_id, experiment_id, is_new=False)
    name = f"{run.candidate} ({dvc_experiment})" if dvc_experiment else run.candidate
    pictures, problems = draw_pictures(run.images)
    note = "".join([run.note, *(f"\n- not shown: {escape_markdown(problem)}" for problem in problems)])
    tags = {
        PIPELINE: "quantgate",
        _KEY: run.key,
        GROUP: group,
        "mlflow.note.content": note,
        "mlflow.runColor": run.color,
    } | _place(run, dvc_experiment)
    run_id = client.create_run(experiment_id, run_name=name, tags=tags).info.run_id
    _fill(client, run_id, run, files)
    for key, picture in pictures.items():
        client.log_image(run_id, picture, key=key, step=0)
    client.set_terminated(run_id)  # the mark of a complete run: a killed one is logged again
    return LoggedRun(run.candidate, run_id, experiment_id, is_new=True)


def _place(run: RunContents, dvc_experiment: str) -> dict[str, str]:
    """Return the tag that gives a run its column; those of an experiment leave the columns to the workspace's."""
    return {COLUMN: run.column} if run.column and not dvc_experiment else {}


def _save_views(client: Any, experiment_id: str, runs: list[RunContents]) -> None:
    """Save the view for a review, and that of all images side by side where there are some."""
    views = {REVIEW: build_review(next(iter(runs[0].metrics), ""))}
    shown = [run.images for run in runs]
    if any(shown):
        views[VIEW] = build_view(shown)
    tags = client.get_experiment(experiment_id).tags
    for name, state in views.items():
        # as MLflow's page keeps what its users save under "Views"; it does not show the times
        view = json.dumps({"name": name.replace("-", " "), "createdAt": 0, "updatedAt": 0, "state": json.dumps(state)})
        if tags.get(f"{_VIEWS}{name}") != view:
            client.set_experiment_tag(experiment_id, f"{_VIEWS}{name}", view)


def search_runs(client: Any, experiment_id: str, query: str) -> list[Any]:
    """Return the runs of an experiment that a query finds, those in the bin too."""
    from mlflow.entities import ViewType

    return list(client.search_runs([experiment_id], query, run_view_type=ViewType.ALL, max_results=1000))


def _fill(client: Any, run_id: str, run: RunContents, files: list[Path]) -> None:
    from mlflow.entities import Metric, Param

    now = int(time.time() * 1000)
    client.log_batch(
        run_id,
        metrics=[Metric(name, value, now + i, 0) for i, (name, value) in enumerate(run.metrics.items())],
        params=[Param(name, value) for name, value in run.params.items()],
    )
    if run.predictions["id"]:
        client.log_table(run_id, run.predictions, artifact_file="predictions.json")
    for file in files:
        client.log_artifact(run_id, str(file))
    for trace in run.traces:
        client.log_artifact(run_id, str(trace), TRACES)


def write_pages(logged: list[LoggedRun], root: Path, *, product: str, has_pictures: bool) -> None:
    """Write the addresses of the pages worth opening, below the server's root, beside the artifacts.

    The order is that of a review: verdicts in a list, all numbers in a table, the bars, then every flip side by side.
    """
    ids = quote("[" + ",".join(f'"{run.run_id}"' for run in logged) + "]")
    experiment_id = logged[0].experiment_id
    experiments = quote(f'["{experiment_id}"]')
    runs, review = f"#/experiments/{experiment_id}/runs", f"viewStateShareKey={REVIEW}"
    lines = [
        f"{product}:",
        f"  runs         {runs}?{review}",
        f"  compare      #/compare-runs?runs={ids}&experiments={experiments}",
        f"  charts       {runs}?compareRunsMode=CHART&{review}",
        f"  predictions  {runs}?compareRunsMode=ARTIFACT",
    ]
    if has_pictures:
        lines.append(f"  images       {runs}?compareRunsMode=CHART&viewStateShareKey={VIEW}")
    write_text(root / ARTIFACTS_FOLDER / f"pages-{product}.txt", "\n".join(lines) + "\n")
