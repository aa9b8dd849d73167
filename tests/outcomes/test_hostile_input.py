"""Broken and hostile files: each is refused in one line, with its exit code, in bounded time and memory."""

from __future__ import annotations

import gzip
import json
import os
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import pipeline.__main__ as command
from pipeline.errors import QuantgateError, SettingsError
from pipeline.evalsets.cards import load_card, load_evalset
from pipeline.products.params import load_params
from pipeline.records.checksums import SUMS, find_changes
from pipeline.records.files import LIMIT, check_size
from pipeline.release.kept_records import restore_records
from tests.fakes.release_project import VERDICT
from tests.fakes.synthetic_records import PRODUCT
from tests.paths import ROOT

GOOD = "case_id,score\n" + "".join(f"c{i},{i % 2}\n" for i in range(60))
HEADER = {"status": "success", "eval": {"task": "sums"}, "plan": {}, "results": {"total_samples": 1}}
SAMPLE = {"id": 1, "epoch": 1, "input": "x", "target": "y", "scores": {"match": {"value": "C"}}}
DEEP = "[" * 100_000 + "]" * 100_000
DIGITS = "9" * 5_000
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
GATE = "gate: {alpha: 0.05, on_inconclusive: block, tolerances: {a/score: {overall: 0.03}}}\n"


def write_zip(path: Path, files: list[tuple[str, str]]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files:
            archive.writestr(name, content)


def write_log(path: Path, sample: str = json.dumps(SAMPLE)) -> None:
    write_zip(path, [("header.json", json.dumps(HEADER)), ("samples/1_epoch_1.json", sample)])


def patch(path: Path, edit: Callable[[bytes], bytes]) -> None:
    write_log(path)
    path.write_bytes(edit(path.read_bytes()))


def encrypt(data: bytes) -> bytes:
    """Set the flag of encryption in both headers of every file of a zip."""
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        parts = data.split(mark)
        data = mark.join([parts[0], *(p[: place - 4] + struct.pack("<H", 1) + p[place - 2 :] for p in parts[1:])])
    return data


def break_stream(data: bytes) -> bytes:
    """Overwrite what was compressed, which then is no stream of zlib."""
    start = data.index(b"header.json") + len(b"header.json")
    return data[:start] + b"\xff" * 20 + data[start + 20 :]


def write_overfull(path: Path) -> None:
    """Write a log of 80 KB that unpacks to 80 MB."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.json", json.dumps(HEADER))
        with archive.open("samples/1_epoch_1.json", "w", force_zip64=True) as file:
            for _ in range(16):
                file.write(b" " * 5_000_000)


def write_twice(path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate name"):
        write_zip(path, [("header.json", json.dumps(HEADER))] * 2 + [("samples/1_epoch_1.json", json.dumps(SAMPLE))])


def write_sparse(path: Path) -> None:
    path.write_text(GOOD)
    os.truncate(path, 2 << 30)


def forbid(path: Path) -> None:
    path.write_text(GOOD)
    path.chmod(0)


SAMPLES = {"doc_id": 0, "filter": "none", "doc_hash": "d", "prompt_hash": "p", "target_hash": "t", "acc": 1.0}
RECORD = {"case_id": "a", "input_digest": "d", "cluster": "c", "prompt": "", "output": "", "fingerprint": ""}
FILES: dict[str, tuple[str, str | bytes | Callable[[Path], object]]] = {
    "empty csv": ("a.csv", ""),
    "empty jsonl": ("a.jsonl", ""),
    "empty eval": ("a.eval", ""),
    "empty json": ("a.json", ""),
    "NUL bytes": ("a.csv", b"\0" * 100),
    "NUL within": ("a.jsonl", b'{"case_id": "a", "score": 1}\n\0\0\n'),
    "UTF-16": ("a.csv", GOOD.encode("utf-16")),
    "UTF-16 lines": ("a.jsonl", '{"case_id": "a", "score": 1}\n'.encode("utf-16")),
    "UTF-16 without a mark": ("a.csv", GOOD.encode("utf-16-le")),
    "Latin-1": ("a.csv", b"case_id,score\ncaf\xe9,1\n"),
    "half a pair as a name": ("a.jsonl", '{"case_id": "\\ud800", "score": 1}\n{"case_id": "\\ud801", "score": 1}\n'),
    "half a pair as a key twice": ("a.jsonl", '{"case_id": "a", "\\ud800": 1, "\\udfff": 0}\n'),
    "a log with half a pair": ("a.eval", lambda p: write_log(p, '{"id": 1, "epoch": 1, "\\ud800": [')),
    "infinite": ("a.jsonl", '{"case_id": "a", "score": 1e999}\n'),
    "NaN": ("a.jsonl", '{"case_id": "a", "score": NaN}\n'),
    "5,000 digits": ("a.jsonl", f'{{"case_id": "a", "score": {DIGITS}}}\n'),
    "5,000 digits in a log": ("a.eval", lambda p: write_log(p, f'{{"id": {DIGITS}}}')),
    "5,000 digits in samples": ("samples_a.jsonl", json.dumps(SAMPLES)[:-1] + f', "x": {DIGITS}}}\n'),
    "a huge field": ("a.csv", f"case_id,score\na,{'1' * 200_000}\n"),
    "an open quote": ("a.csv", GOOD + '"'),
    "deep line": ("a.jsonl", f'{{"case_id": "a", "score": {DEEP}}}\n'),
    "deep log": ("a.json", f'{{"status": "success", "eval": {DEEP}}}'),
    "deep sample": ("a.eval", lambda p: write_log(p, DEEP)),
    "deep samples": ("samples_a.jsonl", json.dumps(SAMPLES)[:-1] + f', "doc": {DEEP}}}\n'),
    "deep record": ("a.jsonl", json.dumps(RECORD)[:-1] + f', "scores": {DEEP}}}\n'),
    "half a pair in a record": ("a.jsonl", json.dumps(RECORD | {"scores": {}}).replace('"a"', '"\\ud800"') + "\n"),
    "5,000 digits in a record": ("a.jsonl", json.dumps(RECORD)[:-1] + f', "scores": {{"s": {DIGITS}}}}}\n'),
    "a key twice": ("a.jsonl", '{"case_id": "a", "score": 1, "score": 0}\n'),
    "a list": ("a.jsonl", "[1]\n"),
    "samples that are a number": ("a.json", json.dumps(HEADER | {"samples": 7})),
    "samples that are words": ("a.json", json.dumps(HEADER | {"samples": ["x"]})),
    "steps that are words": ("a.json", json.dumps(HEADER | {"plan": {"steps": ["x"]}, "samples": [SAMPLE]})),
    "a plan that is a list": ("a.json", json.dumps(HEADER | {"plan": [1], "samples": [SAMPLE]})),
    "messages that are lists": ("a.json", json.dumps(HEADER | {"plan": {"config": 3}, "samples": [SAMPLE]})),
    "doc_hash that is a list": ("samples_a.jsonl", json.dumps(SAMPLES | {"doc_hash": [], "acc": []}) + "\n"),
    "no zip": ("a.eval", "x" * 100),
    "cut zip": ("a.eval", lambda p: patch(p, lambda data: data[: len(data) // 2])),
    "broken zip": ("a.eval", lambda p: patch(p, break_stream)),
    "encrypted zip": ("a.eval", lambda p: patch(p, encrypt)),
    "a zip with names twice": ("a.eval", write_twice),
    "a zip that leaves its folder": ("a.eval", lambda p: write_zip(p, [("../header.json", "{}")])),
    "a zip that is too large": ("a.eval", write_overfull),
    "sparse": ("a.csv", write_sparse),
    "sparse lines": ("a.jsonl", write_sparse),
    "sparse log": ("a.json", write_sparse),
    "a folder": ("a.csv", Path.mkdir),
    "a pipe": ("a.csv", os.mkfifo),
    "a pipe of lines": ("a.jsonl", os.mkfifo),
    "a pipe of a log": ("a.json", os.mkfifo),
    "a device": ("a.csv", lambda p: p.symlink_to("/dev/zero")),
    "a circle": ("a.csv", lambda p: p.symlink_to(p.name)),
    "no permission": ("a.csv", forbid),
    "a fifo's name": ("-.csv", os.mkfifo),
    "a link to what is secret": ("a.csv", lambda p: p.symlink_to(p.parents[1] / "secret")),
}


def run(*argv: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    started = time.perf_counter()
    code = command.main([str(argument) for argument in argv])
    assert time.perf_counter() - started < 20
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "in a folder"])
@pytest.mark.parametrize("kind", FILES)
def test_what_can_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str, is_named: bool
) -> None:
    monkeypatch.setenv(LIMIT, "64")
    if kind == "no permission" and os.geteuid() == 0:
        pytest.skip("root may read everything")
    name, content = FILES[kind]
    (tmp_path / "secret").write_text("root:x:0:0:the word is swordfish\n")
    paths = []
    for side in ("reference", "candidate"):
        path = tmp_path / side / name
        path.parent.mkdir()
        if callable(content):
            content(path)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        paths.append(path if is_named else path.parent)
    if kind == "a folder" and is_named:
        pytest.skip("it is read as one")
    code, out, err = run("compare", *paths, "--tolerance", "0.5", "--better", "score=higher", capsys=capsys)
    said = out + err
    # without a metric to judge, options are named
    assert code == 30 or (code == 1 and ("--" in said or "is both reference and candidate" in said)), said
    assert "Traceback" not in said and len(max(said.splitlines(), key=len)) < 1_500
    if not is_named or kind != "a link to what is secret":
        assert "swordfish" not in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB + GATE, "entries at most with every alias written out"),
        (GATE.replace("0.05", "&a [*a]"), "alias"),
        ("gate: " + DEEP, "100 levels at most"),
        ("gate:\n" + "".join(f"{' ' * i}-\n" for i in range(1, 1_200)), "100 levels at most"),
        (GATE.replace("0.05", DIGITS), "can't be read"),
        (GATE.replace("0.05", "2020-99-99"), ""),
        ("x" * 3_000_000, "1 MiB at most"),
        ("", "gate"),
        ("- 1\n- 2\n", "gate"),
        ("\0", "special characters"),
        (GATE.encode("utf-16"), "not UTF-8"),
        (GATE + "a: 1\na: 2\n", "duplicate key"),
        ("!!python/object/apply:os.system ['true']\n", ""),
        (GATE.replace("0.05", ".inf"), "gate.alpha"),
        (os.mkfifo, "expected a file"),
        (Path.mkdir, "expected a file"),
        (write_sparse, "MiB at most"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[:30].strip() or "empty"),
)
def test_a_policy_or_settings_that_can_not_be_read_are_one_line_and_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | bytes | Callable[[Path], None], said: str
) -> None:
    table, path = tmp_path / "a.csv", tmp_path / "policy.yaml"
    table.write_text(GOOD)
    (tmp_path / "b.csv").write_text(GOOD.replace("c3,1", "c3,0"))
    if callable(text):
        text(path)
    else:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    started = time.perf_counter()
    code, out, err = run("compare", table, tmp_path / "b.csv", "--policy", path, capsys=capsys)
    assert code == 1 and out == "" and err.count("\n") == 1 and said in err and len(err) < 800, err
    with pytest.raises(SettingsError) as refused:
        load_params(path)
    assert "\n" not in str(refused.value)
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize(
    "text",
    [
        "products: [{}]",
        "products: {{}}\ncandidates: {{a: {}}}",
        "products: {{a: {{kind: {}}}}}\ncandidates: {{a: {{}}}}",
        "products: {{a: {{kind: text}}}}\ncandidates: {{a: {{product: {}}}}}",
        "products: {{a: {{kind: text, reference: [{}]}}}}\ncandidates: {{a: {{product: a}}}}",
    ],
)
def test_a_long_value_of_the_settings_is_cut_in_the_line_that_refuses_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(text.format("x" * 100_000))
    with pytest.raises(SettingsError) as refused:
        load_params(path)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


@pytest.mark.parametrize("text", [BOMB, DEEP, "name: &a [*a]", f"name: {DIGITS}"], ids=lambda text: text[:10])
def test_a_card_that_can_not_be_read_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "card.yaml").write_text(text)
    with pytest.raises(QuantgateError) as refused:
        load_card(tmp_path)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "line",
    [f'{{"text": {DIGITS}}}', DEEP, '{"text": "\\ud800", "id": "a"}', "secret words"],
    ids=["digits", "deep", "half a pair", "words"],
)
def test_cases_that_can_not_be_read_are_one_line_without_their_words(tmp_path: Path, line: str) -> None:
    folder = copy_evalset(tmp_path)
    (folder / "cases.jsonl").write_text(line + "\n")
    with pytest.raises(QuantgateError) as refused:
        load_evalset(folder)
    assert "\n" not in str(refused.value) and "secret" not in str(refused.value) and len(str(refused.value)) < 500


def copy_evalset(folder: Path) -> Path:
    target = folder / "prose"
    target.mkdir()
    cards = [path.read_text() for path in sorted((ROOT / "evalsets").glob("*/card.yaml"))]
    (target / "card.yaml").write_text(next(card for card in cards if "kind: documents" in card))
    return target


def test_cases_behind_a_link_that_leaves_the_folder_are_not_read(tmp_path: Path) -> None:
    folder = copy_evalset(tmp_path)
    (tmp_path / "secret").write_text('{"text": "the word is swordfish"}\n')
    (folder / "cases.jsonl").symlink_to(tmp_path / "secret")
    with pytest.raises(QuantgateError, match="a link that leads out of it") as refused:
        load_evalset(folder)
    assert "swordfish" not in str(refused.value)


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.write_text(""),
        lambda p: p.write_bytes(b"\xff\xfe{"),
        lambda p: p.write_text(DEEP),
        os.mkfifo,
        lambda p: p.write_text(f'{{"outcome": {DIGITS}}}'),
        lambda p: p.write_text('{"outcome": "\\ud800"}'),
        write_sparse,
        lambda p: p.write_text("{"),
        Path.mkdir,
    ],
    ids=["empty", "UTF-16", "deep", "pipe", "digits", "half a pair", "sparse", "cut", "folder"],
)
def test_a_verdict_that_can_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], write: Callable[[Path], object]
) -> None:
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    verdict = tmp_path / VERDICT
    verdict.parent.mkdir(parents=True)
    write(verdict)
    monkeypatch.chdir(tmp_path)
    code, out, err = run("gate", PRODUCT, capsys=capsys)
    assert (code, out, err.count("\n")) == (30, "", 1) and len(err) < 500, err
    assert str(VERDICT) in err and "found no file" not in err, "it was not even looked for where it lies"


def test_the_limit_is_a_setting_and_a_wrong_one_is_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text(GOOD if name == "a.csv" else GOOD.replace("c3,1", "c3,0") + " " * (2 << 20))
    monkeypatch.setenv(LIMIT, "1")
    code, out, _ = run("compare", tmp_path / "a.csv", tmp_path / "b.csv", capsys=capsys)
    assert code == 30 and "expected 1 MiB at most, got 3 MiB" in out and LIMIT in out
    for wrong in ("0", "-1", "1e3", "x", "", "²"):
        monkeypatch.setenv(LIMIT, wrong)
        code, out, err = run("compare", tmp_path / "a.csv", tmp_path / "b.csv", capsys=capsys)
        assert (code, out) == (1, "") and err.startswith(f"quantgate: {LIMIT}: expected a whole number"), err
    monkeypatch.delenv(LIMIT)
    check_size(512 << 20, "a.csv")
    with pytest.raises(QuantgateError, match="513 MiB"):
        check_size((512 << 20) + 1, "a.csv")


def test_packed_records_that_unpack_to_too_much_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bundle/evaluations/a/choices.jsonl.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(b" " * (3 << 20)))
    monkeypatch.setenv(LIMIT, "2")
    with pytest.raises(QuantgateError, match=r"unpacked: expected 2 MiB at most"):
        restore_records(tmp_path / "bundle", tmp_path / "build")


def test_sums_that_are_a_pipe_are_told_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SUMS)
    assert "found no text file of that name" in find_changes(tmp_path)[0]


def test_a_named_link_does_not_show_what_it_leads_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its first line stood in the message, as if it were the header of a table."""
    (tmp_path / "secret").write_text("SECRETLINE\nmore\n")
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).symlink_to(tmp_path / ("secret" if name == "b.csv" else "other"))
    (tmp_path / "other").write_text("case_id,score\n" + "".join(f"c{i},1\n" for i in range(60)))
    code = command.main(["compare", str(tmp_path / "a.csv"), str(tmp_path / "b.csv")])
    said = capsys.readouterr()
    assert code == 30 and "SECRETLINE" not in said.out + said.err and "b.csv:1: expected column names" in said.out
