"""A kind that params.yaml accepts is a kind that runs, in a file of its name."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, get_args

import pytest

from pipeline.gate.audits import Auditor
from pipeline.products import KINDS
from pipeline.products.images.settings import ImageStep
from pipeline.products.params import load_params
from pipeline.products.text.settings import EvalSettings
from pipeline.products.text.step_settings import Step
from pipeline.settings.base import Product
from tests.paths import ROOT


def union_kinds(annotated: Any) -> set[str]:
    """List the discriminators of a union of settings."""
    union = get_args(annotated)[0]
    return {get_args(member.model_fields["kind"].annotation)[0] for member in get_args(union) or (union,)}


def name_kind(settings: Any) -> str:
    """Return the discriminator of one class of settings."""
    return str(get_args(settings.model_fields["kind"].annotation)[0])


def registry_kinds(package: str) -> set[str]:
    """Read the keys of the one dict in a package's registry.py, without importing what it names."""
    tree = ast.parse((ROOT / "pipeline/products/text" / package / "registry.py").read_text(encoding="utf-8"))
    dicts = [
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign | ast.Assign) and isinstance(node.value, ast.Dict)
    ]
    assert len(dicts) == 1, "a registry is one dict: kind -> function"
    return {str(key.value) for key in dicts[0].keys if isinstance(key, ast.Constant)}


def test_kinds_of_products_registry_and_folders_agree() -> None:
    """Nothing else tells one kind from another: a folder, and a line in the list."""
    folders = {path.parent.name for path in (ROOT / "pipeline/products").glob("*/__init__.py")}
    assert set(KINDS) == folders
    assert {get_args(kind.settings.model_fields["kind"].annotation) for kind in KINDS.values()} == {
        (name,) for name in KINDS
    }


@pytest.mark.parametrize(("package", "union"), [("optimize", Step), ("evals", EvalSettings)], ids=["optimize", "evals"])
def test_union_registry_and_files_agree(package: str, union: Any) -> None:
    kinds = union_kinds(union)
    assert registry_kinds(package) == kinds
    for kind in kinds:
        assert (ROOT / "pipeline/products/text" / package / f"{kind}.py").is_file(), (
            f"expected pipeline/products/text/{package}/{kind}.py"
        )


def test_image_steps_are_those_of_the_settings() -> None:
    tree = ast.parse((ROOT / "pipeline/products/images/steps.py").read_text(encoding="utf-8"))
    steps = next(n.value for n in tree.body if isinstance(n, ast.AnnAssign) and isinstance(n.value, ast.Dict))
    assert {key.value for key in steps.keys if isinstance(key, ast.Constant)} == union_kinds(ImageStep)


def test_every_eval_kind_declares_its_metrics() -> None:
    for kind in KINDS.values():
        asked = get_args(kind.settings.model_fields["evals"].annotation)[1]
        assert set(kind.evals) == (union_kinds(asked) if get_args(asked) else {name_kind(asked)})
        for name, settings in kind.evals.items():
            assert name_kind(settings) == name and any(metric.is_gated for metric in settings.metrics)
            assert settings.hub_task, "the card of a released candidate names it"


def test_a_kind_can_not_leave_out_the_check_of_what_ships() -> None:
    """A method that is not there would return None, which is what a check returns that found nothing."""

    class Forgetful(Auditor[Product]):
        def read_candidate(self, build: Path, name: str, product: Product) -> None:
            return None

    with pytest.raises(TypeError, match="check_material"):
        Forgetful()  # type: ignore[abstract]


def test_shipped_settings_are_valid() -> None:
    load_params(ROOT / "params.yaml")
