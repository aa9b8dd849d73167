"""Record which options a release of vLLM takes, as a JSON schema; run it with the Python of vLLM's environment.

    /path/to/vllm/bin/python scripts/record_vllm_schema.py

Writes pipeline/products/text/serving/schemas/vllm-<release>.json: the options of `vllm serve` as its config file spells
them, and the keys of its nested speculative config. Types that argparse can't tell (nested configs) are left open.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

SCHEMAS = Path(__file__).resolve().parent.parent / "pipeline/products/text/serving/schemas"
_PLAIN = {"int": "integer", "float": "number", "str": "string"}
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}


def main() -> int:
    """Write the schema of the installed release."""
    import vllm
    from vllm.config import SpeculativeConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # before 0.32
        from vllm.entrypoints.openai.cli_args import make_arg_parser

    version = vllm.__version__.split("+")[0]
    options = {
        name: schema
        for action in make_arg_parser(FlexibleArgumentParser())._actions
        for name, schema in describe_action(action)
    }
    options |= {"model": {"type": "string"}, "speculative-config": describe_dataclass(SpeculativeConfig)}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"vllm serve {version}",
        "type": "object",
        "properties": dict(sorted(options.items())),
        "additionalProperties": False,
    }
    path = SCHEMAS / f"vllm-{version}.json"
    path.write_text(json.dumps(schema, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {len(options)} options")
    return 0


def describe_action(action: argparse.Action) -> list[tuple[str, dict[str, Any]]]:
    """Return the config file's names of one option, each with its schema."""
    names = [name[2:] for name in action.option_strings if name.startswith("--") and not name.startswith("--no-")]
    if action.nargs == 0:
        return [(name, {"type": "boolean"}) for name in names]
    kind = _PLAIN.get(getattr(action.type, "__name__", "str") if action.type else "str")
    schema: dict[str, Any] = {"type": kind} if kind else {}
    if action.choices:
        schema = {"enum": list(action.choices)}
    if action.nargs in ("+", "*"):
        schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
    return [(name, schema) for name in names]


def describe_dataclass(config: Any) -> dict[str, Any]:
    """Return the schema of a nested config; fields that hold other configs are vLLM's own and left out."""
    found = {field.name: describe_type(field.type) for field in dataclasses.fields(config)}
    return {
        "type": "object",
        "properties": {name: schema for name, schema in found.items() if schema is not None},
        "additionalProperties": False,
    }


def describe_type(annotation: Any) -> dict[str, Any] | None:
    """Return the schema of a field's type; None for another config."""
    if annotation in _TYPES:
        return {"type": _TYPES[annotation]}
    if get_origin(annotation) is Literal:
        return {"enum": flatten_choices(annotation)}
    if "Config" in str(annotation):
        return None
    schemas = [describe_type(part) for part in get_args(annotation) if part is not type(None)]
    is_union = get_origin(annotation) not in (list, tuple)
    if not is_union or None in schemas or not schemas:
        return {}
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def flatten_choices(annotation: Any) -> list[Any]:
    """Return the values of a Literal, nested ones included."""
    return [
        value
        for part in get_args(annotation)
        for value in (flatten_choices(part) if get_origin(part) is Literal else [part])
    ]


if __name__ == "__main__":
    sys.exit(main())
