"""All checks before any work: which mistake is told first, and what only those are told who do the work here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import SettingsError, SizeError
from pipeline.products import KINDS, checking, prefetch
from pipeline.products.checking import check_products
from pipeline.products.inputs import WARNED, WORKS
from pipeline.products.params import Params, load_params
from pipeline.running.environment import read_machine
from pipeline.settings.base import Product
from tests.paths import ROOT


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Check two products, of which the kinds say what is given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(WARNED, raising=False)
    for name in ("make_missing", "prove_gpus"):
        monkeypatch.setattr(checking, name, lambda *_, **__: None)
    for name in ("list_gpu_problems", "list_held_gpus", "list_bytecode_problems"):
        monkeypatch.setattr(checking, name, lambda *_: [])

    def run(say: Callable[[Product, bool], list[str]], gates: Callable[..., list[str]] = lambda *_: []) -> None:
        params: Params = load_params(ROOT / "params.yaml")
        for kind in ("images", "vision"):
            monkeypatch.setattr(type(KINDS[kind]), "check", lambda _, p, *__, is_local: say(p, is_local))
        monkeypatch.setattr(checking, "check_gates", gates)
        products = [params.products[name] for name in ("shots", "people")]
        check_products(params, products, read_machine(), caller="plan")

    return run


def test_another_mistake_comes_before_a_machine_that_is_too_small(check: Callable[..., None]) -> None:
    """Where weights are too large for a laptop, `make plan` said nothing of the mistake that the server met next."""

    def say(product: Product, _: bool) -> list[str]:
        if product.name == "shots":
            raise SizeError("too large")
        raise SettingsError("a mistake")

    with pytest.raises(SettingsError, match="a mistake"):
        check(say)


def test_a_frozen_stage_is_refused_before_any_product_is_looked_at(check: Callable[..., None]) -> None:
    """Each product read all of dvc.yaml for it."""
    Path("dvc.yaml").write_text("stages:\n  evaluate: {cmd: 'true', frozen: true}\n")

    def say(product: Product, _: bool) -> list[str]:
        raise SettingsError(f"{product.name} was looked at")

    with pytest.raises(SettingsError, match=r"dvc\.yaml: stages\.evaluate\.frozen: expected"):
        check(say)


def test_a_machine_that_is_too_small_is_told_behind_all_warnings(
    check: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    def say(product: Product, _: bool) -> list[str]:
        if product.name == "shots":
            raise SizeError("too large")
        return ["a warning"]

    asked: list[str] = []

    def gates(products: list[Product], *_: Any) -> list[str]:
        asked.extend(product.name for product in products)
        return []

    with pytest.raises(SizeError, match="too large"):
        check(say, gates)
    assert asked == ["shots", "people"] and "plan: warning: people: a warning" in capsys.readouterr().err


def test_what_is_not_here_is_refused_where_the_work_is_done_alone(
    check: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CI job that judges what others made has no engine, and was blocked by stage `env`."""
    told: list[bool] = []

    def say(_: Product, is_local: bool) -> list[str]:
        told.append(is_local)
        return []

    monkeypatch.delenv(WORKS, raising=False)
    check(say)
    monkeypatch.setenv(WORKS, "1")
    check(say)
    assert told == [False, False, True, True]


def test_a_run_that_makes_what_is_due_says_so_to_stage_env(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKS, raising=False)
    monkeypatch.setattr(prefetch, "read_own_commands", lambda *_: [f'test "${WORKS}" = 1'])
    prefetch.run_env()
