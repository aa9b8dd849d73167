"""How a task's prompts are answered in the model's own words: asked, cut at the task's stop strings, and counted.

A model without a chat template gets a prompt as it stands, and ends at a stop string. One with a template gets it as
the message of a user, and its answer is cut afterwards.

Not covered: conversations (`tool_calls.py`, `trajectories.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.errors import RequestError, SettingsError, suggest
from pipeline.products.text.evals.context import EvalContext
from pipeline.products.text.serving.client import Client, Reply
from pipeline.products.text.serving.engines.engine import gather
from pipeline.records.digests import digest_json
from pipeline.records.joining import join_by_keys
from pipeline.records.record_files import Record
from pipeline.records.speculation import SpeculationCounts

Content = str | list[dict[str, Any]]  # of a prompt: a text as it stands, or a conversation in OpenAI's style
GENERATE = "generate_until"  # lm-eval's name of such requests
# names of a task's limit, by their precedence in lm-eval
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_OPTIONS = (*_LIMITS, "until", "do_sample", "temperature", "top_p", "top_k", "num_beams")  # of tasks


@dataclass(frozen=True)
class Question:
    """One prompt of an lm-eval task that the model answers in its own words.

    Attributes:
        case_id: of its document.
        text: the prompt.
        stops: texts that end the answer.
        max_tokens: the task's own limit; None where it sets none.
    """

    case_id: str
    text: str
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None

    @property
    def digest(self) -> str:
        """Of all that is asked."""
        return digest_json([self.text, self.stops, self.max_tokens])

    def build_content(self, *, is_plain: bool) -> Content:
        """Return what is sent: the text itself, or the message of a user."""
        return self.text if is_plain else [{"role": "user", "content": self.text}]

    def find_limit(self, max_tokens: int) -> tuple[int, str]:
        """Return how many tokens its answer may have, and the setting that says so."""
        if self.max_tokens is not None and self.max_tokens < max_tokens:
            return self.max_tokens, "the task's max_gen_toks"
        return max_tokens, "serving.max_tokens"


class Answer(Record):
    """What a model wrote, as it is journaled; `cut_by` names the setting that ended it before the model did."""

    text: str
    num_tokens: int
    cut_by: str = ""
    speculation: SpeculationCounts | None = None


def digest_request(kind: str, arguments: Sequence[Any]) -> str:
    """Return the digest that the answer to one of lm-eval's requests is journaled under."""
    return digest_json([kind, *arguments])


def name_case(task: str, document: Any, document_id: Any) -> str:
    """Return the id of a task's document: its own, or its place."""
    return str(document.get("id", f"{task}-{document_id}") if isinstance(document, dict) else f"{task}-{document_id}")


def list_buckets(document: Any, task: str, asked: str) -> tuple[str, ...]:
    """Return the buckets of a task's document: its own, and where several tasks are asked as one, its task.

    Args:
        document: of the task.
        task: its name.
        asked: name of the task, or of the group or tag that it is a member of.
    """
    own = tuple(map(str, document.get("buckets", ()))) if isinstance(document, dict) else ()
    return own if task == asked else (task, *own)


def name_cluster(document: Any) -> str:
    """Return the cluster of a task's document, or what stands for a document that names none."""
    named = document if isinstance(document, dict) else {}
    return str(named["cluster"]) if "cluster" in named else digest_json(repr(document))


def join_repeats(
    documents: Sequence[Any], asked: Sequence[Sequence[Any]], clusters: Sequence[str], *, num_fewshot: int
) -> list[str]:
    """Return clusters in which documents that ask the same are together, with all that is in a cluster of theirs.

    Args:
        documents: of a task.
        asked: the arguments of each one's requests.
        clusters: as the documents say themselves; the first one's is that of all which are joined.
        num_fewshot: examples before a question. lm-eval draws others for each, so that documents are compared, too.
    """
    keys = [
        [("cluster", own), ("asked", digest_json(list(arguments)))]
        + ([("document", _digest_content(document))] if num_fewshot else [])
        for document, arguments, own in zip(documents, asked, clusters, strict=True)
    ]
    names: dict[int, str] = {}
    groups = join_by_keys(len(keys), keys)
    return [names.setdefault(group, own) for group, own in zip(groups, clusters, strict=True)]


def _digest_content(document: Any) -> str:
    """Return the digest of a document without what only names it."""
    if isinstance(document, dict):
        document = sorted((str(k), v) for k, v in document.items() if k not in ("id", "cluster", "buckets"))
    return digest_json(repr(document))


def read_question(name: str, request: Any) -> Question:
    """Read one of lm-eval's `generate_until` requests.

    Raises:
        SettingsError: the task is not greedy, limits its answers to no number of tokens, or has a misspelt option.
    """
    prompt, options = request.args
    # as in lm-eval: with do_sample false no temperature counts
    samples = options.get("do_sample", bool(options.get("temperature")))
    if samples or options.get("num_beams", 1) != 1:
        verb = "samples" if samples else "searches by beams"
        raise SettingsError(
            f"evals.{name}: the task {verb} ({options!r}); only greedy tasks can be compared case by case"
        )
    for key in options:
        if key not in _OPTIONS and (near := suggest(key, _OPTIONS)):
            raise SettingsError(f"evals.{name}: the task's generation_kwargs have an unknown key {key!r}; {near}")
    until = options.get("until") or []
    stops = tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop)
    key = next((key for key in _LIMITS if options.get(key) is not None), _LIMITS[0])
    limit = options.get(key)
    if limit is not None and not (isinstance(limit, int) and limit > 0):
        raise SettingsError(f"evals.{name}: expected a whole number above 0 as the task's {key}, got {limit!r}")
    return Question(name_case(request.task_name, request.doc, request.doc_id), prompt, stops, limit)


async def ask(
    client: Client,
    content: Content,
    *,
    max_tokens: int,
    stops: Sequence[str] = (),
    tools: Sequence[dict[str, Any]] | None = None,
    return_token_ids: bool = False,
) -> Reply:
    """Ask for the greedy answer to a plain prompt or a conversation; stop strings end that to a plain one alone."""
    if isinstance(content, str):
        return await client.complete(content, max_tokens=max_tokens, stops=stops, return_token_ids=return_token_ids)
    return await client.chat(content, max_tokens=max_tokens, tools=tools, return_token_ids=return_token_ids)


async def count_tokens(client: Client, content: Content, *, tools: Sequence[dict[str, Any]] | None = None) -> int:
    """Return the tokens of a prompt as the server reads it: with special tokens, or in its chat template."""
    if isinstance(content, str):
        (ids,) = await client.tokenize([content])
        return len(ids)
    return len(await client.tokenize_chat(content, tools=tools))


async def check_questions_fit(context: EvalContext, questions: Sequence[Question]) -> None:
    """Refuse a task of which a prompt can't fit, before the first one is asked; nothing where none can be counted.

    Raises:
        SettingsError: names the first such case, its tokens and the limits, and says how many there are.
    """
    contents = [question.build_content(is_plain=context.is_plain) for question in questions]
    try:
        sizes = await gather(*(count_tokens(context.client, content) for content in contents))
    except RequestError:
        return
    too_long = [
        (question, size, *question.find_limit(context.max_tokens))
        for question, size in zip(questions, sizes, strict=True)
        if size + question.find_limit(context.max_tokens)[0] > context.context_length
    ]
    if too_long:
        question, size, limit, setting = too_long[0]
        raise SettingsError(
            f"evals.{context.name}: {len(too_long)} of {len(questions)} prompts are too long, first that of case "
            f"{question.case_id!r}: {size} tokens, which with {setting} {limit} are above serving.context_length "
            f"{context.context_length}; raise the length, lower {setting}, or shorten the cases"
        )


async def answer_question(context: EvalContext, question: Question) -> Answer:
    """Ask one question, and return the answer up to the task's first stop string."""
    limit, setting = question.find_limit(context.max_tokens)
    content = question.build_content(is_plain=context.is_plain)
    reply = await ask(context.client, content, max_tokens=limit, stops=question.stops)
    text = cut(reply.text, question.stops)
    is_cut = reply.finish_reason == "length" and text == reply.text
    return Answer(
        text=text,
        num_tokens=reply.num_completion_tokens,
        cut_by=setting if is_cut else "",
        speculation=reply.speculation,
    )


def cut(text: str, stops: Sequence[str]) -> str:
    """Return a text up to its first stop string."""
    for stop in stops:
        text = text.split(stop)[0]
    return text
