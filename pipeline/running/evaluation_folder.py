"""The evaluation folder of a candidate that runs in the stage's own processes: made aside, and put in place whole.

Journals beside it keep what is finished of a run that was killed, and begin with what shards of it finished. One
process at a time makes it: two would write into one folder and one journal. The text product has its own
(`pipeline/products/text/evals/evaluate.py`), which asks a server and takes over evals of the last run.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from pipeline.evalsets.cards import Evalset
from pipeline.records.digests import digest_file
from pipeline.records.evaluations import EvalFile, Evaluation, LocalCandidate
from pipeline.records.files import replace_folder
from pipeline.records.fingerprints import Facts, fingerprint
from pipeline.records.record_files import write_record
from pipeline.running.journal import Journal, lock_candidate, put_aside, take_back
from pipeline.running.progress import is_step
from pipeline.running.shards import find_shards
from pipeline.settings.base import Eval


class WorkingFolder:
    """An evaluation in the making; `path` is the folder to write to."""

    def __init__(self, candidate: LocalCandidate, build: Path) -> None:
        """Begin with an empty folder, whatever an earlier run left there."""
        self._start = time.monotonic()
        self._candidate = candidate
        self._target = build / "evaluations" / candidate.name
        self._journals = build / "journal" / candidate.name
        take_back(self._journals)
        self._shards = find_shards(build, candidate.name)
        self.path = self._target.with_name(f".{candidate.name}.new")
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)

    @property
    def has_shards(self) -> bool:
        """Say whether shards have done its work."""
        return self._shards is not None

    def open_journal(self, name: str, facts: Facts, *, key: str) -> Journal:
        """Open the journal of one eval, with all that shards of it finished.

        Args:
            name: of the eval.
            facts: what is known of the processes that run the candidate.
            key: digest of the rest that a judgement comes from: settings, cases, code.
        """
        journal = Journal(self._journals / f"{name}.jsonl", fingerprint=fingerprint(facts), key=key)
        if self._shards:
            with contextlib.ExitStack() as stack:
                stack.callback(journal.close)
                self._shards.merge(name, facts, key=key, journal=journal)
                stack.pop_all()
        return journal

    def build_eval_file(self, name: str, settings: Eval, evalset: Evalset, *, key: str) -> EvalFile:
        """Return the seal of one eval's files: its records, and its arrays and notes where it has any."""
        records = self.path / f"{name}.jsonl"
        arrays, notes = records.with_suffix(".npz"), records.with_suffix(".json")
        return EvalFile(
            kind=settings.kind,
            settings=settings.model_dump(mode="json"),
            key=key,
            evalset_digest=evalset.digest,
            num_cases=len(evalset.cases),
            records=records.name,
            sha256=digest_file(records),
            arrays_sha256=digest_file(arrays) if arrays.is_file() else None,
            notes_sha256=digest_file(notes) if notes.is_file() else None,
        )

    def finish(self, files: dict[str, EvalFile], facts: Facts, *, proof: str) -> Evaluation:
        """Write the index, put the folder in its place, and drop the journals; in a step they are put aside.

        The result of a step is recorded after it, by DVC or by prefetch. Killed until then, it is made again.
        """
        evaluation = Evaluation(
            candidate=self._candidate.name,
            fingerprint=fingerprint(facts),
            checkpoint_digest=self._candidate.checkpoint.digest,
            serving=self._candidate.serving,
            evals=files,
            served_by=dict(facts),
            proof=proof,
            shards=self._shards.counts if self._shards else None,
            seconds=round(time.monotonic() - self._start, 3),
        )
        write_record(self.path / "evaluation.json", evaluation)
        replace_folder(self.path, self._target)
        if is_step(f"evaluate@{self._candidate.name}"):
            put_aside(self._journals)
        shutil.rmtree(self._journals, ignore_errors=True)
        if self._shards:
            self._shards.remove()
        return evaluation


@contextlib.contextmanager
def make_evaluation(candidate: LocalCandidate, build: Path) -> Iterator[WorkingFolder]:
    """Yield the folder of a candidate's evaluation, for this process alone.

    Args:
        candidate: what is evaluated.
        build: folder of the product's results.

    Raises:
        JournalError: another process evaluates the candidate.
    """
    with lock_candidate(build, candidate.name):
        yield WorkingFolder(candidate, build)
