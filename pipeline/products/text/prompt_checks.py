"""Do the longest prompts fit, and are there enough for the benchmark? Asked before any model runs.

Tokens are counted as the server counts them, by the reference's tokenizer. That takes seconds of imports, and stage
`env` runs every time: the outcome is kept for as long as nothing changes that it follows from.

Not covered: a reference that somebody else serves, or that vLLM gives another tokenizer or template than its folder
has. Of a conversation the first turn is known, and no other. The evaluation looks at more prompts than the longest.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import SettingsError
from pipeline.evalsets.cards import NOTES
from pipeline.products.text.benchmark import prompts
from pipeline.products.text.benchmark.prompts import Prompt, load_prompts, plan_grid
from pipeline.products.text.chat_templates import has_chat_template
from pipeline.products.text.evals import calls, context, framing, generation, material
from pipeline.products.text.evals.context import NUM_LONGEST
from pipeline.products.text.evals.framing import read_frame
from pipeline.products.text.evals.generation import Question, count_tokens
from pipeline.products.text.evals.known_tasks import KnownTask
from pipeline.products.text.evals.material import count_bytes, load_task
from pipeline.products.text.settings import CandidateSettings, TextProduct, VllmEngine
from pipeline.records.digests import digest_file, digest_folder, digest_json
from pipeline.records.files import write_text
from pipeline.running.environment import read_libraries
from pipeline.running.hub import locate_checkpoint
from pipeline.running.kept_digests import digest_watched, read_kept
from pipeline.settings.base import ENV

KEPT = ENV / "prompts.json"  # by product: a digest of what it follows from, and what is wrong with its prompts, if so
_CODE = (prompts, calls, context, framing, generation, material)  # what a prompt and its limit follow from


class _Asked(NamedTuple):
    """A prompt, how many tokens are to fit behind it, and the setting that says so; "" where an answer is scored."""

    prompt: Prompt
    limit: int = 0
    setting: str = ""


def check_prompts(product: TextProduct, tasks: Mapping[str, KnownTask], root: Path) -> None:
    """Refuse prompts that are too long for the context, and a benchmark whose bands the prompts can't fill.

    Args:
        product: the benchmark and the evals, whose paths start at the current folder.
        tasks: of `describe_tasks`.
        root: of the project.

    Raises:
        SettingsError: names the case, its tokens and the limits; or as `plan_grid` does.
    """
    if not product.may_generate or not _is_tokenizer_known(product.candidates[product.reference]):
        return
    grounds, kept = _digest_grounds(product, tasks, root), read_kept(root / KEPT)
    known, problem = kept.get(product.name, ["", ""])
    if known != grounds:
        problem = _find_problem(product, tasks, root)
        write_text(root / KEPT, json.dumps(kept | {product.name: [grounds, problem]}, indent=0) + "\n")
    if problem:
        raise SettingsError(product.locate(problem))


def _is_tokenizer_known(reference: CandidateSettings) -> bool:
    options = reference.engine.options if isinstance(reference.engine, VllmEngine) else {}
    return not reference.engine.is_attached and not any("tokenizer" in o or "template" in o for o in options)


def _digest_grounds(product: TextProduct, tasks: Mapping[str, KnownTask], root: Path) -> str:
    """Return the digest of what the outcome follows from; of the code, that which counts."""
    return digest_json(
        [
            product.benchmark.build_work().model_dump(mode="json") if product.benchmark.candidates else None,
            product.serving.context_length,
            product.serving.max_tokens,
            {name: settings.model_dump(mode="json") for name, settings in product.evals.items()},
            {name: task.digest for name, task in tasks.items()},
            {name: digest_folder(root / e.evalset, ignore=NOTES) for name, e in product.chat_evals.items()},
            digest_watched(product.candidates[product.reference].checkpoint, root),
            [digest_file(Path(module.__file__ or "")) for module in (sys.modules[__name__], *_CODE)],
            read_libraries(),
        ]
    )


def _find_problem(product: TextProduct, tasks: Mapping[str, KnownTask], root: Path) -> str:
    """Return what is wrong with the prompts; "" where nothing is, or only a server can tell."""
    is_plain, max_tokens = not has_chat_template(product, root), product.serving.max_tokens
    in_words = [
        _Asked(Prompt(name, q.case_id, q.build_content(is_plain=is_plain), None), *q.find_limit(max_tokens))
        for name, q in _list_questions(product, tasks)
    ]
    found = load_prompts(product, root, [one.prompt for one in in_words])
    asked = [
        *in_words,
        *(_Asked(one, max_tokens, "serving.max_tokens") for one in found if one.eval_name in product.chat_evals),
        *(
            _Asked(Prompt(name, case_id, text, None))
            for name, task in tasks.items()
            for case_id, text in task.longest_scored
        ),
    ]
    try:
        counter: Any = _TokenCounter(locate_checkpoint(product.candidates[product.reference].checkpoint, root))
        if problem := asyncio.run(_find_too_long(asked, counter, product.serving.context_length)):
            return problem
        if product.benchmark.candidates:
            asyncio.run(plan_grid(found, counter, product.benchmark))
    except SettingsError as error:
        return str(error)
    except Exception:  # a tokenizer or template that fails here is the server's to explain
        pass
    return ""


def _list_questions(product: TextProduct, tasks: Mapping[str, KnownTask]) -> Iterator[tuple[str, Question]]:
    """Yield the prompts of tasks that are answered in words, each with its eval."""
    for name, settings in product.task_evals.items():
        if tasks[name].is_answered_in_words:
            yield from ((name, question) for question in load_task(name, settings).questions)


async def _find_too_long(asked: Sequence[_Asked], counter: Any, context_length: int) -> str:
    """Return which of the longest prompts of an eval does not fit; "" where all do."""
    by_eval: dict[str, list[_Asked]] = {}
    for one in sorted(asked, key=_count_bytes, reverse=True):
        by_eval.setdefault(one.prompt.eval_name, []).append(one)
    for name, longest in by_eval.items():
        for one in longest[:NUM_LONGEST]:
            size = await _count_read(one, counter)
            if size + one.limit > context_length:
                behind = f", which with {one.setting} {one.limit} are" if one.setting else ","
                return (
                    f"evals.{name}: case {one.prompt.case_id!r} is too long: its prompt has {size} tokens{behind} "
                    f"above serving.context_length {context_length}; raise the length"
                    f"{f', lower {one.setting}' * bool(one.setting)}, or shorten the case"
                )
    return ""


async def _count_read(asked: _Asked, counter: Any) -> int:
    """Return the tokens of a prompt that a server reads; the last one of what is scored is predicted alone."""
    if asked.setting:
        return await count_tokens(counter, asked.prompt.content, tools=asked.prompt.tools)
    frame = await read_frame(counter, counter.folder)
    (ids,) = await counter.tokenize([asked.prompt.content], add_special_tokens=False)
    return len(frame.frame_context(ids)) - 1


def _count_bytes(asked: _Asked) -> int:
    content = asked.prompt.content
    texts = [content] if isinstance(content, str) else [str(message.get("content") or "") for message in content]
    return sum(map(count_bytes, texts))


class _TokenCounter:
    """Stands in for the client of a server that counts tokens."""

    def __init__(self, folder: Path) -> None:
        from pipeline.products.text.model_loading import load_tokenizer

        self.folder, self._tokenizer = folder, load_tokenizer(folder)
        self._tokenizer.model_max_length = sys.maxsize  # else it warns of a length that is asked here

    async def tokenize(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text."""
        return self._tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"]

    async def tokenize_chat(self, messages: Sequence[Any], *, tools: Any = None) -> list[int]:
        """Return the token ids of a conversation as the server's chat template renders it, the answer begun."""
        from pipeline.products.text.serving.chat_template import prepare_messages, tokenize_messages

        return tokenize_messages(self._tokenizer, prepare_messages(self._tokenizer, messages), tools)
