"""What contradicts itself in the settings of the text product, each in one line.

Needs no file beside params.yaml; checks that read other files are in `preflight.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.products.text.settings import CONTAINER_PROGRAMS, EngineSettings, OpenaiEngine, TextProduct, VllmEngine
from pipeline.products.text.step_settings import QuantizeStep, SpeculativeStep, Step, WeightStep
from pipeline.settings.base import find_metric_problems, find_product_problems
from pipeline.settings.hub_names import find_unpinned

TRANSFORMERS_METHODS = ("draft_model", "prompt_lookup")
# ways of verifying drafts that keep a token only when it is the target's own, or drawn as the target would draw it
LOSSLESS_REJECTION = ("standard", "strict", "block")
LOSSY_OPTIONS = (
    "posterior_threshold",
    "posterior_alpha",
    "typical_acceptance_sampler_posterior_threshold",
    "assistant_ensemble_weight",
)


def find_text_problems(product: TextProduct) -> list[str]:
    """Return what contradicts itself in the text product, one line each, starting with the key's path."""
    problems = find_product_problems(product)
    problems += [
        f"candidates.{name}.steps.{i}{problem}"
        for name, c in product.candidates.items()
        for i, step in enumerate(c.steps)
        if isinstance(step, SpeculativeStep)
        for problem in _speculative_problems(step, c.engine, c.steps[i + 1 :])
    ]
    problems += [
        f"candidates.{name}.{problem}"
        for name, c in product.candidates.items()
        for problem in _quantising_problems(c.steps)
    ]
    problems += [
        f"candidates.{name}.steps.{i}.calibration: expected texts to calibrate on, found no products.{product.name}."
        "optimize.calibration_texts; name an evalset of kind documents that nothing is evaluated on"
        for name, c in product.candidates.items()
        for i, step in enumerate(c.steps)
        if isinstance(step, WeightStep) and step.calibration and product.optimize.calibration_texts is None
    ]
    problems += _imitation_problems(product)
    problems += [
        f"candidates.{name}.engine.{problem}"
        for name, c in product.candidates.items()
        for problem in _engine_problems(c.engine)
    ]
    problems += [] if product.may_generate else find_unanswered(product)
    problems += [
        f"candidates.{name}.trace: expected an engine that quantgate starts, got one that runs already; remove trace"
        for name, c in product.candidates.items()
        if c.trace and c.engine.is_attached
    ]
    if product.serving.max_tokens >= product.serving.context_length:
        problems.append(
            f"serving.max_tokens: expected less than serving.context_length "
            f"({product.serving.context_length}), which prompt and answer share, got "
            f"{product.serving.max_tokens}; lower it"
        )
    problems += find_metric_problems(product)
    problems += [f"benchmark.{problem}" for problem in _benchmark_problems(product)]
    return problems


def find_unanswered(product: TextProduct) -> list[str]:
    """Return what a product without an eval that has the model write texts can't do, one line each."""
    expected = (
        "expected an eval of kind tool_calls or trajectories, or an lm-eval task that is answered in words, "
        "found none; add one, or"
    )
    return [
        *(f"candidates.{name}.exact: {expected} remove exact" for name, c in product.candidates.items() if c.exact),
        *(
            f"candidates.{name}.steps: {expected} remove the speculative step, whose drafts its answers count"
            for name, c in product.candidates.items()
            if c.speculative
        ),
        *([f"benchmark.candidates: {expected} list no candidate"] if product.benchmark.candidates else []),
    ]


def _benchmark_problems(product: TextProduct) -> list[str]:
    benchmark, serving, problems = product.benchmark, product.serving, []
    for i, name in enumerate(benchmark.candidates):
        if name not in product.candidates or name == product.reference:
            others = ", ".join(c for c in product.candidates if c != product.reference)
            problems.append(
                f"candidates.{i}: expected one of the candidates beside the reference ({others}), got {name!r}"
            )
        if name in benchmark.candidates[:i]:
            problems.append(f"candidates.{i}: {name!r} is listed twice; remove one")
    untimed = [name for name in product.release if name not in benchmark.candidates and name in product.candidates]
    if benchmark.max_slowdown is not None and untimed:
        problems.append(
            f"max_slowdown: expected every released candidate among benchmark.candidates, as a limit asks "
            f"for its time, found no {untimed[0]!r}; add it, or remove the limit"
        )
    for i, number in enumerate(benchmark.concurrency):
        if number > serving.concurrency or number in benchmark.concurrency[:i]:
            problems.append(
                f"concurrency.{i}: expected distinct numbers up to serving.concurrency "
                f"({serving.concurrency}), got {number}"
            )
    ends = [end for band in benchmark.prompt_tokens for end in band]
    if ends != sorted(ends) or any(ends[i] == ends[i + 1] for i in range(1, len(ends) - 1, 2)):
        problems.append(
            f"prompt_tokens: expected bands [least, most] that rise and don't overlap, got {benchmark.prompt_tokens}"
        )
    if ends[-1] + benchmark.num_tokens > serving.context_length:
        problems.append(
            f"num_tokens: expected at most {serving.context_length - ends[-1]}, as the longest prompts "
            f"({ends[-1]} tokens) share serving.context_length ({serving.context_length}) with the answer, "
            f"got {benchmark.num_tokens}"
        )
    return problems


def _engine_problems(engine: EngineSettings) -> list[str]:
    if isinstance(engine, OpenaiEngine):
        return find_address_problems(engine.base_url)
    return _command_problems(engine) if isinstance(engine, VllmEngine) else []


def _command_problems(engine: VllmEngine) -> list[str]:
    command = engine.command
    first = command.index("serve") + 1 if "serve" in command else len(command)
    problems = [
        f"command.{i}: expected no option behind `serve`, got {command[i]!r}: put it into engine.options, or "
        "into a speculative step"
        for i in range(first, len(command))
    ]
    if Path(command[0]).name in CONTAINER_PROGRAMS:
        passed = {word.partition("=")[0] for flag, word in pairwise(command) if flag in ("-e", "--env")}
        problems += [
            f"environment.{name}: expected `-e {name}` in engine.command, as a container gets no variable of "
            "its client by itself; add it"
            for name in engine.environment
            if name not in passed
        ]
    return problems


def _speculative_problems(step: SpeculativeStep, engine: EngineSettings, later: list[Step]) -> list[str]:
    problems = []
    if step.method == "draft_model" and step.draft is None:
        problems.append(".draft: expected the draft model's checkpoint folder for method draft_model, found none")
    if step.method == "prompt_lookup" and step.draft is not None:
        problems.append(f".draft: expected none for method prompt_lookup, got {step.draft!r}; remove it")
    if step.draft is not None and (problem := find_unpinned(step.draft)):
        problems.append(f".draft: {problem}")
    if engine.is_embedded and step.method not in TRANSFORMERS_METHODS:
        problems.append(
            f".method: expected one of {', '.join(TRANSFORMERS_METHODS)} for engine transformers, got "
            f"{step.method!r}; name another engine"
        )
    if engine.is_embedded and step.options:
        problems.append(f".options: expected none for engine transformers, got {step.options!r}; remove them")
    problems += [
        f".options.{key}: expected an option that the step does not set itself; it is method, draft or "
        "num_speculative_tokens: remove it"
        for key in step.options
        if key in ("method", "model", "num_speculative_tokens")
    ]
    if reason := _name_loss(step):
        problems.append(f".lossy: expected true, as {reason}, got false; say so, or remove the option")
    if any(key.startswith("synthetic") for key in step.options) or "synthetic" in step.options.values():
        problems.append(
            ".options: expected drafts that are verified, got synthetic acceptance, which accepts tokens "
            "without looking at them; remove it"
        )
    if later and isinstance(later[0], SpeculativeStep):
        problems.append(": expected one speculative step at most, found another after it; remove one")
    elif later:
        problems.append(
            f": expected speculative to be the last step, found {later[0].kind} after it: it changes how "
            "the weights are served, so they must be final; move it to the end"
        )
    return problems


def _name_loss(step: SpeculativeStep) -> str | None:
    """Say why a speculative step may change greedy answers by more than rounding, unless it says so itself."""
    if step.lossy:
        return None
    how = step.options.get("rejection_sample_method", "standard")
    if how not in LOSSLESS_REJECTION:
        return f"rejection_sample_method {how!r} is not known to keep the target's own tokens"
    lossy_option = next((key for key in LOSSY_OPTIONS if key in step.options), None)
    return f"{lossy_option} lets tokens through that are not the target's" if lossy_option else None


def _quantising_problems(steps: list[Step]) -> list[str]:
    problems, weight_steps = [], [(i, step) for i, step in enumerate(steps) if isinstance(step, WeightStep)]
    if len(weight_steps) > 1:
        problems.append(
            f"steps.{weight_steps[1][0]}: expected one quantising step at most, found another after "
            f"steps.{weight_steps[0][0]}: what is quantised can't be quantised again; remove one"
        )
    for i, step in weight_steps:
        if isinstance(step, QuantizeStep):
            problems += [f"steps.{i}.{problem}" for problem in step.find_problems()]
        sources = step.calibration.sources if step.calibration else []
        problems += [
            f"steps.{i}.calibration.sources.{n}: {source!r} is listed twice, and counts once; remove one"
            for n, source in enumerate(sources)
            if source in sources[:n]
        ]
    return problems


def _imitation_problems(product: TextProduct) -> list[str]:
    """Return what can't be served as asked, or would be released on numbers that the engine only imitates."""
    problems = []
    for name, candidate in product.candidates.items():
        steps = [(i, step) for i, step in enumerate(candidate.steps) if isinstance(step, QuantizeStep)]
        if any(True for _, step in steps for _ in step.find_problems()):
            continue
        must_run = name in product.release and product.allow_emulated is None
        if not candidate.engine.is_embedded:
            problems += _unproven_problems(name, product, [step for _, step in steps], must_run=must_run)
            continue
        for i, step in steps:
            small = next((scheme.weights.name for scheme in step.schemes if scheme.needs_bfloat16), None)
            if small and product.serving.dtype == "float16":
                problems.append(
                    f"candidates.{name}.steps.{i}.scheme: expected serving.dtype bfloat16 or float32 with {small}, "
                    "which transformers unpacks into bfloat16, got float16; set it, or serve by vLLM"
                )
            if must_run and (rounded := _list_rounded(step)):
                problems.append(f"release: {describe_imitation(name, rounded, product)}")
    return problems


def _unproven_problems(name: str, product: TextProduct, steps: list[QuantizeStep], *, must_run: bool) -> list[str]:
    """Return what vLLM can't serve, and what would be released without proof that its numbers ran."""
    engine = product.candidates[name].engine
    if not isinstance(engine, VllmEngine):
        return []
    problems = [
        f"candidates.{name}.steps: expected kv_cache.strategy tensor or attn_head, which vLLM serves, got 'token'; "
        "set one, or serve by the embedded engine"
        for step in steps
        if step.kv_cache and step.kv_cache.strategy == "token"
    ]
    rounded = [number for step in steps for number in _list_rounded(step)]
    if rounded and must_run and not engine.report_kernels:
        problems.append(
            f"release: expected proof that {' and '.join(dict.fromkeys(rounded))} of {name} run as asked; set "
            f"candidates.{name}.engine.report_kernels, or say why none is needed by {product.show_allowance()}"
        )
    return problems


def _list_rounded(step: QuantizeStep) -> list[str]:
    """Return what else than weights a step rounds, by the formats' names."""
    rounded = [f"{s.input_activations.name} inputs" for s in step.schemes if s.input_activations]
    return rounded + ([f"{step.kv_cache.resolve().name} keys and values"] if step.kv_cache else [])


def describe_imitation(name: str, rounded: Collection[str], product: TextProduct) -> str:
    """Say why a candidate can't be released, and what helps."""
    return (
        f"expected candidates whose numbers their engine runs, got {name}: the embedded engine imitates "
        f"{' and '.join(dict.fromkeys(rounded))} in {product.serving.dtype}; serve it by vLLM, or say why that will do "
        f"by {product.show_allowance()}"
    )


def find_address_problems(url: str) -> list[str]:
    """Return what is wrong with a text as the address of a server, one line each."""
    try:
        parts = urlsplit(url)
        # a port that is no number below 65536 raises
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address or parts.query or parts.fragment or any(ch.isspace() for ch in url):
        return [f"base_url: expected http://host:port, got {url!r}"]
    if parts.username is not None or parts.password is not None:
        return [
            "base_url: expected no user and password, which would be written into reports and records; put a key "
            "into an environment variable and name it in api_key_env"
        ]
    return []
