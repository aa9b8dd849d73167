"""Who holds a lock is named: a stage that outlived its `dvc` was to be looked for by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from pipeline.errors import JournalError
from pipeline.running import lock_holders
from pipeline.running.journal import lock_candidate
from pipeline.running.lock_holders import name_holder

HOLD = """
import sys
from pathlib import Path
from pipeline.running.journal import lock_candidate
with lock_candidate(Path(sys.argv[1]), "int8"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/locks").is_file(), reason="only Linux says who holds a lock")
def test_the_process_that_holds_a_lock_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout and other.stdout.readline() == "held\n"
        with pytest.raises(JournalError) as caught, lock_candidate(tmp_path, "int8"):
            pass
        other.communicate("")
    assert f"another one does (process {other.pid}: {sys.executable} -c" in str(caught.value)
    assert "\n" not in str(caught.value) and str(caught.value).endswith("); wait for it or end it")


def test_where_nobody_says_it_nothing_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    assert name_holder(path) == ""
    with FileLock(path):
        monkeypatch.setattr(lock_holders, "_LOCKS", tmp_path / "none")
        assert name_holder(path) == ""
    monkeypatch.undo()
    assert name_holder(path) == "", "nobody holds it"
