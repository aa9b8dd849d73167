"""Are there enough prompts for the benchmark? Asked before any model runs, where no server is needed to know them.

They are counted as the benchmark counts them, with the reference's tokenizer in place of its server. That takes seconds
of imports, and stage `env` runs every time: the outcome is kept for as long as nothing changes that it follows from.

Not covered: a reference that somebody else serves, or that vLLM gives another tokenizer or template than its folder
has.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import SettingsError
from pipeline.products.text.benchmark import prompts
from pipeline.products.text.benchmark.prompts import Prompt, load_prompts, plan_grid
from pipeline.products.text.chat_templates import has_chat_template
from pipeline.products.text.evals.known_tasks import describe_task, digest_evalsets
from pipeline.products.text.evals.material import load_task
from pipeline.products.text.settings import CandidateSettings, TextProduct, VllmEngine
from pipeline.records.digests import digest_file, digest_json
from pipeline.records.files import write_text
from pipeline.running.environment import read_libraries
from pipeline.running.hub import locate_checkpoint
from pipeline.running.kept_digests import digest_watched, read_kept
from pipeline.settings.base import ENV

KEPT = ENV / "prompts.json"  # by product: a digest of what it follows from, and what is wrong with its prompts, or ""


def check_prompts(product: TextProduct, root: Path) -> None:
    """Refuse a benchmark whose bands the prompts of the evals can't fill.

    Args:
        product: the benchmark and the evals, whose paths start at the current folder.
        root: of the project.

    Raises:
        SettingsError: as `plan_grid` does.
    """
    if not product.benchmark.candidates or not _is_tokenizer_known(product.candidates[product.reference]):
        return
    grounds, kept = _digest_grounds(product, root), read_kept(root / KEPT)
    known, problem = kept.get(product.name, ["", ""])
    if known != grounds:
        problem = _find_problem(product, root)
        if problem is None:
            return
        write_text(root / KEPT, json.dumps(kept | {product.name: [grounds, problem]}, indent=0) + "\n")
    if problem:
        raise SettingsError(product.locate(problem))


def _is_tokenizer_known(reference: CandidateSettings) -> bool:
    options = reference.engine.options if isinstance(reference.engine, VllmEngine) else {}
    return not reference.engine.is_attached and not any("tokenizer" in o or "template" in o for o in options)


def _digest_grounds(product: TextProduct, root: Path) -> str:
    """Return the digest of what the outcome follows from; of the code, that which counts."""
    return digest_json(
        [
            product.benchmark.build_work().model_dump(mode="json"),
            {name: settings.model_dump(mode="json") for name, settings in product.evals.items()},
            digest_evalsets(product, root),
            digest_watched(product.candidates[product.reference].checkpoint, root),
            [digest_file(Path(file)) for file in (__file__, prompts.__file__)],
            read_libraries(),
        ]
    )


def _find_problem(product: TextProduct, root: Path) -> str | None:
    """Return why the bands can't be filled; "" where they can, None where only a server can tell."""
    found = load_prompts(product, root, _ask_tasks(product, root))
    try:
        counter: Any = _TokenCounter(locate_checkpoint(product.candidates[product.reference].checkpoint, root))
        asyncio.run(plan_grid(found, counter, product.benchmark))
    except SettingsError as error:
        return str(error)
    except Exception:  # a tokenizer or template that fails here is the server's to explain
        return None
    return ""


def _ask_tasks(product: TextProduct, root: Path) -> Iterator[Prompt]:
    """Yield the prompts of tasks that are answered in words, as they will be sent."""
    is_plain = not has_chat_template(product, root)
    for name, settings in product.task_evals.items():
        if describe_task(name, settings, root).is_answered_in_words:
            for question in load_task(name, settings).questions:
                yield Prompt(name, question.case_id, question.build_content(is_plain=is_plain), None)


class _TokenCounter:
    """Stands in for the client of a server that counts tokens."""

    def __init__(self, folder: Path) -> None:
        from pipeline.products.text.model_loading import load_tokenizer

        self._tokenizer = load_tokenizer(folder)

    async def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text."""
        return self._tokenizer(list(texts))["input_ids"]

    async def tokenize_chat(self, messages: Sequence[Any], *, tools: Any = None) -> list[int]:
        """Return the token ids of a conversation as the server's chat template renders it, the answer begun."""
        from pipeline.products.text.serving.chat_template import prepare_messages, tokenize_messages

        return tokenize_messages(self._tokenizer, prepare_messages(self._tokenizer, messages), tools)
