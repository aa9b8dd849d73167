"""Check params.yaml against the files it names, before any work: the second half of validation.

`params.py` sees params.yaml alone. This sees the layers, the tokenizer and the chat template of each
checkpoint, and every case of each evalset and of the calibration texts. It reads only the headers of
weights, so it costs a fraction of a second.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from pipeline.errors import CheckpointError, QuantgateError, SettingsError
from pipeline.evalsets.cards import CARD_FILE, CASES_FILE, Evalset, load_evalset
from pipeline.evalsets.checks import check_buckets, check_each_once, load_kind
from pipeline.products.text.calibration_checks import check_calibration, check_unevaluated
from pipeline.products.text.call_checks import check_calls
from pipeline.products.text.chat_templates import check_chat_template, holds_chat_template
from pipeline.products.text.checkpoints import open_checkpoint
from pipeline.products.text.completeness import check_complete
from pipeline.products.text.drafts import check_draft
from pipeline.products.text.footprint import TYPE_BYTES, count_cache_bytes
from pipeline.products.text.memory import read_folder
from pipeline.products.text.model_config import CONFIG_FILE, find_positions, find_text, read_config, read_json
from pipeline.products.text.optimize.layers import check_rank, plan_folder
from pipeline.products.text.own_code import check_own_code
from pipeline.products.text.serving.vllm_config import (
    SCORE_TOKENS,
    build_speculative_config,
    check_config,
    check_options,
)
from pipeline.products.text.settings import (
    CandidateSettings,
    Engine,
    EvalSettings,
    HarnessEval,
    TextProduct,
    VllmEngine,
)
from pipeline.products.text.step_settings import QuantizeStep, SpeculativeStep, Step, WeightStep
from pipeline.records.speculation import SpeculativeConfig
from pipeline.running.hub import locate_checkpoint
from pipeline.running.weight_files import read_tensors
from pipeline.settings.base import describe_yaml_error
from pipeline.settings.hub_names import SCHEME, parse_pinned
from pipeline.settings.yaml_files import check_extent, read_text

Load = Callable[[Path], Evalset]
_GIB = 1 << 30


def check_text(product: TextProduct, root: Path) -> None:
    """Refuse settings that the named files contradict.

    Raises:
        SettingsError: with the path of the key, what it names, and what there is.
        EvalsetError: with file and line, what `load_evalset` refuses.
    """
    load = cache(load_evalset)  # two evals may name one folder
    folder, where = product.optimize.calibration_texts, product.locate("optimize.calibration_texts")
    texts = None if folder is None else load_kind(load, root / folder, where, "documents")
    check_folder = cache(lambda folder, engine: _check_folder(folder, product, engine))  # most share one
    for name, candidate in product.candidates.items():
        _check_candidate(f"candidates.{name}", candidate, texts, root, check_folder)
        if candidate.engine.is_embedded and product.serving.dtype != "bfloat16":
            _check_unpacking(f"candidates.{name}", candidate, root)
        if candidate.engine.is_embedded and candidate.speculative is None:  # with drafts there is no such cache
            _check_cache(locate_checkpoint(candidate.checkpoint, root), product)
    evalsets = {
        name: _check_eval(load, product.locate(f"evals.{name}"), settings, root)
        for name, settings in product.evals.items()
    }
    check_buckets(product, evalsets)
    check_unevaluated(product, texts, evalsets, root)
    for name, candidate in product.candidates.items():  # last, as it may take seconds
        if candidate.engine.is_embedded or any(isinstance(step, WeightStep) for step in candidate.steps):
            check_complete(f"candidates.{name}.checkpoint", locate_checkpoint(candidate.checkpoint, root), root)


def _check_candidate(
    where: str,
    candidate: CandidateSettings,
    texts: Evalset | None,
    root: Path,
    check_folder: Callable[[Path, type[Engine]], None],
) -> None:
    try:
        folder = locate_checkpoint(candidate.checkpoint, root)
        if not folder.is_dir():
            owner = candidate.checkpoint.partition("/")[0]
            may_be_hub = parse_pinned(f"{SCHEME}{candidate.checkpoint}@{40 * '0'}") and not (root / owner).exists()
            hint = f"; if it is a model of a hub, write hf://{candidate.checkpoint}@COMMIT" if may_be_hub else ""
            raise SettingsError(
                f"{where}.checkpoint: expected a checkpoint folder, found none at {str(folder)!r}{hint}"
            )
        check_folder(folder, type(candidate.engine))
    except CheckpointError as error:
        raise SettingsError(f"{where}.checkpoint: {error}") from None
    if isinstance(candidate.engine, VllmEngine):
        _check_vllm(where, candidate.engine, candidate.speculative)
        _check_heads(where, candidate.engine.tensor_parallel_size, folder)
    for i, step in enumerate(candidate.steps):
        at = f"{where}.steps.{i}"
        if isinstance(step, WeightStep) and step.calibration is not None and texts is not None:
            check_calibration(f"{at}.calibration", step.calibration, texts)
        try:
            _check_folders(step, folder, root)
        except QuantgateError as error:
            raise SettingsError(f"{at}: {error}") from None


def _check_unpacking(where: str, candidate: CandidateSettings, root: Path) -> None:
    """Refuse a step whose weights transformers unpacks into bfloat16 alone, where that would round the others."""
    for i, step in enumerate(candidate.steps):
        small = isinstance(step, QuantizeStep) and next((s.weights for s in step.schemes if s.needs_bfloat16), None)
        if not small:
            continue
        tensors = read_tensors(locate_checkpoint(candidate.checkpoint, root))
        if wide := next((name for name, tensor in tensors.items() if tensor.dtype in ("F32", "F16")), None):
            raise SettingsError(
                f"{where}.steps.{i}.scheme: expected serving.dtype bfloat16 with {small.name}, which transformers "
                f"unpacks into it, as {wide!r} is stored as {tensors[wide].dtype}; set it, or serve by vLLM"
            )


def _check_vllm(where: str, engine: VllmEngine, step: SpeculativeStep | None) -> None:
    """Check the options that vLLM will be given against those of its release, as far as they are known by now."""
    check_options(engine.options, where=where)
    config: dict[str, Any] = engine.build_serving()["options"]
    if step is not None:
        drafts = SpeculativeConfig(
            method=step.method, num_tokens=step.num_speculative_tokens, options=step.options, draft_path=step.draft
        )
        config["speculative-config"] = build_speculative_config(drafts)
    check_config(config, version=engine.version, where=where)


def _check_heads(where: str, num_gpus: int, folder: Path) -> None:
    """Refuse GPUs among which the attention heads can't be shared evenly: vLLM would, after hours of other work."""
    heads = find_text(read_config(folder)).get("num_attention_heads")
    if isinstance(heads, int) and heads % num_gpus:
        raise SettingsError(
            f"{where}.engine.tensor_parallel_size: expected a divisor of the {heads} attention heads of "
            f"{folder / CONFIG_FILE}, got {num_gpus}"
        )


def _check_folder(folder: Path, product: TextProduct, engine: type[Engine]) -> None:
    """Refuse a checkpoint that a later stage could not use; behind an endpoint, how it is served is not ours."""
    is_served = not engine.is_attached
    open_checkpoint(folder)
    needs_first_token = any(settings.needs_first_token for settings in product.evals.values())
    path = folder / "tokenizer_config.json"
    tokenizer = read_json(path) if path.is_file() or needs_first_token else {}
    if needs_first_token and not (tokenizer.get("bos_token") or tokenizer.get("eos_token")):
        raise CheckpointError(
            f"{path}: expected a bos_token or an eos_token, which perplexity puts before each text, "
            "found neither; name the one that the model was trained with"
        )
    if is_served:
        check_own_code(folder)
        _check_key_heads(folder)
        needs_scores = any(settings.needs_logprobs for settings in product.evals.values())
        _check_context(folder, product, beyond=SCORE_TOKENS if engine is VllmEngine and needs_scores else 0)
    if is_served and (product.chat_evals or (product.task_evals and holds_chat_template(folder))):
        check_chat_template(folder, tokenizer)


def _check_key_heads(folder: Path) -> None:
    """Refuse attention heads that can't be shared evenly among the heads of keys: transformers ends in a traceback."""
    config = find_text(read_config(folder))
    heads, key_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(key_heads, int) and key_heads > 0 and heads % key_heads:
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: num_key_value_heads: expected a divisor of the {heads} num_attention_heads, "
            f"got {key_heads}; correct it, with the weights that it describes"
        )


def _check_context(folder: Path, product: TextProduct, *, beyond: int) -> None:
    asked = product.serving.context_length
    config = read_config(folder)
    text, limit = find_text(config), find_positions(config)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    # a stretched position encoding reaches further than the number in its config may say
    if limit is not None and "factor" not in rope and asked + beyond > limit:
        more = f" less {beyond} tokens that vLLM takes beyond it to score texts" if beyond else ""
        raise SettingsError(
            f"{product.locate('serving')}.context_length: expected at most {limit - beyond}, the "
            f"positions that {folder / CONFIG_FILE} has{more}, got {asked}; lower it"
        )


def _check_cache(folder: Path, product: TextProduct) -> None:
    """Refuse a cache that is smaller than the keys and values of one request; a server needs a block or two more."""
    room, length, where = product.resources.kv_cache_gib, product.serving.context_length, product.locate("resources")
    if room is None or not product.serving.continuous_batching:
        return
    least = count_cache_bytes(
        read_folder(folder)[1],
        num_requests=1,
        context_length=length,
        item_bytes=TYPE_BYTES[product.serving.dtype],
    )
    if least > room * _GIB:
        raise SettingsError(
            f"{where}.kv_cache_gib: expected {_round_up(least / _GIB):g} or more, as one request of "
            f"serving.context_length {length} takes that with {folder}, got {room}; raise it, or leave it out"
        )


def _round_up(gib: float) -> float:
    return math.ceil(gib * 1000) / 1000


def _check_folders(step: Step, folder: Path, root: Path) -> None:
    if isinstance(step, QuantizeStep):
        plan, calibration = plan_folder(folder, step), step.calibration
        if calibration is not None:
            check_rank(plan, step, calibration.num_samples * calibration.max_tokens)
    elif isinstance(step, SpeculativeStep) and step.draft is not None:
        check_draft(locate_checkpoint(step.draft, root), target=folder)


def _check_eval(load: Load, where: str, settings: EvalSettings, root: Path) -> Evalset | None:
    evalset = _load_eval(load, where, settings, root)
    if evalset is not None:
        folder = settings.include_path if isinstance(settings, HarnessEval) else settings.evalset
        check_each_once(root / str(folder) / CASES_FILE, evalset.cases)
        check_calls(root / str(folder) / CASES_FILE, evalset)
    return evalset


def _load_eval(load: Load, where: str, settings: EvalSettings, root: Path) -> Evalset | None:
    if not isinstance(settings, HarnessEval):
        return load_kind(load, root / settings.evalset, f"{where}.evalset", settings.card_kind)
    if settings.include_path is None:
        _check_builtin(f"{where}.task", settings.task)
        return None
    folder = root / settings.include_path
    if not folder.is_dir():
        raise SettingsError(f"{where}.include_path: expected a folder with task YAML, found none at {str(folder)!r}")
    evalset = load(folder) if (folder / CARD_FILE).is_file() else None
    _check_task(where, settings.task, folder, root)
    return evalset


def _check_builtin(where: str, task: str) -> None:
    """Refuse a name that no file of lm-eval has: to read these takes a second, their index most of a minute."""
    spec = importlib.util.find_spec("lm_eval")
    folders = spec.submodule_search_locations if spec else None
    name = task.encode()
    if folders and not any(name in path.read_bytes() for path in Path(folders[0], "tasks").rglob("*.yaml")):
        raise SettingsError(f"{where}: lm-eval knows no task {task!r} (built in: see `lm-eval ls tasks`)")


def _check_task(where: str, task: str, folder: Path, root: Path) -> None:
    """Refuse a task that no file defines, as lm-eval passes over a file that it can't read, or of others' cases."""
    yaml = YAML(typ="rt")  # keeps tags such as lm-eval's !function as they are
    yaml.allow_duplicate_keys = True
    names: dict[str, None] = {}
    broken = ""
    for path in sorted(folder.rglob("*.yaml")):
        try:
            text = read_text(path)
            check_extent(text)
            data = yaml.load(text)
            defined = dict.fromkeys(_task_names(data))
            names |= defined
            if task in defined and (folder / CARD_FILE).is_file():
                _check_data_files(where, data, path, folder, root)
        except YAMLError as error:
            broken += f"; {path} is not valid YAML: {describe_yaml_error(error)}"
    if task not in names:
        raise SettingsError(
            f"{where}.task: expected a task, group or tag that a *.yaml file in {folder} defines, got "
            f"{task!r}; they define {', '.join(names) or 'none'}{broken}"
        )


def _check_data_files(where: str, data: Any, path: Path, folder: Path, root: Path) -> None:
    """Refuse a task of an evalset that reads the cases of another: its card would be said of what nobody asked."""
    options = data.get("dataset_kwargs") if isinstance(data, dict) else None
    named = options.get("data_files") if isinstance(options, dict) else None
    if isinstance(named, dict):  # by split, of which others may give examples
        named = named.get(data.get("test_split") or data.get("validation_split"))
    for name in named if isinstance(named, list) else [named]:
        owner = (root / str(name)).parent
        if name and (owner / CARD_FILE).is_file() and owner.resolve() != folder.resolve():
            raise SettingsError(
                f"{where}.include_path: expected a task that reads the cases of {folder}, as its {CARD_FILE} "
                f"says what is asked, got {name} in {path}; correct data_files there, or include_path"
            )


def _task_names(data: Any) -> Iterator[str]:
    """Yield what a task file defines; names in a group's list are another file's, unless they come with keys."""
    for key in ("task", "group", "tag") if isinstance(data, dict) else ():
        entries = data.get(key)
        for entry in entries if isinstance(entries, list) else [entries]:
            if isinstance(entry, str) and (key == "tag" or not isinstance(entries, list)):
                yield str(entry)
            yield from _task_names(entry)
