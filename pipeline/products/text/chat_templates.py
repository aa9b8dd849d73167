"""The chat template of a checkpoint, as its files have it: is there one, and is it Jinja?

A model without one is asked by plain prompts. That is decided by the reference for its whole product, so that both
sides are asked alike.

Not covered: rendering (`serving/chat_template.py`), and a template that a server is given beside the folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError
from pipeline.products.text.model_config import read_json
from pipeline.products.text.settings import TextProduct
from pipeline.running.hub import locate_checkpoint

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILE = "tokenizer_config.json"
# transformers adds this tag; it only marks where an answer is, so the text without it parses alike
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")


def has_chat_template(product: TextProduct, root: Path) -> bool:
    """Tell whether the models of a product are asked in chats: the reference's folder says so for all of them."""
    return holds_chat_template(locate_checkpoint(product.candidates[product.reference].checkpoint, root))


def holds_chat_template(folder: Path) -> bool:
    """Tell whether a checkpoint has a chat template."""
    path = folder / TOKENIZER_FILE
    tokenizer = read_json(path) if path.is_file() else {}
    return (folder / TEMPLATE_FILE).is_file() or bool(tokenizer.get("chat_template"))


def check_chat_template(folder: Path, tokenizer: dict[str, Any]) -> None:
    """Refuse a folder without a chat template, and a template that is no Jinja.

    Raises:
        CheckpointError: names the file and, of a template, the line.
    """
    import jinja2

    grammar = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    for where, text in read_chat_templates(folder, tokenizer):
        if not text.strip():
            raise CheckpointError(
                f"{where}: expected a chat template, got an empty one, which shows a model none of its prompt; copy it "
                "from the source"
            )
        try:
            # line breaks inside a tag are kept, so that the error's line is the file's
            grammar.parse(_GENERATION_TAG.sub(lambda tag: "\n" * tag[0].count("\n"), text))
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                f"{where}:{error.lineno}: expected a chat template in Jinja, got a syntax error: "
                f"{str(error.message).rstrip('.')}; copy it from the source"
            ) from None


def read_chat_templates(folder: Path, tokenizer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield where each template is and its text; transformers reads the first of the two places that has one.

    Raises:
        CheckpointError: there is none, or it is no text.
    """
    path = folder / TEMPLATE_FILE
    if path.is_file():
        try:
            yield str(path), path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path}: expected a chat template in UTF-8: {error}; copy it again") from None
        return
    templates = tokenizer.get("chat_template")
    where = f"{folder / TOKENIZER_FILE}: chat_template"
    if isinstance(templates, list) and templates:  # several under names
        yield from (
            (f"{where}.{i}", str(entry["template"])) for i, entry in enumerate(templates) if "template" in entry
        )
    elif isinstance(templates, str):
        yield where, templates
    else:
        hint = (
            "copy it out of chat_template.json, which no tokenizer reads"
            if (folder / "chat_template.json").is_file()
            else "copy it from the source, or drop the evals of kind tool_calls and trajectories"
        )
        raise CheckpointError(f"{path}: expected a chat template, found none here or in tokenizer_config.json; {hint}")
