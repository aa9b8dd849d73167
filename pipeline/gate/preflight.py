"""Checks of what is asked of the gate, before any model runs: it can be proven, and was not loosened in silence.

Nor is a stage of dvc.yaml frozen (`check_stages`), whose results DVC would keep whatever is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from ruamel.yaml.error import YAMLError

from pipeline.errors import SettingsError
from pipeline.evalsets.examples import check_own_cases
from pipeline.gate.loosening import check_loosening, name_material
from pipeline.gate.plan import check_plan
from pipeline.gate.suite_sizes import load_evalsets, plan_product
from pipeline.gate.verdicts import build_policy
from pipeline.gate.wording import use_metrics
from pipeline.settings.base import Product, describe_yaml_error
from pipeline.settings.yaml_files import read_yaml


def check_gates(
    products: Iterable[Product],
    root: Path,
    weights: Mapping[str, str] = MappingProxyType({}),
    servings: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Check the gate of every product; warn of tolerances that can't be proven and need not be, and of example cases.

    A warning names its product.

    Args:
        products: of params.yaml.
        root: of the project.
        weights: digest of each product's reference, where it is known before any work.
        servings: likewise, of how it is run.

    Raises:
        SettingsError: a tolerance that must be proven can't be, a setting is looser or cases are others than at the
            last release.
    """
    warnings = list[str]()
    for product in products:
        evalsets = load_evalsets(product, root)
        cases = {name: evalset.digest for name, evalset in evalsets.items()}
        name = product.name
        check_cases(product, cases, root, weights=weights.get(name), serving=servings.get(name))
        with use_metrics(product.metrics):
            warnings += map(product.name_in, check_plan(product, plan_product(product, evalsets, root)))
        try:
            check_own_cases(product, root)
        except SettingsError as error:
            warnings.append(product.name_in(str(error)))
    return warnings


def check_cases(
    product: Product, cases: Mapping[str, str], root: Path, *, weights: str | None = None, serving: str | None = None
) -> None:
    """Check that settings looser than at the last release, and cases or a reference that are others, have reasons.

    Args:
        product: settings.
        cases: digest of each eval's, where it is known before any work.
        root: of the project.
        weights: digest of the reference's; None: not known yet.
        serving: digest of how the reference is run; None: not known yet.

    Raises:
        SettingsError: one has none, or a reason is not needed.
    """
    policy, material = build_policy(product), name_material(weights=weights, cases=cases, serving=serving)
    late = {key for key in policy.loosened if key.startswith("reference.") or key.endswith(".cases")} - set(material)
    judged = {key: reason for key, reason in policy.loosened.items() if key not in late}
    check_loosening(policy.model_copy(update={"loosened": judged}), root, material=material)
    check_loosening(policy, root, material={})  # reasons of what is known after the evaluation alone


def check_stages(path: Path) -> None:
    """Refuse a stage that DVC never runs, so that results of other settings would be judged.

    Args:
        path: of dvc.yaml; nothing is refused where there is none.

    Raises:
        SettingsError: a stage is frozen, or the file holds no stages.
    """
    if not path.is_file():
        return
    try:
        stages = read_yaml(path)["stages"]
        frozen = [name for name, stage in stages.items() if stage.get("do", stage).get("frozen")]
    except YAMLError as error:
        raise SettingsError(f"{path}: not YAML: {describe_yaml_error(error)}") from None
    except (TypeError, KeyError, AttributeError):
        raise SettingsError(
            f"{path}: expected `stages`, each with its settings, got something else; `dvc stage list` says where"
        ) from None
    if frozen:
        raise SettingsError(
            f"{path}: stages.{frozen[0]}.frozen: expected a stage that runs when it is out of date, "
            "got true; remove the line"
        )
