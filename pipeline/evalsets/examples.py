"""An evalset of made-up cases, sealed, as a product starts with: its user puts cases of their own in their place.

There are as many as the gate takes at least, so that a first run gives a verdict. No release is judged by them: it
would pin them.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from pipeline.errors import SettingsError
from pipeline.evalsets.cards import CARD_FILE
from pipeline.evalsets.cases import CASES_FILE
from pipeline.settings.base import Product
from pipeline.settings.yaml_files import read_yaml

_MADE_BY = "quantgate init"

COLOURS = ("blue", "green", "red", "white", "black", "yellow", "brown", "grey")
NUMBERS = (2, 3, 4, 6)  # with the colours 32 cases: the gate takes 30 clusters at least
_LINE_WIDTH = 120


def build_evalset(
    folder: Path,
    cases: Sequence[Mapping[str, Any]],
    *,
    kind: str,
    cluster: str,
    pictures: Mapping[str, bytes] | None = None,
    **more: Any,
) -> dict[Path, bytes]:
    """Return the files of an evalset.

    Args:
        folder: of the evalset, which is named after it.
        cases: as cases.jsonl has them.
        kind: of the cases.
        cluster: what a cluster is, in words.
        pictures: by path in the folder.
        more: further keys of the card.
    """
    lines = "".join(json.dumps(case) + "\n" for case in cases).encode()
    card = {
        "name": folder.name,
        "version": "0",
        "licence": "CC0-1.0",
        "kind": kind,
        "description": f"{len(cases)} made-up examples of the format, for a first run.",
        "made_by": _MADE_BY,
        "cluster": cluster,
        **more,
        "num_cases": len(cases),
        "sha256": hashlib.sha256(lines).hexdigest(),
        "num_clusters": len({case["cluster"] for case in cases}),
        "buckets": {},
    }
    text = io.StringIO()
    text.write(
        f"# Put your own cases into {CASES_FILE}, and describe them here. Then: python -m evalsets.seal {folder}\n"
    )
    yaml = YAML()
    yaml.width = _LINE_WIDTH
    yaml.dump(card, text)
    files = {folder / name: content for name, content in (pictures or {}).items()}
    return files | {folder / CASES_FILE: lines, folder / CARD_FILE: text.getvalue().encode()}


def check_own_cases(product: Product, root: Path) -> None:
    """Refuse an eval whose cases are examples still.

    Raises:
        SettingsError: one has them.
    """
    for settings in product.evals.values():
        folder = getattr(settings, "evalset", None) or getattr(settings, "include_path", None)
        card = root / str(folder) / CARD_FILE
        if folder and card.is_file() and read_yaml(card).get("made_by") == _MADE_BY:
            raise SettingsError(
                f"{folder}: expected cases of your own before a release, which pins them, found the examples of "
                f"`{_MADE_BY}`; replace them, and say in {CARD_FILE} who made yours (made_by)"
            )
