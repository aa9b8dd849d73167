"""`dvc repro` from checkpoint to gate in a copy of the project: what runs, what does not run again, who stops it.

The copy has the shipped checkpoint, the shipped evalsets cut to a few dozen cases, and a candidate
beside the reference: INT4 at first, which passes, then a checkpoint with noise in its weights, which
must not. Each step below is one `dvc repro`, done once; the tests look at what it printed and left.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from evalsets.seal import seal
from pipeline.evalsets.cards import CASES_FILE
from tests.fakes.project_copy import ProjectCopy, list_ran

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

NUM_CASES = {"workflows": 90, "tool_calls": 40, "choices": 40, "prose": 40, "shots": 8, "scenes": 8}
TEXT_EVALS = ("workflows", "tool_calls", "choices", "prose")
NUM_CALIBRATION = 24  # texts of each source
# so few cases prove little: wide enough for INT4, far too narrow for a model that answers noise
TOLERANCES = {
    "workflows/task_completion_rate": {"overall": 0.4, "buckets": {"steps/5-8": 0.6}},
    "tool_calls/tool_call_exact_match": {"overall": 0.4},
    "choices/accuracy": {"overall": 0.4},
    "prose/perplexity_per_token": {"overall": 0.5},
}
PEOPLE_TOLERANCES = {f"scenes/{metric}": {"overall": 0.3} for metric in ("ap", "ap_small", "ap_medium", "ap_large")} | {
    "scenes/finite_output_rate": {"overall": 0.5}
}
GPTQ = {
    "kind": "gptq",
    "group_size": 64,
    "exclude": ["lm_head"],
    "calibration": {"sources": ["prose", "workflows"], "num_samples": 8, "max_tokens": 128, "length_exponent": 0},
}
# the smallest that there is: one cell, six rounds of four requests on each side
BENCHMARK = {"candidates": ["int4"], "concurrency": [2], "prompt_tokens": [[10, 120]], "num_tokens": 4, "rounds": 6}
PRODUCT = "agent"
JUDGING = [f"{stage}@{PRODUCT}" for stage in ("compare", "track", "gate")]
RELEASE = f"release@{PRODUCT}"
OTHERS = {
    "shots": ["shots", "bf16"],
    "people": ["people", "winograd-calibrated"],
}  # one of each kind beside the text product
OTHER_NAMES = {name for product, candidates in OTHERS.items() for name in (product, *candidates)}


@dataclass(frozen=True)
class Repro:
    """One finished `dvc repro`: its exit code, what it said, the stages it ran, and what was left."""

    code: int
    output: str
    ran: list[str]
    ran_others: list[str]  # of other products
    gate_ok: bool
    evaluated_at: dict[str, int]  # candidate -> when its evaluation was written, in ns
    verdicts: dict[str, str]


class Project(ProjectCopy):
    """The copy of a project that was cut to a few cases."""

    def edit_product(self, **changes: Any) -> None:
        """Replace some sections of the text product."""
        data = self.read_params()
        data["products"][PRODUCT] |= changes
        self.write_params(data)

    def repro(self) -> Repro:
        """Run `dvc repro` and look at what it did."""
        done = self.run_dvc("repro")
        ran = list_ran(done.stdout)
        build = self.root / "build" / PRODUCT
        evaluations = (build / "evaluations").glob("*/evaluation.json")
        verdict = self.root / "reports" / PRODUCT / "verdict.json"
        judged = json.loads(verdict.read_text())["verdicts"] if verdict.exists() else []
        return Repro(
            code=done.returncode,
            output=done.stdout,
            ran=[stage for stage in ran if stage.partition("@")[2] not in OTHER_NAMES],
            ran_others=[stage for stage in ran if stage.partition("@")[2] in OTHER_NAMES],
            gate_ok=(build / "gate.ok").exists(),
            evaluated_at={path.parent.name: path.stat().st_mtime_ns for path in evaluations},
            verdicts={v["candidate"]: v["outcome"] for v in judged},
        )


def cut_evalset(folder: Path, num_cases: int) -> None:
    """Keep an evalset's first cases of distinct clusters, of each bucket for calibration texts, and seal it."""
    lines = (folder / CASES_FILE).read_text(encoding="utf-8").split("\n")[:-1]
    kept: list[dict[str, Any]] = []
    seen: Counter[str] = Counter()
    clusters: set[str] = set()
    for case in map(json.loads, lines):
        source = case["buckets"][0] if folder.name == "calibration" else ""
        if seen[source] < num_cases and case["cluster"] not in clusters:
            kept.append(case)
            seen[source] += 1
            clusters.add(case["cluster"])
    text = "".join(json.dumps(case, ensure_ascii=False) + "\n" for case in kept)
    (folder / CASES_FILE).write_text(text, encoding="utf-8")
    seal(folder)


def describe_gate(tolerances: dict[str, Any]) -> dict[str, Any]:
    """Return a product's section `gate`."""
    return {"alpha": 0.05, "on_inconclusive": "block", "tolerances": tolerances}


def write_noisy_copy(source: Path, target: Path) -> None:
    """Copy a checkpoint with noise added to its weights: it loads, and answers nonsense."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    noisy = {}
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
        noisy[name] = (tensor.float() + noise).to(tensor.dtype) if tensor.dim() == 2 else tensor
    (target / "model.safetensors").unlink()
    save_file(noisy, target / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy of the project with small evalsets, one server and one INT4 candidate; nothing has run in it."""
    root = tmp_path_factory.mktemp("repro")
    project = Project.make(root)
    (root / "dvc.lock").unlink(missing_ok=True)
    shutil.rmtree(root / "release", ignore_errors=True)  # its tolerances are tighter than those here
    (root / "evalsets/made.yaml").unlink()  # its digests are those of whole evalsets
    for name, num_cases in NUM_CASES.items():
        cut_evalset(root / "evalsets" / name, num_cases)
    cut_evalset(root / "evalsets/calibration", NUM_CALIBRATION)
    write_noisy_copy(root / "models/agent", root / "models/noisy")
    params = project.read_params()
    products, known = params["products"], params["candidates"]
    bf16 = {
        "product": "shots",
        "checkpoint": "models/product-shots",
        "steps": [{"kind": "vae_precision", "dtype": "bfloat16"}],
    }
    project.write_params(
        {
            "products": {
                PRODUCT: products[PRODUCT]
                | {
                    "reference": "reference",
                    "release": ["int4"],
                    "gate": describe_gate(TOLERANCES),
                    "resources": products[PRODUCT]["resources"] | {"num_servers": 1},
                    "canary": {"num_prompts": 8, "target_rate": 0.49},
                    "benchmark": BENCHMARK,
                },
                "shots": products["shots"]
                | {
                    "release": ["bf16"],
                    "serving": products["shots"]["serving"] | {"num_inference_steps": 4},
                    "resources": {"num_workers": 1},
                    "gate": products["shots"]["gate"] | {"on_inconclusive": "warn"},
                },  # eight images prove nothing
                "people": products["people"]
                | {
                    "release": ["winograd-calibrated"],
                    "gate": describe_gate(PEOPLE_TOLERANCES) | {"on_inconclusive": "warn"},
                },
            },
            "candidates": {
                "reference": {"product": PRODUCT, "checkpoint": "models/agent", "steps": []},
                "int4": {"product": PRODUCT, "checkpoint": "models/agent", "steps": [GPTQ]},
            }
            | {name: known.get(name, bf16) for names in OTHERS.values() for name in names},
        }
    )
    return project


@pytest.fixture(scope="module")
def passed(project: Project) -> Repro:
    """The first run."""
    return project.repro()


@pytest.fixture(scope="module")
def repeated(project: Project, passed: Repro) -> Repro:
    """A second run with nothing changed."""
    return project.repro()


@pytest.fixture(scope="module")
def tolerance_edited(project: Project, repeated: Repro) -> Repro:
    """A run after one tolerance was edited."""
    project.edit_product(gate=describe_gate(TOLERANCES | {"choices/accuracy": {"overall": 0.35}}))
    return project.repro()


@pytest.fixture(scope="module")
def candidate_edited(project: Project, tolerance_edited: Repro) -> Repro:
    """A run after the released candidate became one that must not pass, and is not timed any more."""
    data = project.read_params()
    data["candidates"]["int4"] |= {"checkpoint": "models/noisy", "steps": []}
    project.write_params(data)
    project.edit_product(benchmark=BENCHMARK | {"candidates": []})
    return project.repro()


@pytest.fixture(scope="module")
def failed_again(project: Project, candidate_edited: Repro) -> Repro:
    """A run with the cause still there."""
    return project.repro()


def test_a_good_release_goes_from_checkpoint_to_gate(project: Project, passed: Repro) -> None:
    assert passed.code == 0, passed.output
    assert sorted(passed.ran) == sorted(
        [
            "env",
            "optimize@reference",
            "optimize@int4",
            "evaluate@reference",
            "evaluate@int4",
            f"benchmark@{PRODUCT}",
            *JUDGING,
            RELEASE,
        ]
    )
    assert passed.ran[-4:] == [*JUDGING, RELEASE]
    assert sorted(passed.ran_others) == sorted(
        [f"{stage}@{name}" for names in OTHERS.values() for name in names for stage in ("optimize", "evaluate")]
        + [f"{stage}@{product}" for product in OTHERS for stage in ("benchmark", "compare", "track", "gate", "release")]
    )
    for product in OTHERS:
        assert (project.root / f"build/{product}/gate.ok").exists(), passed.output
        assert (project.root / f"reports/{product}/worst.png").exists()
        assert (project.root / f"release/{product}/manifest.json").exists()
    assert passed.gate_ok and passed.verdicts == {"int4": "pass"}
    evaluation = json.loads((project.root / f"build/{PRODUCT}/evaluations/int4/evaluation.json").read_text())
    assert {name: found["num_cases"] for name, found in evaluation["evals"].items()} == {
        name: NUM_CASES[name] for name in TEXT_EVALS
    }
    metrics = json.loads((project.root / f"metrics/{PRODUCT}/reference.json").read_text())
    assert metrics["workflows"]["task_completion_rate"] > 0.5, "the copy must evaluate a model that works"
    assert "int4" in (project.root / f"reports/{PRODUCT}/report.md").read_text()


def test_the_candidate_was_timed_beside_the_reference(project: Project, passed: Repro) -> None:
    timed = json.loads((project.root / f"build/{PRODUCT}/benchmarks/int4.json").read_text())
    assert timed["refusal"] is None and len(timed["cells"][0]["candidate"]) == 6, passed.output
    assert timed["candidate"]["num_changed"] == 0 and timed["candidate"]["peak_memory_mib"] > 100


def test_a_second_run_does_nothing(repeated: Repro, passed: Repro) -> None:
    assert repeated.code == 0, repeated.output
    assert repeated.ran == ["env"], "only the stage that reads the machine runs every time"
    assert repeated.ran_others == []
    assert repeated.gate_ok and repeated.evaluated_at == passed.evaluated_at


def test_an_edited_tolerance_only_judges_again(tolerance_edited: Repro, passed: Repro) -> None:
    assert tolerance_edited.code == 0, tolerance_edited.output
    assert tolerance_edited.ran == ["env", *JUDGING, RELEASE]
    assert tolerance_edited.ran_others == [], "other products have nothing to do with it"
    assert tolerance_edited.gate_ok and tolerance_edited.evaluated_at == passed.evaluated_at


def test_an_edited_candidate_runs_alone(candidate_edited: Repro, passed: Repro) -> None:
    assert candidate_edited.ran == ["env", "optimize@int4", "evaluate@int4", f"benchmark@{PRODUCT}", *JUDGING], (
        candidate_edited.output
    )
    assert candidate_edited.evaluated_at["reference"] == passed.evaluated_at["reference"]
    assert candidate_edited.evaluated_at["int4"] > passed.evaluated_at["int4"]


def test_a_bad_release_fails_the_run_and_says_why(project: Project, candidate_edited: Repro) -> None:
    assert candidate_edited.code != 0 and not candidate_edited.gate_ok
    assert candidate_edited.verdicts == {"int4": "fail"}
    assert "FAIL" in candidate_edited.output and "workflows/task_completion_rate" in candidate_edited.output
    assert f"reports/{PRODUCT}/report.md" in candidate_edited.output
    assert "int4" in (project.root / f"reports/{PRODUCT}/report.md").read_text()


def test_the_gate_fires_again_and_nothing_else_is_repeated(failed_again: Repro, candidate_edited: Repro) -> None:
    assert failed_again.code != 0 and not failed_again.gate_ok
    assert failed_again.ran == ["env", f"gate@{PRODUCT}"], failed_again.output
    assert "FAIL" in failed_again.output
    assert failed_again.evaluated_at == candidate_edited.evaluated_at


def test_dvc_status_names_the_gate_alone(project: Project, failed_again: Repro) -> None:
    done = project.run(sys.executable, "-m", "dvc", "status", "--json")
    assert done.returncode == 0, done.stdout
    assert sorted(json.loads(done.stdout)) == ["env", f"gate@{PRODUCT}", RELEASE]
