"""Load a checkpoint for serving, and compute its facts from the objects in memory.

The fingerprint is computed here from the files and objects of this process, in the way of
`Candidate.fingerprint`. So it proves which model answers, and does not repeat the settings.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.errors import EngineError
from pipeline.products.text.checkpoints import read_checkpoint
from pipeline.products.text.model_config import SCORE_CAP, read_config, read_score_cap
from pipeline.products.text.model_loading import estimate_load_bytes, load_model, load_tokenizer
from pipeline.products.text.schemes import read_format, unpacks_to_bfloat16
from pipeline.products.text.serving.batching import Batching, plan_batching
from pipeline.products.text.serving.exactness import is_exact
from pipeline.products.text.serving.sizing import check_room, read_device
from pipeline.records.digests import digest_checkpoint
from pipeline.records.evaluations import Candidate
from pipeline.records.fingerprints import fingerprint, read_environment
from pipeline.records.serving import ServingConfig
from pipeline.records.speculation import SpeculativeConfig
from pipeline.running.environment import read_hardware
from pipeline.running.weight_files import read_tensors


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory and the facts about it.

    `scorer` shares the weights of `model`, but keeps plain attention when continuous batching
    has switched `model` to a paged one.
    """

    name: str
    model: Any
    scorer: Any
    tokenizer: Any
    serving: ServingConfig
    facts: dict[str, Any]  # by section, see pipeline/records/fingerprints.py
    config: dict[str, str]  # the generation configs as resolved, by file name
    batching: Batching
    draft: Any | None = None  # the draft model of speculative decoding

    @property
    def is_exact(self) -> bool:
        """Whether an answer is the same in any batch."""
        return is_exact(self.serving.dtype, self.facts)

    @cached_property
    def fingerprint(self) -> str:
        """Sha256 of the facts; every answer carries it."""
        return fingerprint(self.facts)


def load_candidate(
    candidate: Candidate,
    folder: Path,
    *,
    draft_folder: Path | None = None,
    num_sharing: int = 1,
    kv_cache_gib: float | None = None,
) -> LoadedModel:
    """Load a candidate's checkpoint in this process.

    Args:
        candidate: what to serve; its serving config says how.
        folder: where the checkpoint is.
        draft_folder: where its draft model is, when it is served with one.
        num_sharing: servers of ours on the same device.
        kv_cache_gib: size of the cache; None: as much as is useful, and fits.

    Raises:
        CheckpointError: the checkpoint or the draft can't be loaded.
        EngineError: its own generation settings change greedy answers, its context is too short, transformers can't
            run it with the attention that was asked for, or the cache of one context does not fit.
    """
    import torch

    from pipeline.products.text.serving.input_rounding import use_own_rounding
    from pipeline.products.text.serving.packed_linear import pack_linear_layers

    asked = candidate.serving
    torch.set_num_threads(asked.num_threads)
    torch.set_float32_matmul_precision("highest")  # TF32 would keep 10 bits of float32's 23
    checkpoint = read_checkpoint(folder, root=folder.parent)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = "cuda:0" if kind == "cuda" else None  # a server sees its own GPU alone
    if device is not None:
        check_room(
            folder,
            estimate_load_bytes(folder, dtype=asked.dtype),
            read_device(kind, num_sharing),
            draft_bytes=estimate_load_bytes(draft_folder, dtype=asked.dtype) if draft_folder else 0,
        )
    model = load_model(folder, dtype=choose_load_dtype(folder, asked.dtype), device=device)
    check_context(model.config, asked.context_length)
    _set_attention(model, asked.attention)
    tokenizer = load_tokenizer(folder)
    model.generation_config = greedy_config(model, tokenizer)
    with torch.inference_mode():
        # compressed weights are decompressed by the first forward pass, which must come before sharing
        model(torch.tensor([[0]], device=model.device), use_cache=False)
    if checkpoint.format == "compressed-tensors":
        settle_weights(model)
    if model.dtype != getattr(torch, asked.dtype):  # it could be unpacked in another type alone
        _convert(model, getattr(torch, asked.dtype))
    scorer = share_weights(model)
    use_own_rounding([model, scorer])
    num_packed = pack_linear_layers([model, scorer])
    draft = _load_draft(draft_folder, asked, tokenizer, device=device) if draft_folder else None
    serving = asked.model_copy(
        update={
            "dtype": str(model.dtype).removeprefix("torch."),
            "attention": scorer.config._attn_implementation,
            "num_threads": torch.get_num_threads(),
            "temperature": 0.0,
            "speculative": _set_speculation(asked.speculative, model, draft, draft_folder),
        }
    )
    loaded = candidate.model_copy(
        update={
            "checkpoint": checkpoint,
            "serving": serving,
            "libraries": {name: _version(name) for name in candidate.libraries},
        }
    )
    batching = plan_batching(model, asked, read_device(kind, num_sharing), kv_cache_gib=kv_cache_gib)
    engine = {"num_packed_layers": num_packed, **batching.facts}
    if imitated := count_imitated(model):
        engine["imitated"] = imitated
    if cap := read_score_cap(model.config.get_text_config().to_dict()):
        engine["left_out"] = {SCORE_CAP: cap}
    facts = _build_facts(loaded, model, engine=engine)
    config = {"generation_config.json": model.generation_config.to_json_string()}
    if draft is not None:
        config["draft/generation_config.json"] = draft.generation_config.to_json_string()
    return LoadedModel(candidate.name, model, scorer, tokenizer, serving, facts, config, batching, draft)


def choose_load_dtype(folder: Path, asked: str) -> str:
    """Return the type that a checkpoint is loaded in before it is served in another one: as asked, where it can be.

    Raises:
        EngineError: its weights are unpacked into bfloat16, which would round other ones of it.
    """
    if asked == "bfloat16" or not unpacks_to_bfloat16(read_config(folder).get("quantization_config") or {}):
        return asked
    widest = max(tensors := read_tensors(folder), key=lambda name: tensors[name].num_bytes)
    if asked == "float16" or tensors[widest].dtype in ("F32", "F16"):
        raise EngineError(
            f"{folder}: expected serving.dtype bfloat16, which transformers unpacks its weights into, got {asked}, "
            f"and {widest!r} is stored as {tensors[widest].dtype}; set it, or serve by vLLM"
        )
    return "bfloat16"


def count_imitated(model: Any) -> dict[str, int]:
    """Count the layers whose inputs, or keys and values, the model rounds in its own type, by the format it imitates.

    Weights in few bits are no imitation: kernels for them multiply in the wider type as well.
    """
    counts: dict[str, int] = {}
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None or scheme.input_activations is None:
            continue
        what = "inputs" if scheme.weights is not None else "keys and values"
        name = f"{read_format(scheme.input_activations.model_dump()).name} {what}"
        counts[name] = counts.get(name, 0) + 1
    return counts


def _convert(model: Any, dtype: Any) -> None:
    """Give all floats of a model another type, also those that were made while torch tracked nothing."""
    import torch

    kept: dict[Any, Any] = {}  # a head may share the embedding's weights
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None and tensor.is_floating_point():
                if tensor not in kept:
                    kept[tensor] = torch.nn.Parameter(tensor.detach().clone().to(dtype), requires_grad=False)
                module._parameters[name] = kept[tensor]
    model.config.dtype = dtype


def _set_attention(model: Any, attention: str) -> None:
    try:
        model.set_attn_implementation(attention)
    except ValueError:
        raise EngineError(
            f"{model.name_or_path}: expected a model that transformers can run with {attention} attention, got "
            f"{type(model).__name__}, which it can't; name engine vllm"
        ) from None


def _load_draft(folder: Path, asked: ServingConfig, tokenizer: Any, *, device: str | None) -> Any:
    from pipeline.products.text.serving.packed_linear import pack_linear_layers

    draft = load_model(folder, dtype=asked.dtype, device=device)
    _set_attention(draft, asked.attention)
    draft.generation_config = greedy_config(draft, tokenizer)
    pack_linear_layers([draft])
    return draft


def _set_speculation(
    asked: SpeculativeConfig | None, model: Any, draft: Any | None, folder: Path | None
) -> SpeculativeConfig | None:
    """Set the number of drafted tokens, and return the config with the digest of the draft that was loaded."""
    if asked is None:
        return None
    if draft is None:
        model.generation_config.prompt_lookup_num_tokens = asked.num_tokens
    else:
        # constant: the library's own schedule and confidence threshold change the number from request to request
        draft.generation_config.num_assistant_tokens = asked.num_tokens
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
    return SpeculativeConfig(
        method="prompt_lookup" if draft is None else "draft_model",
        num_tokens=asked.num_tokens,
        draft_digest=digest_checkpoint(folder) if folder else None,
    )


def check_context(config: Any, context_length: int) -> None:
    """Refuse a context beyond the positions that a model has: at best it would answer nonsense there.

    Raises:
        EngineError: with the most tokens that there may be.
    """
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest <= 0:
        return
    # rotary positions may be stretched, and whether the number includes that differs from model to model
    stretch = (getattr(text, "rope_parameters", None) or {}).get("factor")
    longest = int(longest * max(1.0, stretch or 1.0))
    if context_length > longest:
        raise EngineError(
            f"serving.context_length: expected at most {longest}, the positions that the model's "
            f"config.json has, got {context_length}; lower it"
        )


def greedy_config(model: Any, tokenizer: Any) -> Any:
    """Return the model's generation config made greedy.

    Raises:
        EngineError: the checkpoint's own generation config changes greedy answers (a repetition
            penalty, a minimum length, ...), which continuous batching would drop silently.
    """
    from transformers import GenerationConfig

    source = model.generation_config
    end = source.eos_token_id  # a composite config has none of its own
    end = end if end is not None else getattr(model.config.get_text_config(), "eos_token_id", None)
    end = end if end is not None else tokenizer.eos_token_id
    pad = source.pad_token_id if source.pad_token_id is not None else tokenizer.pad_token_id
    first_end = end[0] if isinstance(end, list) else end
    processors = model._get_logits_processor(_without_sampling(source))
    if processors:
        names = ", ".join(type(p).__name__ for p in processors)
        raise EngineError(
            f"{model.name_or_path}/generation_config.json: expected plain greedy decoding, "
            f"it asks for {names}; remove those settings"
        )
    return GenerationConfig(
        do_sample=False,
        eos_token_id=end,
        bos_token_id=source.bos_token_id,
        pad_token_id=pad if pad is not None else first_end,
    )


def _without_sampling(source: Any) -> Any:
    config = copy.deepcopy(source)
    config.do_sample, config.temperature, config.top_p, config.top_k = False, 1.0, 1.0, 0
    return config


def settle_weights(model: Any) -> None:
    """Have compressed-tensors neither fetch nor round a weight in every forward pass: decompressed ones need none."""
    from compressed_tensors.offload import remove_dispatch
    from compressed_tensors.quantization import QuantizationStatus

    remove_dispatch(model)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            module.quantization_status = QuantizationStatus.COMPRESSED  # which rounds inputs alone


def share_weights(model: Any) -> Any:
    """Return a second model object over the same tensors, whose attention can be set on its own."""
    return copy.deepcopy(model, {id(t): t for t in chain(model.parameters(), model.buffers())})


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _build_facts(loaded: Candidate, model: Any, *, engine: dict[str, Any]) -> dict[str, Any]:
    import torch

    on_gpu = model.device.type == "cuda"
    sampling = json.loads(model.generation_config.to_json_string())
    return {
        **loaded.facts,
        "engine": engine,
        "sampling": {key: value for key, value in sampling.items() if key != "transformers_version"},
        "environment": read_environment(),
        "hardware": read_hardware(torch.cuda.get_device_name() if on_gpu else "cpu"),
    }
