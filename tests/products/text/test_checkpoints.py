"""Opening checkpoints: what is read from headers, and every kind of damage as one clear line."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.errors import CheckpointError
from pipeline.products.text.checkpoints import check_tied_head, layer_shapes, open_checkpoint, read_checkpoint
from pipeline.products.text.model_loading import check_memory, estimate_load_bytes, load_model, load_tokenizer
from pipeline.running.weight_files import check_finite, iterate_weights, read_tensors
from tests.fakes.tiny_architectures import write_tiny_model
from tests.fakes.tiny_llama import write_tiny_llama


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "copy"))


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def break_value(folder: Path, name: str, value: float) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[7] = torch.tensor(value)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_description(source: Path) -> None:
    found = read_checkpoint(source, root=source.parent)
    assert (found.path, found.kind, found.format, found.dtype) == ("tiny", "llama", "dense", "float32")
    # 2 embeddings of 320 x 128, 2 x (q 128, k 64, v 64, o 128, gate + up + down 3 x 256) x 128, 5 norms
    expected = 2 * 320 * 128 + 2 * (128 + 64 + 64 + 128 + 3 * 256) * 128 + 5 * 128
    assert (found.num_parameters, found.num_bytes) == (expected, 4 * expected)


def test_digest_ignores_the_readme_and_the_place_but_not_a_weight(source: Path, folder: Path) -> None:
    (folder / "README.md").write_text("edited")
    before = read_checkpoint(source, root=source.parent).digest
    assert read_checkpoint(folder, root=folder.parent).digest == before
    break_value(folder, "model.norm.weight", 1.5)
    assert read_checkpoint(folder, root=folder.parent).digest != before


def test_layer_shapes_are_out_by_in_and_leave_the_embedding_out(source: Path) -> None:
    shapes = layer_shapes(source)
    assert len(shapes) == 2 * 7 + 1
    assert shapes["model.layers.1.mlp.down_proj"] == (128, 256)
    assert shapes["model.layers.0.self_attn.k_proj"] == (64, 128)
    assert shapes["lm_head"] == (320, 128)


def test_sharded_and_tied_checkpoints_read_like_whole_ones(source: Path, tmp_path: Path) -> None:
    sharded = write_tiny_llama(tmp_path / "sharded", max_shard_size="300KB", tie_word_embeddings=True)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert layer_shapes(sharded) == layer_shapes(source)
    model = load_model(sharded, dtype="float32")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.training
    (sharded / "model-00002-of-00006.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00006"):
        open_checkpoint(sharded)


def test_headers_are_read_without_torch() -> None:
    code = (
        "import sys, pipeline.products.text.checkpoints, pipeline.products.text.optimize.candidate; "
        "print([m for m in ('torch', 'transformers', 'llmcompressor') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_estimate_counts_the_loaded_type(source: Path) -> None:
    num_parameters = read_checkpoint(source, root=source.parent).num_parameters
    assert estimate_load_bytes(source, dtype="bfloat16") == 2 * num_parameters
    assert estimate_load_bytes(source, dtype="auto") == 4 * num_parameters
    with pytest.raises(CheckpointError, match="use a smaller dtype or a larger machine"):
        check_memory(source, dtype="float32", available_bytes=1000)


def damage_missing(folder: Path) -> None:
    shutil.rmtree(folder)


def damage_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def damage_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def damage_truncated(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])


def damage_not_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")


def damage_empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def damage_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((12).to_bytes(8, "little") + b'{"a": {"x":1')


def damage_config(folder: Path) -> None:
    (folder / "config.json").write_text("{broken")


def damage_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def damage_model_type(folder: Path) -> None:
    edit_json(folder / "config.json", model_type=None)


def damage_text_config(folder: Path) -> None:
    edit_json(folder / "config.json", text_config=["no", "mapping"])


def damage_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def damage_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(b"\xff\xfe")


def damage_vocabulary(folder: Path) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    data["added_tokens"].append(data["added_tokens"][0] | {"id": 320, "content": "<|new|>"})
    (folder / "tokenizer.json").write_text(json.dumps(data))


def damage_method(folder: Path) -> None:
    edit_json(folder / "config.json", quantization_config={"quant_method": "bitsandbytes"})


DAMAGES = [
    (damage_missing, "expected a checkpoint folder, found none"),
    (damage_pickle, "found pickle weights 'pytorch_model.bin'"),
    (damage_no_weights, "expected model.safetensors or model.safetensors.index.json, found neither"),
    (damage_truncated, r"model.safetensors: its header promises \d+ bytes, the file has \d+"),
    (damage_not_safetensors, "not a safetensors file, or cut short at 43 bytes"),
    (damage_empty, "not a safetensors file, or cut short at 0 bytes"),
    (damage_header, "model.safetensors: the safetensors header is damaged"),
    (damage_config, "config.json: not readable as JSON"),
    (damage_no_config, "config.json: expected a file, found none"),
    (damage_model_type, "expected a `model_type`, got None"),
    (damage_text_config, r"text_config: expected a mapping, got \['no', 'mapping'\]"),
    (damage_no_tokenizer, "tokenizer.json: expected the tokenizer, found no file"),
    (damage_tokenizer, "tokenizer.json: not readable as JSON"),
    (damage_vocabulary, "ids up to 320, the embedding has 320 rows"),
    (damage_method, "expected one of compressed-tensors, gptq, awq, got 'bitsandbytes'"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=lambda v: getattr(v, "__name__", ""))
def test_damage_is_one_line(folder: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_checkpoint(folder, root=folder.parent)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_broken_values_name_the_tensor(folder: Path, value: float) -> None:
    break_value(folder, "model.layers.1.mlp.up_proj.weight", value)
    with pytest.raises(CheckpointError, match=r"'model.layers.1.mlp.up_proj.weight' has 1 NaN or infinite values of"):
        check_finite(iterate_weights(folder), where=folder)


def test_loading_refuses_weights_that_do_not_match_the_config(folder: Path) -> None:
    edit_json(folder / "config.json", num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"9 missing tensors, such as 'model\.layers\.2"):
        load_model(folder, dtype="float32")
    edit_json(folder / "config.json", num_hidden_layers=1)
    with pytest.raises(CheckpointError, match="9 unexpected tensors"):
        load_model(folder, dtype="float32")
    edit_json(folder / "config.json", num_hidden_layers=2, intermediate_size=128)
    with pytest.raises(CheckpointError, match=r"6 mismatched tensors, such as 'model\.layers\.0\.mlp\.down_proj"):
        load_model(folder, dtype="float32")


def test_loading_in_another_dtype(folder: Path) -> None:
    assert str(load_model(folder, dtype="bfloat16").dtype) == "torch.bfloat16"


def test_tokenizer_loads_and_a_damaged_one_is_refused(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer("a parcel").input_ids) == "a parcel"
    edit_json(folder / "tokenizer.json", model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]})
    with pytest.raises(CheckpointError, match="can't load the tokenizer"):
        load_tokenizer(folder)


def test_packed_weights_without_their_settings_are_refused(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.qweight"] = tensors.pop("model.layers.0.mlp.up_proj.weight").int()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="has no `quantization_config`"):
        open_checkpoint(folder)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_old_formats_say_which_package_they_need(folder: Path, method: str) -> None:
    if importlib.util.find_spec("gptqmodel"):
        pytest.skip("gptqmodel is installed")
    edit_json(folder / "config.json", quantization_config={"quant_method": method, "bits": 4, "group_size": 64})
    assert read_checkpoint(folder, root=folder.parent).format == method
    with pytest.raises(CheckpointError, match="need the package gptqmodel, which is not installed; `pip install"):
        load_model(folder, dtype="float32")


def test_index_that_names_the_wrong_shard_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "sharded", max_shard_size="300KB")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name, file = next(iter(index["weight_map"].items()))
    index["weight_map"][name] = next(f for f in index["weight_map"].values() if f != file)
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="expected tensor"):
        read_tensors(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    """The index names one of them, and not every loader asks it."""
    from safetensors.torch import load_file, save_file

    folder = write_tiny_llama(tmp_path / "sharded", max_shard_size="300KB")
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    tensors = load_file(first)
    name = next(iter(load_file(second)))
    save_file(tensors | {name: load_file(second)[name] + 1}, first, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"expected tensor '{name}' in one shard, found it in '{first.name}'"):
        read_tensors(folder)


def test_a_wrong_total_size_in_the_index_changes_nothing(tmp_path: Path) -> None:
    """Many a tool writes that of another number format, and no loader reads it."""
    folder = write_tiny_llama(tmp_path / "sharded", max_shard_size="300KB")
    before = read_checkpoint(folder, root=tmp_path)
    edit_json(folder / "model.safetensors.index.json", metadata={"total_size": 1})
    after = read_checkpoint(folder, root=tmp_path)
    assert (after.num_bytes, after.num_parameters) == (before.num_bytes, before.num_parameters)


def test_several_types_in_one_file_are_read_and_loaded_as_stored(folder: Path) -> None:
    """Norms are often kept in float32 beside weights in bfloat16; the main type is that of most bytes."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    mixed = {name: t if "norm" in name else t.to(torch.bfloat16) for name, t in tensors.items()}
    save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", dtype="bfloat16")
    record = read_checkpoint(folder, root=folder.parent)
    num_bytes = sum(t.numel() * t.element_size() for t in mixed.values())
    assert (record.dtype, record.num_bytes) == ("bfloat16", num_bytes)
    assert record.num_parameters == sum(t.numel() for t in tensors.values())
    assert {info.dtype for info in open_checkpoint(folder).values()} == {"BF16", "F32"}
    # as transformers does: one type for all, of config.json
    assert {parameter.dtype for parameter in load_model(folder, dtype="auto").parameters()} == {torch.bfloat16}


def test_a_tied_head_in_the_file_counts_once_and_must_equal_the_embedding(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_tiny_llama(tmp_path / "tied", tie_word_embeddings=True)
    alone = read_checkpoint(folder, root=tmp_path)
    check_tied_head(folder)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    assert read_checkpoint(folder, root=tmp_path).num_parameters == alone.num_parameters
    assert sum(p.numel() for p in load_model(folder, dtype="auto").parameters()) == alone.num_parameters
    check_tied_head(folder)
    head[0, 0] += 1
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"expected 'lm_head\.weight' to equal 'model\.embed_tokens\.weight'"):
        check_tied_head(folder)
    edit_json(folder / "config.json", tie_word_embeddings=False)
    check_tied_head(folder)


def test_a_head_is_tied_where_config_json_leaves_it_to_the_architecture(tmp_path: Path) -> None:
    """Gemma ties by default, and transformers before 5 wrote no key then: a head of other values passed."""
    from safetensors.torch import load_file, save_file

    folder = write_tiny_model(tmp_path / "gemma", "gemma2")
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    alone, tensors = read_checkpoint(folder, root=tmp_path), load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    check_tied_head(folder)
    assert read_checkpoint(folder, root=tmp_path).num_parameters == alone.num_parameters
    save_file(tensors | {"lm_head.weight": head + 1}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings: expected 'lm_head\.weight' to equal"):
        check_tied_head(folder)
    edit_json(folder / "config.json", model_type="llama")  # which ties nothing by itself
    check_tied_head(folder)
    edit_json(folder / "config.json", model_type="unheard-of")
    check_tied_head(folder)
