"""`.ci/comment` puts a stranger's text under the right pull request; `gh` is a fake that notes what is asked of it."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.paths import ROOT

FAKE = """#!{python}
import json, os, sys
from pathlib import Path
words = sys.argv[1:]
body = next((Path(w.removeprefix("body=@")).read_text() for w in words if w.startswith("body=@")), None)
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps([words, body]) + "\\n")
if "--paginate" in words:
    print(os.environ["COMMENTS"])
elif any(word.endswith("/pulls") for word in words):
    print(os.environ["PULLS"])
"""


@pytest.fixture
def comment(tmp_path: Path) -> Callable[..., list[Any]]:
    """Return what was asked of GitHub for a text."""
    fake = tmp_path / "bin/gh"
    fake.parent.mkdir()
    fake.write_text(FAKE.format(python=sys.executable))
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)

    def run(text: str, *, pulls: str = "7", comments: str = "") -> list[Any]:
        (tmp_path / "gate.md").write_text(text)
        calls = tmp_path / "calls"
        calls.write_text("")
        done = subprocess.run(
            [ROOT / ".ci/comment", tmp_path / "gate.md"],
            capture_output=True,
            text=True,
            env={
                "PATH": f"{fake.parent}{os.pathsep}{os.environ['PATH']}",
                "CALLS": str(calls),
                "PULLS": pulls,
                "COMMENTS": comments,
                "REPOSITORY": "owner/name",
                "HEAD": "stranger:branch",
                "SHA": "abc",
            },
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in calls.read_text().splitlines()]

    return run


def test_the_first_comment_is_written_and_later_ones_replace_it(comment: Callable[..., list[Any]]) -> None:
    words, body = comment("## quantgate: pass")[-1]
    assert "POST" in words and "repos/owner/name/issues/7/comments" in words
    assert body == "<!-- quantgate: gate -->\n## quantgate: pass"
    words, _ = comment("## quantgate: pass", comments="99\n100")[-1]
    assert "PATCH" in words and "repos/owner/name/issues/comments/99" in words


def test_a_pull_request_that_has_moved_on_gets_no_comment(comment: Callable[..., list[Any]]) -> None:
    assert len(comment("text", pulls="")) == 1


def test_a_strangers_text_mentions_nobody_forges_no_mark_and_fits(comment: Callable[..., list[Any]]) -> None:
    _, body = comment("@everyone\n```text\n@owner <!-- quantgate: gate -->\n```\n" + "@x" * 100_000)[-1]
    assert not re.search(r"@[^\u200b]", body) and body.count("<!--") == 1 and len(body) < 65_536
    assert "&#" not in body and "&lt;" not in body, "an entity is not decoded in a block of code"


def read_workflow(name: str) -> Any:
    return YAML(typ="safe").load((ROOT / ".github/workflows" / name).read_text(encoding="utf-8"))


def test_no_code_of_a_pull_request_runs_with_the_right_to_write() -> None:
    """`pull_request_target`, a secret, or a checkout of the head where writing is allowed would each hand it over."""
    gate, commenting = read_workflow("gate.yml"), read_workflow("gate-comment.yml")
    assert set(gate["on"]) == {"pull_request", "workflow_dispatch"} and gate["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in gate["jobs"].values())
    assert set(commenting["on"]) == {"workflow_run"} and commenting["permissions"] == {}
    (job,) = commenting["jobs"].values()
    assert job["permissions"] == {"actions": "read", "contents": "read", "pull-requests": "write"}
    checkout = next(step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout"))
    assert "ref" not in checkout["with"] and "repository" not in checkout["with"]
    assert not [step for step in job["steps"] if "${{" in step.get("run", "")], "a branch's name would be run"
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/comment fetched/gate.md"]


def test_a_fork_never_reaches_the_machine_of_its_own() -> None:
    full = read_workflow("gate.yml")["jobs"]["full"]
    assert "self-hosted" in full["runs-on"] and full["environment"]
    assert "github.event.pull_request.head.repo.full_name == github.repository" in full["if"]


def test_another_label_cancels_no_full_run() -> None:
    concurrency = read_workflow("gate.yml")["concurrency"]
    assert "github.event.label.name" in concurrency["group"] or not concurrency["cancel-in-progress"]
