"""Write the shipped evalsets and calibration texts from their seeds.

    python -m evalsets.make                 all of them
    python -m evalsets.make workflows       one

Same seed, same bytes: git does not hold what `evalsets/made.yaml` lists, and this command makes it where it is missing.
`evalsets.make.texts.split_of` keeps what is evaluated apart from what is trained on and from what is calibrated with.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from evalsets.make.depot import (
    MAX_CALLS,
    TOOLS,
    Workflow,
    conversation,
    final_checks,
    first_binding_calls,
    make_catalogue,
    make_workflow,
    render_call,
)
from evalsets.make.pictures import make_panoramas, make_scenes
from evalsets.make.shots import all_shots, buckets, caption
from evalsets.make.texts import make_continuation, make_prose, make_single_call, split_of
from evalsets.seal import describe, render_card, seal
from pipeline.evalsets.cards import CARD_FILE, CASES_FILE, load_evalset
from pipeline.records.files import write_text

ROOT = Path(__file__).resolve().parents[1]
LATE_CALL = 5  # a rule given before call 1 that first matters here or later tests retention
_STEP_BUCKETS = {"steps/2-4": range(2, 5), "steps/5-8": range(5, 9), "steps/9-12": range(9, MAX_CALLS + 1)}
_LENGTHS = {"length/short": 450, "length/medium": 850}  # characters of the right conversation; longer is long

Cases = Iterator[dict[str, Any]]


def make_workflows(rng: Random, *, num_depots: int = 400, tasks_per_depot: int = 3) -> Cases:
    """Draw workflows; the tasks of one depot share its stock and form a cluster."""
    for depot in range(num_depots):
        catalogue = make_catalogue(rng)
        for task in range(tasks_per_depot):
            workflow = _draw(
                lambda: make_workflow(rng, catalogue, num_calls=rng.randint(2, MAX_CALLS)),  # noqa: B023
                lambda w: w.task,
                "eval",
            )
            yield {
                "id": f"wf-{depot:03d}-{task}",
                "cluster": f"depot-{depot:03d}",
                "buckets": _buckets(workflow),
                "messages": [{"role": "user", "content": workflow.task}],
                "state": workflow.state,
                "checks": final_checks(workflow),
            }


def _buckets(workflow: Workflow) -> list[str]:
    steps = next(name for name, sizes in _STEP_BUCKETS.items() if len(workflow.calls) in sizes)
    length = sum(len(m["content"]) for m in conversation(workflow))
    buckets = [steps, next((name for name, limit in _LENGTHS.items() if length < limit), "length/long")]
    if any(call >= LATE_CALL for call in first_binding_calls(workflow).values()):
        buckets.append("constraint_retention")
    if workflow.final["skipped"]:
        buckets.append("abstention")
    return buckets


def make_tool_calls(rng: Random, *, num: int = 2000) -> Cases:
    """Draw single calls, no request twice."""
    seen: set[str] = set()
    while len(seen) < num:
        call = _draw(lambda: make_single_call(rng), lambda c: c.request, "eval")
        if call.request in seen:
            continue
        seen.add(call.request)
        yield {
            "id": f"tc-{len(seen):04d}",
            "cluster": f"tc-{len(seen):04d}",
            "buckets": [f"tool/{call.name}"],
            "messages": [{"role": "user", "content": call.request}],
            "expected": {"name": call.name, "arguments": call.arguments},
            "accepted": call.accepted,
        }


def make_documents(rng: Random, *, num: int = 300) -> Cases:
    """Draw prose for perplexity; a document is a cluster."""
    for i in range(num):
        text = _draw(lambda: make_prose(rng), str, "eval")
        yield {"id": f"prose-{i:03d}", "cluster": f"prose-{i:03d}", "buckets": [], "text": text}


def make_choices(rng: Random, *, num: int = 1000) -> Cases:
    """Draw the starts of stories with four sentences to go on with."""
    for i in range(num):
        drawn = _draw(lambda: make_continuation(rng), lambda c: c.start, "eval")
        yield {
            "id": f"choice-{i:04d}",
            "cluster": f"choice-{i:04d}",
            "buckets": [],
            "question": f"<|begin|>{drawn.start}",
            "choices": drawn.choices,
            "answer": drawn.answer,
        }


def make_calibration(rng: Random, *, num_each: int = 512) -> Cases:
    """Draw calibration texts, conversations rendered as the agent's chat template renders them."""
    draws: dict[str, Callable[[], Any]] = {
        "prose": lambda: make_prose(rng),
        "tool_calls": lambda: make_single_call(rng),
        "workflows": lambda: make_workflow(rng, make_catalogue(rng), num_calls=rng.randint(2, MAX_CALLS)),
    }
    keys: dict[str, Callable[[Any], str]] = {
        "prose": str,
        "tool_calls": lambda c: c.request,
        "workflows": lambda w: w.task,
    }
    for source, draw in draws.items():
        for i in range(num_each):
            text = _render(_draw(draw, keys[source], "calibration"))
            yield {"id": f"{source}-{i:03d}", "cluster": f"{source}-{i:03d}", "buckets": [source], "text": text}


def make_prompts(rng: Random) -> Cases:
    """Ask for every product shot there is, each from a seed of its own."""
    for shot in all_shots():
        name = f"{shot.finish}-{shot.colour}-{shot.shape}-{shot.background}"
        yield {
            "id": f"shot-{name}",
            "cluster": name,
            "buckets": buckets(shot),
            "prompt": caption(shot),
            "seed": rng.randrange(2**31),
        }


def _render(drawn: Any) -> str:
    if isinstance(drawn, str):
        return drawn
    if isinstance(drawn, Workflow):
        return _render_messages(conversation(drawn))
    return _render_messages(
        [
            {"role": "user", "content": drawn.request},
            {"role": "assistant", "content": render_call(drawn.name, drawn.arguments)},
        ]
    )


def _render_messages(messages: list[dict[str, str]]) -> str:
    return "<|begin|>" + "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages)


def _draw(draw: Callable[[], Any], key: Callable[[Any], str], split: str) -> Any:
    while True:
        drawn = draw()
        if split_of(key(drawn)) == split:
            return drawn


EVALSETS: dict[str, tuple[Callable[[Random], Cases], str, str, str]] = {
    "workflows": (
        make_workflows,
        "trajectories",
        "a depot: tasks that share its stock",
        "Depot workflows of 2 to 12 tool calls under rules given at the start. constraint_retention: a rule "
        "first matters at call 5 or later. abstention: a line has to be declined.",
    ),
    "tool_calls": (make_tool_calls, "tool_calls", "a request", "Single depot tool calls asked for in words."),
    "prose": (make_documents, "documents", "a document", "Short stories about depots, for perplexity."),
    "choices": (
        make_choices,
        "choices",
        "a question",
        "The start of a story about a depot and four sentences to go on with: its own, and three that name "
        "somebody or something that is not in it. The story's own name is not always known yet.",
    ),
    "calibration": (
        make_calibration,
        "documents",
        "a text",
        "Texts for calibrating quantisers, conversations in the chat template of models/agent. Never evaluated on.",
    ),
    "shots": (
        make_prompts,
        "prompts",
        "a caption",
        "Prompts for product shots: every shape, colour, finish and background that models/product-shots was "
        "trained on, each with the seed of its noise.",
    ),
}
# Their makers are given the folder, too, and write pictures into it.
PICTURE_SETS: dict[str, tuple[Callable[[Random, Path], Cases], str, str, str]] = {
    "scenes": (
        partial(make_scenes, num=300),
        "detection",
        "an image",
        "Street scenes and the boxes of the people in them, as of evalsets/scenes.py. few_small: a quarter of "
        "an image's people or less have 32 x 32 pixels or less. mostly_small: three quarters or more.",
    ),
    "scenes-calibration": (
        partial(make_scenes, num=16),
        "detection",
        "an image",
        "Street scenes for calibrating quantisers and for finding out what activations come to. Never evaluated on.",
    ),
    "panoramas": (
        partial(make_panoramas, num=36),
        "upscaling",
        "a panorama",
        "Parts of streets to be upscaled by two, as of evalsets/panoramas.py: targets of 384 x 256 pixels, which tiles "
        "of 64 pixels of their inputs cut into twelve.",
    ),
}


def write_evalset(name: str, folder: Path) -> None:
    """Write one evalset's cases and card, and read them back as a check."""
    make: Callable[..., Cases]
    make, kind, cluster, description = EVALSETS[name] if name in EVALSETS else PICTURE_SETS[name]
    cases = make(Random(f"evalset/{name}"), *([folder] if name in PICTURE_SETS else []))
    write_text(folder / CASES_FILE, "".join(json.dumps(case, ensure_ascii=False) + "\n" for case in cases))
    card: dict[str, Any] = {  # None: for the seal, which keeps the order of the keys
        "name": name,
        "version": "1.0",
        "licence": "Apache-2.0",
        "kind": kind,
        "description": description,
        "made_by": f"python -m evalsets.make {name}",
        "num_cases": None,
        "sha256": None,
        "cluster": cluster,
        "num_clusters": None,
        "buckets": None,
    }
    if kind == "trajectories":
        card["tools"] = {tool: declared.model_dump(mode="json") for tool, declared in TOOLS.items()}
    write_text(folder / CARD_FILE, render_card(card))
    print(describe(seal(folder)))
    load_evalset(folder)


def main() -> None:
    """Parse the command line, write the evalsets."""
    known = [*EVALSETS, *PICTURE_SETS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; else all")
    parser.add_argument("--out", type=Path, help="folder to write one evalset to; else its own")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in known]:
        parser.error(f"expected one of {', '.join(known)}, got {unknown[0]!r}")
    if args.out and len(args.names) != 1:
        parser.error(f"--out: expected one evalset, got {len(args.names)}")
    for name in args.names or known:
        write_evalset(name, args.out or ROOT / name)
