"""Open, check and describe a checkpoint: a Hugging Face folder with safetensors weights.

A pinned model of a hub is such a folder once it is in the cache (`pipeline.running.hub`).

Reads JSON and safetensors headers only, so settings can be checked against a checkpoint in milliseconds and without
torch. The record alone may need the tokenizer loaded, where its size stands in no JSON.

Not covered: loading weights (`model_loading.py`), adapters, and writing weights
(`pipeline.products.text.optimize`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError
from pipeline.products.text.layer_names import is_embedding, is_token_embedding, name_layer
from pipeline.products.text.model_config import CONFIG_FILE, PACKED, detect_format, read_config, read_json
from pipeline.products.text.model_loading import load_tokenizer
from pipeline.products.text.schemes import StoredGroups, list_rounded
from pipeline.products.text.stored_schemes import check_stored_schemes
from pipeline.records.digests import digest_files, digest_json
from pipeline.records.evaluations import Checkpoint
from pipeline.running.weight_files import TensorInfo, read_tensor, read_tensors
from pipeline.settings.hub_names import parse_pinned

_FLOAT_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# what belongs to a quantised weight, an input or a cache, and is no weight itself
_SIDE_TENSORS = ("_scale", "_zero_point", ".weight_shape", "g_idx", ".qzeros", ".scales")
_HEAD = "lm_head.weight"
_NUM_SHOWN = 8  # folders that are named in an error


def open_checkpoint(folder: Path) -> dict[str, TensorInfo]:
    """Check everything about a checkpoint that can be checked without loading it.

    Returns:
        The stored tensors by name.

    Raises:
        CheckpointError: the folder is missing, holds pickle weights, or a safetensors file is damaged or
            incomplete. Config or tokenizer is unreadable. A token lies beyond the embedding, or the embedding has
            another size than config.json says. Or layers are stored otherwise than its quantization config says.
    """
    _check_level(folder)
    config = read_config(folder)
    tensors = read_tensors(folder)
    if detect_format(folder, config, tensors) == "compressed-tensors":
        check_stored_schemes(folder / CONFIG_FILE, config, tensors)
    _check_sizes(folder, config, _token_embedding(tensors))
    if (num_ids := _tokenizer_size(folder)) is not None:
        _check_vocabulary(folder, num_ids)
    _check_copied(folder)
    return tensors


def _check_level(folder: Path) -> None:
    """Refuse a folder of checkpoints, and name those."""
    below = [] if (folder / CONFIG_FILE).is_file() else sorted(folder.glob(f"*/{CONFIG_FILE}"))
    if below:
        raise CheckpointError(
            f"expected a folder with {CONFIG_FILE}, found none in {str(folder)!r}; name one of those below that have "
            f"it: {', '.join(str(path.parent) for path in below[:_NUM_SHOWN])}"
        )


def read_checkpoint(
    folder: Path,
    *,
    root: Path,
    reference: str | None = None,
    parent_digest: str | None = None,
    files: dict[str, str] | None = None,
) -> Checkpoint:
    """Check a checkpoint and return its record.

    `num_parameters` counts weights, not stored elements: a packed INT4 word is eight parameters, scales and zero
    points are none, and a head that is stored beside the embedding it shares counts once. `dtype` is the float type
    that most bytes are stored in.

    Args:
        folder: the checkpoint.
        root: the project root, which `path` is relative to when the folder is inside it.
        reference: how params.yaml names it; a pinned model keeps this name as its path.
        parent_digest: digest of the checkpoint that this one was made from.
        files: the digests of its files where they are known, as of `digest_files`.
    """
    tensors = open_checkpoint(folder)
    if _tokenizer_size(folder) is None:
        _check_vocabulary(folder, len(load_tokenizer(folder)))
    config = read_config(folder)
    files = digest_files(folder) if files is None else files
    return Checkpoint(
        path=reference if reference and parse_pinned(reference) else _name_folder(folder, root),
        kind=config["model_type"],
        format=detect_format(folder, config, tensors),
        dtype=_main_dtype(tensors),
        num_parameters=_count_parameters(tensors, config),
        num_bytes=sum(t.num_bytes for t in tensors.values()),
        rounded=list_rounded(config.get("quantization_config") or {}),
        digest=digest_json(files),
        files=files,
        parent_digest=parent_digest,
    )


def _name_folder(folder: Path, root: Path) -> str:
    absolute, base = folder.resolve(), root.resolve()
    return absolute.relative_to(base).as_posix() if absolute.is_relative_to(base) else str(absolute)


def layer_shapes(folder: Path) -> dict[str, tuple[int, int]]:
    """Return (out_features, in_features) of each linear layer, from safetensors headers only.

    A name tells an embedding from a linear layer. A head that shares the embedding's weights is
    reported though it has no tensor of its own. Packed layers are not reported.
    """
    tensors, kind = read_tensors(folder), read_config(folder)["model_type"]
    shapes = {
        name_layer(name.removesuffix(".weight"), kind): (info.shape[0], info.shape[1])
        for name, info in tensors.items()
        if name.endswith(".weight") and len(info.shape) == 2 and not is_embedding(name)
    }
    embedding, head = _token_embedding(tensors), tied_head(folder)
    if head and embedding:
        shapes[head] = (embedding.shape[0], embedding.shape[1])
    return shapes


def tied_head(folder: Path) -> str | None:
    """Return the name of a head that shares its weights with the embedding, or None."""
    config = read_config(folder)
    tied = config.get("tie_word_embeddings")
    names = {name_layer(name.removesuffix(".weight"), config["model_type"]) for name in read_tensors(folder)}
    # architectures that tie by default leave the key out, and then there is no tensor for the head
    return "lm_head" if tied or (tied is None and "lm_head" not in names) else None


def check_tied_head(folder: Path) -> None:
    """Refuse a head that is tied to the embedding and to which the file gives other values: engines differ then.

    Transformers unties the two, vLLM drops the head.

    Raises:
        CheckpointError: names both tensors.
    """
    tensors, config = read_tensors(folder), read_config(folder)
    names = [name for name in tensors if is_token_embedding(name)]
    if not names or _HEAD not in tensors or not _ties_head(config):
        return
    head, embedding = (read_tensor(folder, tensors[name], name) for name in (_HEAD, names[0]))
    if not head.equal(embedding):
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: tie_word_embeddings: expected {_HEAD!r} to equal {names[0]!r}, as both are tied, "
            "found other values: engines differ in which one they use; set it to false, or remove the tensor"
        )


def _ties_head(config: Mapping[str, Any]) -> bool:
    """Whether the head is the embedding; where config.json does not say, as transformers has it for the model type."""
    tied = config.get("tie_word_embeddings")
    if tied is not None or "text_config" in config:
        return bool(tied)
    from transformers import CONFIG_MAPPING

    kind = config["model_type"]
    return kind in CONFIG_MAPPING and bool(getattr(CONFIG_MAPPING[kind], "tie_word_embeddings", False))


def embedding_rows(folder: Path) -> int | None:
    """Return how many token ids the embedding holds; None for an unknown architecture."""
    embedding = _token_embedding(read_tensors(folder))
    return embedding.shape[0] if embedding else read_config(folder).get("vocab_size")


def _check_sizes(folder: Path, config: dict[str, Any], embedding: TensorInfo | None) -> None:
    # of a composite model the text part's config would count, and no name shows which embedding is the text's
    if embedding is None or len(embedding.shape) != 2 or "text_config" in config:
        return
    # OPT's embedding may be narrower than its layers, with a projection between
    width = config.get("word_embed_proj_dim") or config.get("hidden_size")
    rows = config.get("vocab_size")
    for key, declared, stored in (("vocab_size", rows, embedding.shape[0]), ("hidden_size", width, embedding.shape[1])):
        if declared is not None and declared != stored:
            raise CheckpointError(
                f"{folder / CONFIG_FILE}: {key}: expected {stored}, as the stored embedding has, got {declared!r}; "
                "copy config and weights from one source"
            )


def _check_vocabulary(folder: Path, num_ids: int) -> None:
    rows = embedding_rows(folder)
    if rows is not None and num_ids > rows:
        raise CheckpointError(
            f"{folder}: the tokenizer has ids up to {num_ids - 1}, the embedding has {rows} rows; "
            "the tokenizer belongs to another checkpoint"
        )


def _check_copied(folder: Path) -> None:
    """Refuse damage in what ships byte by byte though no loader may read it, and answers that could never end."""
    rows = embedding_rows(folder)
    for name in ("special_tokens_map.json", "generation_config.json", CONFIG_FILE):
        eos_ids = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        for eos in eos_ids if isinstance(eos_ids, list) else [eos_ids]:
            if isinstance(eos, int) and rows is not None and eos >= rows:
                raise CheckpointError(
                    f"{folder / name}: eos_token_id: expected ids below {rows}, the rows of the "
                    f"embedding, got {eos}; copy it from the source"
                )


def _tokenizer_size(folder: Path) -> int | None:
    """Return the largest token id plus one; None for a sentencepiece model, which has to be loaded for that."""
    path = folder / "tokenizer.json"
    if path.is_file():
        return _count_ids(path, read_json(path))
    if (folder / "vocab.json").is_file():
        added = folder / "added_tokens.json"
        vocabulary = read_json(folder / "vocab.json") | (read_json(added) if added.is_file() else {})
        return _count_ids(folder / "vocab.json", {"model": {"vocab": vocabulary}})
    if not any((folder / name).is_file() for name in ("tokenizer.model", "vocab.txt")):
        raise CheckpointError(f"{path}: expected the tokenizer, found no file; copy it from the source")
    return None


def _count_ids(path: Path, data: dict[str, Any]) -> int:
    try:
        vocabulary = data["model"]["vocab"]
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        return max([*ids, *(token["id"] for token in data.get("added_tokens", ()))]) + 1
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{path}: expected a tokenizer with `model.vocab`; copy the file again") from None


def _token_embedding(tensors: dict[str, TensorInfo]) -> TensorInfo | None:
    return next((tensors[name] for name in tensors if is_token_embedding(name)), None)


def _main_dtype(tensors: dict[str, TensorInfo]) -> str:
    """Return the float type that most bytes are stored in; packed weights count by the type of their scales."""
    totals: dict[str, int] = {}
    for info in tensors.values():
        if info.dtype in _FLOAT_NAMES:
            totals[info.dtype] = totals.get(info.dtype, 0) + info.num_bytes
    return _FLOAT_NAMES[max(totals, key=lambda dtype: totals[dtype])] if totals else "float32"


def _count_parameters(tensors: dict[str, TensorInfo], config: dict[str, Any]) -> int:
    groups, total = StoredGroups(config.get("quantization_config") or {}), 0
    for name, info in tensors.items():
        if name.endswith(PACKED):
            layer = name.rpartition(".")[0]
            total += _count_packed(info, tensors.get(f"{layer}.weight_scale"), groups, layer)
        elif not (name.endswith(_SIDE_TENSORS) or (name == _HEAD and _ties_head(config))):
            total += info.num_elements
    return total


def _count_packed(words: TensorInfo, scale: TensorInfo | None, groups: StoredGroups, layer: str) -> int:
    """Count the weights of a packed layer: by its groups, as the last word of a row may be filled up, else by words."""
    size = groups.find_size(layer)
    if scale is not None and size is not None and len(scale.shape) == 2:
        return scale.num_elements * size
    return words.num_bytes * 8 // groups.find_bits(layer)
