"""What speculative decoding changes and costs: the same prompts with and without drafts, in one process.

Each prompt goes through all settings, in an order drawn anew each time, so that they share the machine's
weather. Target-only decoding is the plain serial `generate` that speculation builds on, one thread; time is
the process's CPU seconds in `generate`, prefill included. Prints, for each kind of prompt,

- what drafts changed: answers that differ from target-only decoding in the same dtype, by kind of difference,
  and the gap between the two largest logits of target-only decoding where they part (`--flips` writes each),
- what drafts cost: acceptance, forward passes, tokens/s with a 95 % bootstrap interval over prompts,
- how near target-only decoding comes to a tie, and how far the gap moves when the same tokens go through one
  forward pass instead of one each: an answer can flip only where the second reaches the first.

A gap is also given in steps: neighbouring numbers of the dtype at the size of the largest logit. Drafts must
change nothing in float32, else the script ends with 1; in bfloat16 they may, at near-ties.

    python -m benchmarks.speculation [--calls 150] [--workflows 60] [--documents 200] [--flips FILE]

Not covered: HTTP, several requests at once, sampling. What continuous batching makes of the same prompts is
in `dvc repro`'s own log.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.speculation_prompts import Decode, Inputs, collect_prompts, load
from pipeline.products.text.serving.loading import LoadedModel
from pipeline.records.differences import classify_difference
from pipeline.records.speculation import SpeculationCounts, sum_speculation

METHODS = (
    ("target only", None),
    *((f"draft, k = {k}", ("draft_model", k)) for k in (2, 5, 8)),
    ("prompt lookup, k = 5", ("prompt_lookup", 5)),
)
DIFFERENCES = ("argument value", "argument name", "tool name", "JSON shape", "prose")
NUM_RESAMPLES = 2000


@dataclass
class Setting:
    """One way to decode, and what each prompt came to."""

    dtype: str
    name: str
    decode: Decode
    answers: list[list[int]] = field(default_factory=list)
    counts: list[SpeculationCounts | None] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def run(self, inputs: Inputs) -> None:
        """Decode one prompt."""
        start = time.process_time()
        tokens, counts = self.decode(inputs)
        self.seconds.append(time.process_time() - start)
        self.answers.append(tokens.tolist())
        self.counts.append(counts)


@dataclass(frozen=True)
class Margins:
    """How near one answer of target-only decoding came to another; an entry per token."""

    gaps: np.ndarray  # largest logit less the second
    steps: np.ndarray  # the same in steps of the dtype
    moves: np.ndarray  # by how many steps the gap differs when the whole answer goes through one forward pass
    is_other: np.ndarray  # whether another token is largest then


@dataclass(frozen=True)
class Flip:
    """One answer that differs from target-only decoding, and the gap that target-only decoding saw there."""

    prompt: int
    kind: str
    at: int  # first token that differs, 0-based
    gap: float
    steps: float


def measure_margins(loaded: LoadedModel, inputs: Inputs, answer: list[int]) -> Margins:
    """Decode a prompt once more by the target alone, untimed, and look at the logits."""
    config = copy.deepcopy(loaded.model.generation_config)
    config.return_dict_in_generate = config.output_logits = True
    output = loaded.model.generate(**inputs, generation_config=config)
    num_prompt = inputs["input_ids"].shape[1]
    chosen = output.sequences[0, num_prompt:]
    if chosen.tolist() != answer:
        raise SystemExit("expected target-only decoding to repeat itself, got another answer")
    top = torch.stack(output.logits, dim=1)[0].topk(2)
    with torch.inference_mode():
        logits = loaded.scorer(output.sequences).logits[0, num_prompt - 1 : -1].float()
    other = logits.gather(1, top.indices)
    # eps is the distance from 1 to the next number
    step = torch.finfo(loaded.model.dtype).eps * torch.exp2(top.values[:, 0].abs().log2().floor())
    gaps = top.values[:, 0] - top.values[:, 1]
    moves = (other[:, 0] - other[:, 1] - gaps).abs() / step
    is_other = logits.argmax(1) != chosen  # topk orders equal logits otherwise than argmax
    return Margins(*(x.numpy() for x in (gaps, gaps / step, moves, is_other)))


def find_flips(setting: Setting, plain: Setting, margins: list[Margins], prompts: slice, tokenizer: Any) -> list[Flip]:
    """Return every answer that is not that of target-only decoding."""
    flips = []
    for i in range(prompts.start, prompts.stop):
        ours, theirs = plain.answers[i], setting.answers[i]
        if ours == theirs:
            continue
        texts = [tokenizer.decode(ids, skip_special_tokens=True).replace("\n", "\\n") for ids in (ours, theirs)]
        at = next(j for j, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        flips.append(
            Flip(
                i - prompts.start,
                classify_difference(*texts) or "same text, other tokens",
                at,
                float(margins[i].gaps[at]),
                float(margins[i].steps[at]),
            )
        )
    return flips


def compare_speed(setting: Setting, plain: Setting, prompts: slice) -> str:
    """Return the ratio of tokens per second over all prompts, with its 95 % bootstrap interval over prompts."""
    columns = np.array(
        [
            [len(a) for a in setting.answers[prompts]],
            setting.seconds[prompts],
            [len(a) for a in plain.answers[prompts]],
            plain.seconds[prompts],
        ]
    )
    draws = np.random.default_rng(0).integers(columns.shape[1], size=(NUM_RESAMPLES, columns.shape[1]))
    tokens, seconds, plain_tokens, plain_seconds = np.concatenate(
        [columns.sum(1, keepdims=True), columns[:, draws].sum(2)], axis=1
    )
    ratios = (tokens / seconds) / (plain_tokens / plain_seconds)
    low, high = np.quantile(ratios[1:], (0.025, 0.975))
    return f"{ratios[0]:.2f} ({low:.2f} to {high:.2f})"


def print_row(*cells: Any) -> None:
    """Print one row of a table."""
    print("| " + " | ".join(map(str, cells)) + " |")


def print_header(*names: str, num_text: int) -> None:
    """Print the head of a table whose first columns are text."""
    print()
    print_row(*names)
    print("|" + "---|" * num_text + "---:|" * (len(names) - num_text))


def describe(setting: Setting, plain: Setting, flips: list[Flip], prompts: slice) -> list[str]:
    """Return what one setting made of one kind of prompt."""
    kinds = Counter(flip.kind for flip in flips)
    row = [
        f"{len(flips)} of {prompts.stop - prompts.start}",
        *(str(kinds[kind]) for kind in DIFFERENCES),
        str(sum(n for kind, n in kinds.items() if kind not in DIFFERENCES)),
        *(
            [str(sum(flip.steps == 0 for flip in flips)), f"{max(flip.steps for flip in flips):.3g}"]
            if flips
            else ["–", "–"]
        ),
    ]
    total = sum_speculation(setting.counts[prompts])
    return row + (
        ["–", "1", "1"]
        if total is None
        else [f"{total.acceptance_rate:.3f}", f"{total.forwards_per_token:.3f}", compare_speed(setting, plain, prompts)]
    )


def describe_margins(margins: list[Margins]) -> list[str]:
    """Return how near target-only decoding came to other answers."""
    steps, moves, is_other = (
        np.concatenate([getattr(m, name) for m in margins]) for name in ("steps", "moves", "is_other")
    )
    answers = sum(bool((m.steps <= 1).any()) for m in margins)
    low, middle = np.quantile(steps, (0.01, 0.5))
    return [
        f"{len(steps):,}",
        f"{(steps == 0).mean():.2%}",
        f"{(steps <= 1).mean():.2%}",
        f"{answers} of {len(margins)}",
        f"{low:,.3g}",
        f"{middle:,.3g}",
        f"{(moves > 0).mean():.1%}",
        f"{np.quantile(moves, 0.99):.3g}",
        f"{moves.max():.3g}",
        str(is_other.sum()),
    ]


def main() -> int:
    """Decode everything in every setting and print the tables; 1 when drafts changed an answer in float32."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=150)
    parser.add_argument("--workflows", type=int, default=60)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--flips", type=Path, help="write every answer that differs here, one JSON object a line")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds, prompts, parts = collect_prompts(options.calls, options.workflows, options.documents), [], {}
    for kind, found in kinds.items():
        parts[kind] = slice(len(prompts), len(prompts) + len(found))
        prompts += found
    settings, plain, targets = [], {}, {}
    for dtype in ("float32", "bfloat16"):
        loaded = [load(dtype, asked) for _, asked in METHODS]
        settings += [Setting(dtype, name, decode) for (name, _), (_, decode) in zip(METHODS, loaded, strict=True)]
        plain[dtype], targets[dtype] = settings[-len(METHODS)], loaded[0][0]
    order = random.Random(0)
    for number, inputs in enumerate(prompts, start=1):
        for setting in order.sample(settings, len(settings)):
            setting.run(inputs)
        if number % 100 == 0:
            print(f"{number} of {len(prompts)} prompts", file=sys.stderr, flush=True)
    margins = {
        dtype: [measure_margins(loaded, *pair) for pair in zip(prompts, plain[dtype].answers, strict=True)]
        for dtype, loaded in targets.items()
    }
    flips = {
        (kind, setting.dtype, setting.name): find_flips(
            setting, plain[setting.dtype], margins[setting.dtype], part, targets["float32"].tokenizer
        )
        for kind, part in parts.items()
        for setting in settings
    }
    print_tables(settings, plain, margins, parts, flips)
    print(f"\n{len(prompts)} prompts, {time.process_time():.0f} CPU s in all")
    if options.flips:
        lines = [
            dict(zip(("prompts", "dtype", "setting"), key, strict=True)) | vars(flip)
            for key, found in flips.items()
            for flip in found
        ]
        options.flips.write_text("".join(json.dumps(line) + "\n" for line in lines))
    holds = not any(found for (_, dtype, _), found in flips.items() if dtype == "float32")
    print("float32: " + ("no answer differs" if holds else "ANSWERS DIFFER"))
    return 0 if holds else 1


def print_tables(
    settings: list[Setting],
    plain: dict[str, Setting],
    margins: dict[str, list[Margins]],
    parts: dict[str, slice],
    flips: dict[tuple[str, str, str], list[Flip]],
) -> None:
    """Print what drafts changed and cost, and how near to a tie the target came."""
    print_header(
        "prompts",
        "dtype",
        "setting",
        "answers that differ",
        *DIFFERENCES,
        "other",
        "parted at a gap of 0",
        "largest gap there, steps",
        "acceptance",
        "target forwards per token",
        "tokens/s against target only",
        num_text=3,
    )
    for key, found in flips.items():
        setting = next(s for s in settings if (s.dtype, s.name) == key[1:])
        print_row(*key, *describe(setting, plain[setting.dtype], found, parts[key[0]]))
    print_header(
        "prompts",
        "dtype",
        "target only, tokens/s",
        "tokens",
        "gap 0",
        "gap of at most 1 step",
        "answers with such a token",
        "gap, 1 % quantile, steps",
        "median",
        "gaps that move",
        "99 % quantile of the move, steps",
        "largest",
        "tokens that one pass changes",
        num_text=2,
    )
    for kind, part in parts.items():
        for dtype, setting in plain.items():
            speed = sum(map(len, setting.answers[part])) / sum(setting.seconds[part])
            print_row(kind, dtype, f"{speed:.0f}", *describe_margins(margins[dtype][part]))


if __name__ == "__main__":
    raise SystemExit(main())
