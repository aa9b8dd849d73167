"""The release bundle: what it holds, that it can be judged again, and that nobody changes it unseen."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.errors import EvidenceError, SettingsError
from pipeline.gate.loosening import MANIFEST
from pipeline.gate.verdicts import Judgement
from pipeline.products.vision.settings import VisionProduct
from pipeline.records.checksums import SUMS, write_sums
from pipeline.records.digests import digest_file, digest_json, digest_text
from pipeline.records.evaluations import OUTGROWN, CaseRecord, Evaluation, read_cases
from pipeline.records.record_files import read_record, write_record
from pipeline.release import bundle as release_bundle
from pipeline.release.bundle import check_marker, write_bundle
from pipeline.release.kept_records import keep_records, restore_records
from pipeline.release.manifest import Manifest, read_git
from pipeline.release.recipe import find_other_recipe
from pipeline.release.settings import load_released
from pipeline.release.signature import SIGNATURE
from pipeline.release.verification import Verification, find_differences, verify_bundle
from tests.fakes.judging import compare_release, list_said
from tests.fakes.release_project import (
    BUILD,
    BUNDLE,
    NAME,
    VERDICT,
    bundle_project,
    judge_project,
    write_keys,
    write_project,
)
from tests.fakes.synthetic_detections import Change
from tests.fakes.synthetic_networks import Way, make_network_product, write_detector
from tests.fakes.synthetic_records import PRODUCT, WEIGHTS, describe_project, make_params, rewrite_records


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose release passes, and the keys of its owner; not to be changed."""
    root = tmp_path_factory.mktemp("release")
    write_project(root)
    private, _ = write_keys(root, "owner")
    bundle_project(root, private_key=private)
    return root


@pytest.fixture
def bundle(project: Path, tmp_path: Path) -> Path:
    """A copy of its bundle, to be tampered with."""
    return Path(shutil.copytree(project / BUNDLE, tmp_path / "bundle"))


def test_what_does_not_verify_leaves_the_last_bundle_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle of a forged verdict was found out when it lay there already, and the good one was gone."""
    write_project(tmp_path)
    path = bundle_project(tmp_path)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    monkeypatch.setattr(release_bundle, "verify_bundle", lambda folder: Verification(problems=["harm was 0, is 1"]))
    with pytest.raises(EvidenceError, match="the bundle that was just written does not verify: harm was 0, is 1"):
        bundle_project(tmp_path)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    assert [child.name for child in path.parent.iterdir()] == [PRODUCT]


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data, indent=2) + "\n")


def edit_text(path: Path, was: str, now: str) -> None:
    text = path.read_text()
    assert was in text
    path.write_text(text.replace(was, now))


def edit_packed(path: Path, edit: Callable[[list[Any]], object]) -> None:
    """Change the records of a packed file."""
    records = [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]
    edit(records)
    path.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in records).encode(), mtime=0))


def test_a_bundle_verifies_with_its_owners_key_and_the_weights(project: Path, bundle: Path) -> None:
    weights = project / BUILD / "candidates" / NAME / "checkpoint"
    found = verify_bundle(bundle, public_key=project / "owner.pub", weights={NAME: weights})
    assert found.problems == []
    said = "\n".join(found.notes)
    assert "signed by the owner" in said and f"{NAME} pass" in said and "the weights of good, as released" in said


def test_a_bundle_holds_no_text_of_a_case(bundle: Path, project: Path) -> None:
    kept = b"".join(gzip.decompress(p.read_bytes()) for p in bundle.rglob("*.jsonl.gz") if p.name != "canary.jsonl.gz")
    records = read_cases(project / BUILD / f"evaluations/{NAME}/workflows.jsonl")
    assert records[0].case_id.encode() in kept
    assert b"Move crate" not in kept and b"dock" not in kept and b"bay" not in kept


def test_the_manifest_names_what_went_out(project: Path) -> None:
    manifest = read_record(project / BUNDLE / MANIFEST, Manifest)
    (side,) = manifest.release
    index = read_record(project / BUILD / f"evaluations/{NAME}/evaluation.json", Evaluation)
    assert (side.candidate, side.outcome, side.fingerprint) == (NAME, "pass", index.fingerprint)
    assert side.weights_digest == digest_json({WEIGHTS: digest_text(NAME)})
    assert manifest.verdict_sha256 == digest_file(project / VERDICT)
    assert side.records["workflows.jsonl"] == digest_file(project / BUILD / f"evaluations/{NAME}/workflows.jsonl")
    assert {"torch", "scipy", "python"} <= manifest.libraries.keys()


def test_other_weights_are_named(project: Path, bundle: Path, tmp_path: Path) -> None:
    other = tmp_path / "weights"
    other.mkdir()
    (other / WEIGHTS).write_text("other weights")
    (problem,) = verify_bundle(bundle, weights={NAME: other}).problems
    assert str(other) in problem and "expected the weights of good" in problem
    (problem,) = verify_bundle(bundle, weights={"bad": other}).problems
    assert "a released candidate (good), got 'bad'" in problem


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_file_changes_goes_or_comes_unseen(
    project: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Without any key: a flipped byte, a file that is gone, one that is new, wherever it is."""
    bundle = Path(shutil.copytree(project / BUNDLE, tmp_path_factory.mktemp("tampered") / "bundle"))
    path = data.draw(st.sampled_from(sorted(p for p in bundle.rglob("*") if p.is_file())))
    match data.draw(st.sampled_from(["flip", "cut", "delete", "add"])):
        case "flip":
            content = bytearray(path.read_bytes())
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
            path.write_bytes(content)
        case "cut":
            path.write_bytes(path.read_bytes()[: data.draw(st.integers(0, path.stat().st_size - 1))])
        case "delete":
            path.unlink()
        case "add":
            folder = path.parent / data.draw(st.sampled_from(["", "__pycache__", ".git"]))
            folder.mkdir(exist_ok=True)
            (folder / "new.json").write_text("{}")
    found = verify_bundle(bundle)
    assert found.problems and not [problem for problem in found.problems if "\n" in problem]


def test_a_bundle_that_points_outside_of_itself_is_no_bundle(bundle: Path, tmp_path: Path) -> None:
    """A linked verdict has the right digest today."""
    outside = shutil.move(bundle / "verdict.json", tmp_path / "elsewhere.json")
    (bundle / "verdict.json").symlink_to(outside)
    assert f"{bundle / 'verdict.json'}: a link; a bundle holds its files itself" in verify_bundle(bundle).problems


def test_nothing_is_read_through_a_link_of_a_bundle(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A linked folder was copied with all that is in it, to judge again: one that leads to / had no end."""
    monkeypatch.setattr("pipeline.release.verification.restore_records", lambda *_: pytest.fail("it was followed"))
    (bundle / "evaluations" / "more").symlink_to(tmp_path)
    assert verify_bundle(bundle).problems == [
        f"{bundle / 'evaluations' / 'more'}: a link; a bundle holds its files itself"
    ]


def test_records_that_an_index_names_elsewhere_are_not_read(bundle: Path, tmp_path: Path) -> None:
    """What is wrong with a line was told with the line, whosever file it was."""
    (tmp_path / "elsewhere.jsonl").write_text("a word of nobody's business\n")
    edit_json(
        bundle / f"evaluations/{NAME}/evaluation.json",
        lambda e: e["evals"]["choices"].update(records=str(tmp_path / "elsewhere.jsonl")),
    )
    write_sums(bundle)
    said = "\n".join(verify_bundle(bundle).problems)
    assert "evaluation.json: expected names of files beside it" in said and "nobody's business" not in said


def test_what_asks_for_more_memory_than_there_is_is_a_problem(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An array may say that it has 10^13 numbers."""

    def fail(*_: object) -> None:
        raise MemoryError("Unable to allocate 72.8 TiB")

    monkeypatch.setattr("pipeline.release.verification.compare_release", fail)
    assert "can't be judged again: Unable to allocate 72.8 TiB" in "\n".join(verify_bundle(bundle).problems)


def test_two_digests_that_differ_late_are_shown_whole(bundle: Path) -> None:
    sums = bundle / "SHA256SUMS"
    first, rest = sums.read_text().split("\n", 1)
    digest, name = first.split("  ")
    other = digest[:-1] + ("0" if digest[-1] != "0" else "1")
    sums.write_text(f"{other}  {name}\n{rest}")
    assert f"expected sha256 {other}, got {digest}; it was changed" in "\n".join(verify_bundle(bundle).problems)


def lose_ten(records: list[Any]) -> None:
    for record in records[:10]:
        record["scores"]["completed"] = 0.0


@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        (
            lambda b: edit_packed(b / f"evaluations/{NAME}/workflows.jsonl.gz", lose_ten),
            "verdicts.good.comparisons.workflows/task_completion_rate.candidate: says",
        ),
        (
            lambda b: edit_packed(b / f"evaluations/{NAME}/workflows.jsonl.gz", lambda r: r.__setitem__(1, r[0])),
            "asks the same as case",
        ),
        (lambda b: edit_packed(b / f"evaluations/{NAME}/workflows.jsonl.gz", lambda r: r.pop()), "expected 80 cases"),
        (
            lambda b: edit_json(
                b / "verdict.json", lambda v: v["verdicts"][0]["comparisons"][0].update(candidate=0.999)
            ),
            "comparisons.workflows/task_completion_rate.candidate: says 0.999, the scores give",
        ),
        (
            lambda b: edit_json(b / "params.yaml", lambda p: p["products"][PRODUCT]["gate"].update(alpha=0.1)),
            "bundle/params.yaml: the verdict beside it was reached with alpha 0.05, params.yaml says 0.1",
        ),
        (
            lambda b: edit_json(b / MANIFEST, lambda m: m["release"][0].update(weights_digest="f" * 64)),
            "release.0.weights_digest: says 'ffff",
        ),
        (lambda b: edit_json(b / MANIFEST, lambda m: m["policy"].update(alpha=0.01)), "policy.alpha: says 0.01"),
        (lambda b: edit_json(b / MANIFEST, lambda m: m["release"][0].update(outcome="fail")), "outcome: says 'fail'"),
        (
            lambda b: edit_text(b / "cards/good.md", "**pass**", "**pass** with honours"),
            "good.md: expected the card that",
        ),
        (lambda b: (b / "cards/good.md").unlink(), "good.md: expected the card that verdict.json gives, found none"),
        (
            lambda b: (b / "cards/best.md").write_text("best"),
            "best.md: expected the card that verdict.json gives, found",
        ),
        (lambda b: (b / "benchmarks").mkdir(), None),
    ],
)
def test_what_agrees_with_its_sums_must_agree_with_the_rest(
    bundle: Path, tamper: Callable[[Path], object], named: str | None
) -> None:
    """Whoever edits a file can write the sums anew, and the verdict no longer follows from the scores."""
    (bundle / SIGNATURE).unlink()
    tamper(bundle)
    write_sums(bundle)
    found = verify_bundle(bundle)
    if named is None:
        assert found.problems == []  # an empty folder is no content
    else:
        assert named in "\n".join(found.problems)


def make_worse_and_judge(root: Path, private_key: Path) -> Path:
    """Write a bundle that is consistent in itself and about other records."""
    rewrite_records(
        root / BUILD,
        NAME,
        "choices",
        lambda records: [r.model_copy(update={"scores": {"accuracy": 1.0}}) for r in records],
    )
    judge_project(root)
    return bundle_project(root, private_key=private_key)


def test_only_the_signature_finds_a_bundle_that_is_consistent_in_itself(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project / "build", tmp_path / "build")
    shutil.copy(project / "params.yaml", tmp_path)
    rewrite_records(
        tmp_path / BUILD,
        "reference",
        "choices",
        lambda records: [r.model_copy(update={"scores": {"accuracy": 1.0}}) for r in records],
    )
    forger, _ = write_keys(tmp_path, "forger")
    forged = make_worse_and_judge(tmp_path, forger)
    assert verify_bundle(forged).problems == []
    (problem,) = verify_bundle(forged, public_key=project / "owner.pub").problems
    assert "not the signature of this bundle by this key" in problem
    shutil.copy(project / BUNDLE / SIGNATURE, forged)
    write_sums(forged)
    (problem,) = verify_bundle(forged, public_key=project / "owner.pub").problems
    assert "not the signature of this bundle by this key" in problem


def test_a_removed_signature_is_found_where_a_key_is_given(project: Path, bundle: Path) -> None:
    (bundle / SIGNATURE).unlink()
    write_sums(bundle)
    assert verify_bundle(bundle).notes[0] == "not signed"
    (problem,) = verify_bundle(bundle, public_key=project / "owner.pub").problems
    assert "expected a signature, as a public key is given, found none" in problem


def test_a_key_that_is_none_is_one_line_and_loses_no_bundle(project: Path, tmp_path: Path) -> None:
    shutil.copytree(project / "build", tmp_path / "build")
    shutil.copytree(project / "reports", tmp_path / "reports")
    shutil.copy(project / "params.yaml", tmp_path)
    bundle = bundle_project(tmp_path)
    before = (bundle / SUMS).read_text()
    for key in (tmp_path / "none.pem", tmp_path / "params.yaml", project / "owner.pub"):
        with pytest.raises(SettingsError, match="expected an unencrypted PEM private key") as caught:
            bundle_project(tmp_path, private_key=key)
        assert "\n" not in str(caught.value)
    assert (bundle / SUMS).read_text() == before and [p.name for p in bundle.parent.iterdir()] == [PRODUCT]
    with pytest.raises(SettingsError, match="expected a PEM public key"):
        verify_bundle(bundle, public_key=tmp_path / "none.pem")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda root: (root / BUILD / "gate.ok").unlink(), "expected the gate's marker of a pass, found none"),
        (lambda root: (root / BUILD / "gate.ok").write_text("[]"), "found other content"),
        (lambda root: edit_json(root / VERDICT, lambda v: v.update(interval_confidence=0.9)), "passed another verdict"),
    ],
)
def test_nothing_is_released_that_the_gate_did_not_pass(
    project: Path, tmp_path: Path, spoil: Callable[[Path], object], named: str
) -> None:
    root = Path(shutil.copytree(project, tmp_path / "project"))
    spoil(root)
    judgement = read_record(root / VERDICT, Judgement)
    with pytest.raises(EvidenceError, match=named):
        check_marker(root / BUILD / "gate.ok", judgement, root / VERDICT)


def test_a_marker_forged_for_a_blocking_verdict_is_refused(tmp_path: Path) -> None:
    write_project(tmp_path, loss=0.5)
    judgement = read_record(tmp_path / VERDICT, Judgement)
    (tmp_path / BUILD / "gate.ok").write_text(json.dumps({"verdict_sha256": digest_file(tmp_path / VERDICT)}))
    with pytest.raises(EvidenceError, match="good is fail, which blocks"):
        check_marker(tmp_path / BUILD / "gate.ok", judgement, tmp_path / VERDICT)


def test_stripped_outputs_keep_what_the_gate_looks_at(project: Path, tmp_path: Path) -> None:
    """Empty or not, equal or not, how many turns, and conversations that had no room left."""
    outputs = ["", "  ", "a\nb", "a\nb", f"a\n{OUTGROWN}"]
    shutil.copytree(project / "build", tmp_path / "build")

    def say(records: list[CaseRecord]) -> list[CaseRecord]:
        return [r.model_copy(update={"output": out}) for r, out in zip(records, outputs, strict=False)]

    rewrite_records(tmp_path / BUILD, NAME, "workflows", say)
    keep_records(tmp_path / BUILD, [NAME], tmp_path / "kept")
    restore_records(tmp_path / "kept", tmp_path / "again")
    kept = [r.output for r in read_cases(tmp_path / f"again/evaluations/{NAME}/workflows.jsonl")]
    assert kept[:2] == ["", "  "] and kept[2] == kept[3] != "a\nb" and len(kept[2].split("\n")) == 2
    assert kept[4].endswith(OUTGROWN) and kept[4].split("\n")[0] == kept[2].split("\n")[0]


def test_a_detectors_boxes_are_judged_again_from_its_matches(tmp_path: Path) -> None:
    """Its verdict rests on arrays beside the records; without them nothing could be computed."""
    ways = {"close": Way([{"kind": "precision", "dtype": "bfloat16"}], Change())}
    wide = {
        "scenes/ap": {"overall": 0.3},
        "scenes/ap_small": {"overall": 0.3},
        "scenes/ap_large": {"overall": 0.3},
        "scenes/finite_output_rate": {"overall": 0.3},
    }
    product = make_network_product("detector", ways, wide)
    build = write_detector(tmp_path, product, ways, num_images=32)
    (tmp_path / "params.yaml").write_text(json.dumps(describe_project(make_params([NAME], [NAME]), product)))
    judgement = compare_release(product, build).judgement
    assert judgement.outcome == "pass", list_said(judgement.verdicts[0])
    write_record(tmp_path / VERDICT, judgement)
    (tmp_path / "libraries.json").write_text("{}")
    bundle = tmp_path / "release/detector"
    write_bundle(
        product,
        judgement,
        build=build,
        params=tmp_path / "params.yaml",
        verdict=tmp_path / VERDICT,
        bundle=bundle,
        libraries=tmp_path / "libraries.json",
        private_key=None,
    )
    assert verify_bundle(bundle).problems == []


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy of the bundle of an upscaler from before products had names."""
    shutil.unpack_archive(Path(__file__).parent / "old_bundle.tar.xz", tmp_path)
    return (tmp_path / "old_bundle").rename(tmp_path / "old")


def test_a_bundle_of_before_products_had_names_verifies(old: Path) -> None:
    """Its manifest and verdict say `track`, and its settings are a section of a text project's."""
    said = json.loads((old / MANIFEST).read_text())
    assert said["track"] == said["policy"]["track"] == "upscaler" and "product" not in said
    found = verify_bundle(old)
    assert found.problems == [] and "upscaler: tiled-hann pass; judged again from the scores of 1 evals" in found.notes
    manifest = read_record(old / MANIFEST, Manifest)
    assert (manifest.product, manifest.policy.product, manifest.policy.kind) == ("upscaler", "upscaler", "vision")


def lower_quality(records: list[Any]) -> None:
    for record in records[:10]:
        record["scores"]["psnr_db"] -= 0.05


@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        (
            lambda b: edit_packed(b / "evaluations/tiled-hann/panoramas.jsonl.gz", lower_quality),
            "verdicts.tiled-hann.comparisons.panoramas/psnr_db.candidate: says",
        ),
        (
            lambda b: edit_json(b / "verdict.json", lambda v: v["policy"].update(track="detector")),
            "old/params.yaml: the verdict beside it was reached with ",
        ),
        (
            lambda b: edit_text(
                b / "params.yaml", "panoramas/psnr_db: {overall: 0.1}", "panoramas/psnr_db: {overall: 0.2}"
            ),
            "old/params.yaml: the verdict beside it was reached with tolerances.panoramas/psnr_db.overall 0.1",
        ),
    ],
)
def test_an_edit_of_a_bundle_of_before_products_had_names_is_found(
    old: Path, tamper: Callable[[Path], object], named: str
) -> None:
    """With its sums as they were, and with sums that were written anew."""
    tamper(old)
    assert "it was changed" in "\n".join(verify_bundle(old).problems)
    write_sums(old)
    said = "\n".join(verify_bundle(old).problems)
    assert named in said and "it was changed" not in said


@pytest.mark.parametrize(
    ("name", "kind", "serving", "resources"),
    [
        (
            "text",
            "text",
            {"dtype": "float32", "concurrency": 64},
            {"num_servers": 2, "request_timeout_s": 120.0, "start_timeout_s": 120.0},
        ),
        ("images", "images", {"num_inference_steps": 20, "batch_size": 16}, {"num_workers": 2}),
        ("detector", "vision", {"batch_size": 6}, {"num_workers": 2}),
        ("upscaler", "vision", {"batch_size": 1}, {"num_workers": 2}),
    ],
)
def test_settings_of_before_products_had_names_are_read_as_products(
    old: Path, name: str, kind: str, serving: dict[str, Any], resources: dict[str, float]
) -> None:
    """All four stood in one file, each with candidates and a way of serving of its own."""
    product = load_released(old / "params.yaml", name)
    assert (product.name, product.kind) == (name, kind) and product.reference in product.candidates
    settings = product.model_dump(mode="json")
    assert settings["serving"] | serving == settings["serving"]
    assert settings["resources"] | resources == settings["resources"]


def test_a_recipe_of_before_products_had_names_is_compared_as_one_of_today(old: Path) -> None:
    product = load_released(old / "params.yaml", "upscaler")
    assert isinstance(product, VisionProduct)
    assert find_other_recipe(old, product) == []
    other = product.model_copy(update={"serving": product.serving.model_copy(update={"batch_size": 7})})
    [problem] = find_other_recipe(old, other)
    assert problem.startswith(f"params.yaml: products.upscaler.serving.batch_size: {old}/params.yaml has 1, got 7; ")


def test_rounding_is_no_difference_and_everything_else_is() -> None:
    assert find_differences({"a": [1.0, 0.3]}, {"a": [1.0, 0.1 + 0.2]}) == []
    assert find_differences({"a": [1.0, 0.3]}, {"a": [1.0, 0.3001]}) == [("a.1", 0.3, 0.3001)]
    assert find_differences({"a": {"b": 1}}, {"a": {}}) == [("a.b", 1, "nothing")]
    assert find_differences({"a": True}, {"a": None}) == [("a", True, None)]
    assert find_differences([1, 2], [1]) == [("", [1, 2], [1])]


def test_a_card_reads_as_a_model_index(project: Path) -> None:
    """In huggingface_hub's own reading: a result for each gated metric and bucket, with the verdict's numbers."""
    from huggingface_hub import ModelCard
    from huggingface_hub.repocard_data import eval_results_to_model_index

    card = ModelCard.load(project / BUNDLE / "cards/good.md", ignore_metadata_errors=False)
    verdict = read_record(project / VERDICT, Judgement).verdicts[0]
    gated = {c.metric: c for c in verdict.comparisons if c.tolerance is not None}
    assert card.data.model_name == NAME and len(card.data.eval_results) == len(gated) == 4
    for result in card.data.eval_results:
        expected = gated[f"{result.dataset_name}/{result.metric_type}"]
        assert result.metric_value == expected.candidate and result.metric_args["harm_high"] == expected.high
        assert result.metric_args["confidence_one_sided"] == 0.95
        assert result.metric_args["outcome"] == "pass" and result.task_type == "text-generation"
    assert eval_results_to_model_index(NAME, card.data.eval_results) == card.data.to_dict()["model-index"]
    assert "python -m scripts.verify release/agent" in card.text


def test_git_says_where_the_code_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert read_git(tmp_path) is None

    def git(*words: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True, capture_output=True
        )

    git("init")
    (tmp_path / "code.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports/verdict.json").write_text("{}")
    state = read_git(tmp_path)
    assert state is not None and state.is_clean and len(state.commit) == 40
    (tmp_path / "code.py").write_text("2")
    state = read_git(tmp_path)
    assert state is not None and not state.is_clean and state.changed == ("code.py",)
    project = tmp_path / "project"  # in a repository with others: what their changes are is no matter of its release
    (project / "reports").mkdir(parents=True)
    (project / "kept.py").write_text("1")
    git("add", "project")
    git("commit", "-m", "two")
    (project / "reports/verdict.json").write_text("{}")
    state = read_git(project)
    assert state is not None and state.is_clean
    (project / "kept.py").write_text("2")
    state = read_git(project)
    assert state is not None and state.changed == ("kept.py",)
