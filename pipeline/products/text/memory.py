"""Will a checkpoint fit in memory? An estimate from config.json and file headers, before anything is loaded.

The estimate is made for the host and for each GPU: weights as they are stored or served, the key-value cache of the
requests in flight, logits, and for a quantiser the activations and one block's Hessians. A quantiser's weights stay
on the host, and its blocks visit the GPU one by one. It is meant to catch factors, not percents. Disk space is in
`costs.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError, SizeError
from pipeline.products.text.footprint import (
    STORED_BYTES,
    TYPE_BYTES,
    count_cache_bytes,
    count_load_bytes,
    find_block_linears,
    max_of_blocks,
)
from pipeline.products.text.model_config import find_text, read_config
from pipeline.products.text.optimize.layers import count_output_bytes
from pipeline.products.text.settings import CandidateSettings, TextProduct, VllmEngine
from pipeline.products.text.step_settings import QuantizeStep, WeightStep
from pipeline.running.environment import Machine
from pipeline.running.hub import locate_checkpoint
from pipeline.running.weight_files import TensorInfo, read_tensors
from pipeline.running.weight_folders import read_config_file

_PROCESS_MIB = 700  # a Python process with torch and transformers imported
_GPU_PROCESS_MIB = 2_000  # on the host, with the CUDA libraries
_CONTEXT_MIB = 600  # on the GPU, before the first tensor
_SHARE = "gpu-memory-utilization"  # of vLLM: where it is set a benchmark does not halve it
_OFFLOADED = "cpu-offload-gb"  # of vLLM: GiB of each card's weights
_BATCH_TOKENS = 512  # that have logits at the same time
_MIB = 1 << 20
_MAX_SHOWN = 60  # characters of a value
_OPTIONAL = ("num_key_value_heads", "head_dim", "sliding_window")  # of config.json; null or 0: there is none
_COUNTS = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", *_OPTIONAL)


@dataclass(frozen=True)
class MemoryNeed:
    """What one activity of one candidate takes at its peak, in MiB.

    Attributes:
        activity: "serving", "quantising", or "timing": a candidate beside the reference.
        place: "host", or "GPU" for each card.
        weights_mib: that must fit.
        other_mib: the rest, which settings can lower.
        remedy: what would help against the weights.
        lever: what would help against the rest.
        num_servers: of ours that share the place; `weights_mib` are of all of them.
    """

    candidate: str
    checkpoint: str
    activity: str
    place: str
    weights_mib: int
    other_mib: int
    remedy: str
    lever: str
    num_servers: int = 1


@dataclass(frozen=True)
class Room:
    """The memory of a place, in MiB: all of it, and what is free now."""

    total_mib: int
    available_mib: int


def estimate_needs(product: TextProduct, root: Path, machine: Machine) -> list[MemoryNeed]:
    """Estimate what serving, quantising and timing take, for every candidate that is served from a folder."""
    cards = [gpu.memory_mib for gpu in machine.gpus if gpu.memory_mib and not machine.gpus_hidden]
    num_torch_cards = len(cards) if machine.torch_build.startswith("cuda") else 0
    served = {name: candidate for name, candidate in product.candidates.items() if not candidate.engine.is_attached}
    num_cards = {name: num_torch_cards if one.engine.is_embedded else len(cards) for name, one in served.items()}
    needs = []
    for name, candidate in served.items():
        needs += _plan_serving(name, candidate, product, root, num_cards=num_cards[name])
        for step in candidate.steps:
            if isinstance(step, WeightStep):
                needs += _plan_quantising(name, candidate.checkpoint, step, root, has_gpu=num_torch_cards > 0)
        if name in product.benchmark.candidates and product.reference in served:
            needs += _plan_timing(name, candidate, product, root, num_cards=num_cards)
    return needs


def read_folder(folder: Path) -> tuple[dict[str, TensorInfo], dict[str, Any]]:
    """Return the tensors of a checkpoint from its headers, and its config.json.

    Raises:
        CheckpointError: either can't be read, or what is counted has another type.
    """
    tensors, path = read_tensors(folder), folder / "config.json"
    config = read_config_file(path, "the model's config", if_missing="copy it again")
    text = find_text(config)
    if not isinstance(text, dict):
        raise CheckpointError(f"{path}: text_config: expected a mapping, got {_show(text)}; copy it again")
    for name in _COUNTS:
        if not (name in _OPTIONAL and not text.get(name)) and not _is_count(text.get(name, 1)):
            raise CheckpointError(
                f"{path}: {name}: expected one whole number above 0, got {_show(text.get(name))}; copy it again, or "
                "take a model whose layers are alike"
            )
    kinds = text.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise CheckpointError(f"{path}: layer_types: expected a list of names, got {_show(kinds)}; copy it again")
    return tensors, config


def _show(value: Any) -> str:
    return repr(value)[:_MAX_SHOWN]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def count_served_bytes(candidate: CandidateSettings, product: TextProduct, root: Path) -> tuple[int, int]:
    """Return the bytes of one server: of its weights and its draft's, and of the cache and logits."""
    serving, engine, draft = product.serving, candidate.engine, candidate.speculative and candidate.speculative.draft
    item_bytes = TYPE_BYTES[serving.dtype]
    loaded = [read_folder(locate_checkpoint(folder, root)) for folder in (candidate.checkpoint, draft) if folder]
    weights = sum(count_load_bytes(*one, dtype=serving.dtype, keeps_packed=not engine.is_embedded) for one in loaded)
    packing = [step for step in candidate.steps if isinstance(step, QuantizeStep)]
    if packing and not engine.is_embedded:  # the embedded engine unpacks
        tensors, config = loaded[0]
        weights -= count_load_bytes(tensors, config, dtype=serving.dtype)
        weights += count_output_bytes(locate_checkpoint(candidate.checkpoint, root), packing[-1])
    requests, length = serving.concurrency, serving.context_length
    cache = sum(
        count_cache_bytes(config, num_requests=requests, context_length=length, item_bytes=item_bytes)
        for _, config in loaded
    )
    if engine.is_embedded and product.resources.kv_cache_gib is not None:
        cache = int(product.resources.kv_cache_gib * 1024 * _MIB)
    vocab_size = find_text(loaded[0][1]).get("vocab_size", 0)
    return weights, cache + _BATCH_TOKENS * vocab_size * (item_bytes + 4)


def _plan_serving(
    name: str, candidate: CandidateSettings, product: TextProduct, root: Path, *, num_cards: int
) -> list[MemoryNeed]:
    engine = candidate.engine
    weights, cache = count_served_bytes(candidate, product, root)
    num_servers = product.resources.num_servers if engine.is_embedded else 1
    lever = "lower serving.concurrency or serving.context_length"
    servers = "resources.num_servers, " if num_servers > 1 else ""

    def build(
        place: str, weight_bytes: float, other_bytes: float, remedy: str, lever: str, num_sharing: int
    ) -> MemoryNeed:
        sizes = (math.ceil(weight_bytes / _MIB), math.ceil(other_bytes / _MIB))
        return MemoryNeed(name, candidate.checkpoint, "serving", place, *sizes, remedy, lever, num_sharing)

    if not num_cards:
        # a quarter of the weights again for the copies of some layers that suit the CPU
        other = (_PROCESS_MIB * _MIB + weights / 4 + cache) * num_servers
        lever = f"close programs, or lower {servers}serving.concurrency or serving.context_length"
        return [build("host", weights * num_servers, other, "use a larger machine", lever, num_servers)]
    parts, copies, stages = engine.num_parts, engine.num_copies, engine.num_stages
    if parts * copies > num_cards:
        by_stage = f" times pipeline-parallel-size {stages}" if stages > 1 else ""
        raise CheckpointError(
            f"candidates.{name}: engine: tensor_parallel_size {parts // stages}{by_stage} times data_parallel_size "
            f"{copies} takes {parts * copies} GPUs, this machine has {num_cards}; lower one of them"
        )
    on_card = _count_card_bytes(candidate, weights)
    # servers are spread over the cards
    sharing = math.ceil(num_servers / num_cards)
    other = sharing * (_CONTEXT_MIB * _MIB + cache / _count_cache_parts(candidate, root))
    split = "serve with vllm and tensor_parallel_size" if engine.is_embedded else "raise engine.tensor_parallel_size"
    remedy = f"{split}, or use a larger card"
    return [
        build("GPU", sharing * on_card, other, remedy, f"{lever}, {remedy}", sharing),
        build(
            "host",
            copies * (weights - parts * on_card),
            _GPU_PROCESS_MIB * _MIB * num_servers,
            "use a larger machine",
            "close programs",
            num_servers,
        ),
    ]


def _count_card_bytes(candidate: CandidateSettings, weights: int) -> float:
    """Return how many of the bytes of weights are on each card: its part, less what vLLM keeps of it on the host."""
    gib = candidate.engine.options.get(_OFFLOADED, 0) if isinstance(candidate.engine, VllmEngine) else 0
    offloaded = gib * 1024 * _MIB if isinstance(gib, int | float) else 0  # what is no number is vLLM's to refuse
    return max(weights / candidate.engine.num_parts - offloaded, 0.0)


def _count_cache_parts(candidate: CandidateSettings, root: Path) -> int:
    """Return in how many parts the cache is split: a head of keys is in one part, or in several alike."""
    text = find_text(read_config(locate_checkpoint(candidate.checkpoint, root)))
    parts, stages = candidate.engine.num_parts, candidate.engine.num_stages
    heads = text.get("num_key_value_heads") or text.get("num_attention_heads")
    return stages * min(parts // stages, heads) if heads else parts


def _plan_timing(
    name: str, candidate: CandidateSettings, product: TextProduct, root: Path, *, num_cards: Mapping[str, int]
) -> list[MemoryNeed]:
    """Plan one server of the reference beside one of a candidate; nothing where each has a place of its own."""
    sides, rows = (product.candidates[product.reference], candidate), []
    for side in sides:
        weights, cache = count_served_bytes(side, product, root)
        rows.append((weights, cache, _count_cache_parts(side, root), side.engine.num_parts, side.engine.num_copies))
    counts = (num_cards[product.reference], num_cards[name])
    without, lever = "take it out of benchmark.candidates", "lower serving.concurrency or serving.context_length"
    if not any(counts):
        place, remedy = "host", f"{without}, or use a larger machine"
        heavy = float(sum(weights for weights, *_ in rows))
        other = sum(_PROCESS_MIB * _MIB + weights / 4 + cache for weights, cache, *_ in rows)
    elif 2 * max(parts * copies for *_, parts, copies in rows) > min(counts) > 0:
        place, remedy = "GPU", f"{without}, or use a larger card or a second one"
        pairs = [
            (_count_card_bytes(side, weights), _CONTEXT_MIB * _MIB + cache / cache_parts)
            for side, (weights, cache, cache_parts, *_) in zip(sides, rows, strict=True)
        ]
        if not any(isinstance(side.engine, VllmEngine) and _SHARE in side.engine.options for side in sides):
            pairs = [max(pairs)] * 2  # each may take half of a card, so that the larger one decides
        heavy, other = (sum(column) for column in zip(*pairs, strict=True))
    else:
        return []
    sizes = (math.ceil(heavy / _MIB), math.ceil(other / _MIB))
    return [MemoryNeed(name, candidate.checkpoint, "timing", place, *sizes, remedy, f"{lever}, or {without}")]


def _plan_quantising(name: str, checkpoint: str, step: WeightStep, root: Path, *, has_gpu: bool) -> list[MemoryNeed]:
    tensors, config = read_folder(locate_checkpoint(checkpoint, root))
    text, linears = find_text(config), find_block_linears(tensors)
    item_bytes = max((STORED_BYTES.get(info.dtype, 0) for info in tensors.values()), default=2)
    widest = max((info.shape[1] for info in linears.values()), default=0)
    largest = max((info.num_elements for info in linears.values()), default=0)
    calibration, algorithm = step.calibration, getattr(step, "algorithm", None)
    is_awq = algorithm == "awq"
    length, num_samples = (calibration.max_tokens, calibration.num_samples) if calibration else (0, 0)
    # a block's inputs and outputs are kept for every token; AWQ keeps the inputs of the parts of a block as well
    hidden = text.get("hidden_size", widest)
    kept = length * num_samples * item_bytes * (6 * hidden + widest if is_awq else 2 * hidden)
    # the largest layer several times in float32, what one sample takes on its way, and the Hessians
    # on a GPU GPTQ rounds the layers of a block that have one shape together
    shapes = {info.shape for info in linears.values()} if has_gpu and algorithm == "gptq" else ()
    alike = [{layer: i.num_elements for layer, i in linears.items() if i.shape == shape} for shape in shapes]
    at_once = max(map(max_of_blocks, alike), default=largest)
    work = 16 * at_once + length * item_bytes * (4 * widest + text.get("vocab_size", 0))
    if algorithm == "gptq":
        work += max_of_blocks({layer: 4 * info.shape[1] ** 2 for layer, info in linears.items()})

    def build(place: str, weights: int, other: float, remedy: str, lever: str) -> MemoryNeed:
        sizes = (math.ceil(weights / _MIB), math.ceil(other / _MIB))
        return MemoryNeed(name, checkpoint, "quantising", place, *sizes, remedy, f"{lever}, or {remedy}")

    weights, lever = count_load_bytes(tensors, config), "lower calibration.num_samples or calibration.max_tokens"
    if not has_gpu:
        return [build("host", weights, kept + work + _PROCESS_MIB * _MIB, "use a larger machine", lever)]
    outside = max((info.num_bytes for layer, info in tensors.items() if layer not in linears), default=0)
    visiting = outside + max_of_blocks({layer: info.num_bytes for layer, info in linears.items()})
    return [
        build("host", weights, kept + _GPU_PROCESS_MIB * _MIB, "use a larger machine", lever),
        build("GPU", visiting, work + _CONTEXT_MIB * _MIB, "use a larger card", "lower calibration.max_tokens"),
    ]


def check_needs(needs: list[MemoryNeed], *, host: Room, card: Room | None = None) -> list[str]:
    """Return a warning for each need above what is free now.

    Args:
        needs: of all candidates.
        host: of this machine.
        card: of the smallest GPU; None where needs are the host's alone.

    Raises:
        SizeError: weights alone exceed a place's memory, so no retry can help.
    """
    warnings = []
    for need in needs:
        room, owner = (host, "this machine") if need.place == "host" or card is None else (card, "a GPU")
        where = f"candidates.{need.candidate} ({need.checkpoint})"
        if need.weights_mib > room.total_mib:
            whose = f" of {need.num_servers} servers" if need.num_servers > 1 else ""
            one_fits = need.weights_mib <= room.total_mib * need.num_servers
            remedy = f"lower resources.num_servers, or {need.remedy}" if whose and one_fits else need.remedy
            raise SizeError(
                f"{where}: {need.activity} takes {need.weights_mib:,} MiB for the weights alone{whose} and "
                f"{owner} has {room.total_mib:,} MiB; {remedy}"
            )
        peak = need.weights_mib + need.other_mib
        if peak > room.available_mib:
            held = room.total_mib - room.available_mib
            others = f" (others hold {held:,} MiB)" if need.place == "GPU" and held else ""
            # an engine takes a smaller cache where the one that would be useful does not fit
            danger = "requests may wait, or it may be killed" if need.activity != "quantising" else "it may be killed"
            warnings.append(
                f"{where}: {need.activity} takes about {peak:,} MiB ({need.weights_mib:,} of them weights) of "
                f"{owner}'s memory and {room.available_mib:,} MiB are free{others}; {danger}: {need.lever}"
            )
    return warnings


def read_card_room(machine: Machine, free_mib: tuple[int, ...]) -> Room | None:
    """Return the room on the smallest GPU; None where there is none, or where it shares the host's memory.

    Args:
        machine: with its GPUs.
        free_mib: of each GPU; empty where the driver won't say.
    """
    sizes = [gpu.memory_mib for gpu in machine.gpus if gpu.memory_mib]
    return Room(min(sizes), min(free_mib, default=min(sizes))) if sizes and not machine.gpus_hidden else None
