"""A checkpoint that came quantised: its tensors are those that its config.json says, or it is refused in one line.

The checkpoints are headers with zeros, by the library's own layouts (`test_schemes.py` holds them against it).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import CheckpointError
from pipeline.products.text.checkpoints import _count_parameters
from pipeline.products.text.footprint import count_load_bytes
from pipeline.products.text.schemes import PRESETS, Part, Scheme, StoredGroups, find_preset
from pipeline.products.text.stored_schemes import check_stored_schemes
from pipeline.running.weight_files import TensorInfo

SHAPES = {"self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256), "mlp.down_proj": (256, 512)}
LAYERS = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in SHAPES.items()}
Q, K = "model.layers.1.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
KEYS = {f"model.layers.{i}.self_attn.{part}": ("BF16", (1,)) for i in range(2) for part in ("k_scale", "v_scale")}
FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


class Checkpoint:
    """What config.json and the headers say; tests change both."""

    def __init__(self, *schemes: Scheme) -> None:
        """Make layers of one scheme, or of several by turns."""
        self.parts: dict[str, Part] = {"model.embed_tokens.weight": ("BF16", (64, 256))}
        self.parts |= {"model.layers.0.input_layernorm.weight": ("BF16", (256,)), "lm_head.weight": ("BF16", (64, 256))}
        groups = {f"group_{i}": self._describe(scheme) for i, scheme in enumerate(schemes)}
        self.quantization: dict[str, Any] = {
            "quant_method": "compressed-tensors",
            "format": schemes[0].storage if len(schemes) == 1 else "mixed-precision",
            "config_groups": groups,
            "ignore": ["lm_head"],
        }
        for i, (layer, shape) in enumerate(LAYERS.items()):
            place = i % len(schemes)
            self.parts |= {f"{layer}.{part}": info for part, info in schemes[place].list_parts(shape).items()}
            if len(schemes) > 1:
                groups[f"group_{place}"]["targets"].append(layer)
        if len(schemes) == 1:
            groups["group_0"]["targets"] = ["Linear"]

    @staticmethod
    def _describe(scheme: Scheme) -> dict[str, Any]:
        return scheme.model_dump() | {"targets": [], "format": scheme.storage}

    @property
    def config(self) -> dict[str, Any]:
        return {"model_type": "llama", "num_attention_heads": 8, "quantization_config": self.quantization}

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(dtype, shape, 0, "model.safetensors") for name, (dtype, shape) in self.parts.items()}

    def describe(self, part: str | None = None, **changes: Any) -> None:
        """Change the group, or a part of it."""
        group = self.quantization["config_groups"]["group_0"]
        (group[part] if part else group).update(changes)

    def check(self) -> None:
        check_stored_schemes(Path("made/config.json"), self.config, self.tensors)

    def set(self, name: str, dtype: str, *shape: int) -> None:
        self.parts[name] = (dtype, shape)

    def drop(self, *names: str) -> None:
        for name in names:
            del self.parts[name]

    def make_dense(self, layer: str) -> None:
        self.parts = {name: part for name, part in self.parts.items() if not name.startswith(f"{layer}.")}
        self.parts[f"{layer}.weight"] = ("BF16", LAYERS.get(layer, (64, 256)))


SCHEMES = PRESETS | {
    "fp8 weights": Scheme(weights=PRESETS["FP8_DYNAMIC"].weights),
    "groups of 32": find_preset("W4A16_ASYM", 32),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_what_the_library_writes_passes(name: str) -> None:
    made = Checkpoint(SCHEMES[name])
    made.check()
    for part, (dtype, shape) in made.parts.items():  # others write scales of floats in a wider type, or none's shape
        if dtype == "BF16" and part.endswith("_scale"):
            made.parts[part] = ("F32", () if shape == (1,) else shape)
    made.check()


def test_groups_by_name_layers_that_are_no_linear_ones_and_an_order_of_channels_pass() -> None:
    made = Checkpoint(PRESETS["W4A16"], PRESETS["FP8_DYNAMIC"])
    made.set("model.layers.0.mlp.router.weight", "BF16", 4, 256)  # targeted by nothing that names it
    made.set(f"{K}.bias", "BF16", 128)
    made.check()
    one = Checkpoint(PRESETS["W4A16"])
    one.set("model.layers.0.mlp.router.weight", "BF16", 4, 256)  # `Linear` targets it, but no such layer is quantised
    one.set(f"{Q}.weight_g_idx", "I32", 256)
    one.check()


@pytest.mark.parametrize("storage", ["pack-quantized", "int-quantized", "naive-quantized"])
def test_whole_numbers_may_be_packed_or_not(storage: str) -> None:
    scheme = PRESETS["W8A8"]
    made = Checkpoint(scheme)
    for layer, shape in LAYERS.items():
        made.drop(*(f"{layer}.{part}" for part in scheme.list_parts(shape)))
        made.parts |= {f"{layer}.{part}": info for part, info in scheme.list_parts(shape, storage=storage).items()}
    made.describe(format=storage)
    made.check()


def test_a_width_that_fills_no_word_passes() -> None:
    """172 values of 4 bits take 22 words of 8; the scales tell that 4 of them are filling."""
    scheme = find_preset("W4A16", 4)
    made = Checkpoint(scheme)
    made.parts |= {f"{Q}.{part}": info for part, info in scheme.list_parts((256, 172)).items()}
    made.check()


def spread(made: Checkpoint) -> None:
    made.set(f"{Q}.weight_scale", "BF16", 256, 1)


def ignore(made: Checkpoint) -> None:
    made.quantization["ignore"].append("re:.*q_proj")


def round_outputs(made: Checkpoint) -> None:
    made.quantization["config_groups"]["group_0"]["output_activations"] = {"num_bits": 8}


def store_floats(made: Checkpoint) -> None:
    made.make_dense(Q)
    made.set(f"{Q}.weight_scale", "BF16", 256, 2)


def empty(made: Checkpoint) -> None:
    for layer in LAYERS:
        made.make_dense(layer)


@pytest.mark.parametrize(
    ("scheme", "change", "said"),
    [
        ("W4A16", spread, "q_proj': expected .*weight_scale BF16 256x2, .* found .*weight_scale BF16 256x1,"),
        ("FP8", lambda m: m.set(f"{K}.weight_scale", "BF16", 128, 1), "weight_scale BF16 1, .* found .* BF16 128x1"),
        ("W8A8", lambda m: m.set(f"{K}.weight_scale", "BF16", 1), "weight_scale BF16 128x1, .* found .* BF16 1;"),
        ("FP8_BLOCK", lambda m: m.set(f"{Q}.weight_scale", "BF16", 256, 2), "weight_scale BF16 2x2, .* BF16 256x2"),
        ("W4A16", lambda m: m.drop(f"{Q}.weight_scale"), "q_proj': expected .*weight_scale.* found weight_packed"),
        (
            "FP8_DYNAMIC",
            lambda m: m.drop(f"{Q}.weight_scale"),
            "q_proj': expected .*weight_scale.* found weight F8_E4M3",
        ),
        (
            "FP8_BLOCK",
            lambda m: m.set(f"{Q}.weight", "F8_E4M3", 256, 200),
            "expected a width that the groups of fp8-128x",
        ),
        ("W4A16_ASYM", lambda m: m.drop(f"{Q}.weight_zero_point"), "expected .*weight_zero_point I32 32x2"),
        ("FP8", lambda m: m.drop(f"{K}.input_scale"), "k_proj': expected input_scale BF16 1, .* found weight F8"),
        ("FP8_DYNAMIC", lambda m: m.set(f"{K}.input_scale", "BF16", 1), "k_proj': expected weight F8.* found input_sc"),
        ("NVFP4", lambda m: m.drop(f"{K}.weight_global_scale"), "expected .*weight_global_scale F32 1"),
        ("FP8_DYNAMIC", lambda m: m.set(f"{Q}.weight", "I8", 256, 256), "expected weight F8_E4M3 .* found weight I8"),
        ("W4A16", lambda m: m.drop(f"{Q}.weight_packed"), "q_proj': expected weight_packed"),
        ("W4A16", lambda m: m.make_dense(Q), "expected the layer '.*q_proj' quantised, .* found weight BF16 256x256"),
        ("W4A16", ignore, "expected each quantised layer in one of config_groups and not in ignore, found '.*q_proj'"),
        ("W8A16", store_floats, r"found float ones \(.*q_proj\): each forward pass would have to round them"),
        ("W8A16", lambda m: m.quantization.update(format="dense"), r"found float ones \(format dense\)"),
        ("W8A8", round_outputs, "expected schemes of weights and inputs, got output_activations in group_0"),
        (
            "FP8_DYNAMIC",
            lambda m: m.describe("weights", type="int"),
            "expected format .* for int8-channel.* found 'float-",
        ),
        ("FP8_DYNAMIC", lambda m: m.describe(format="dense"), "expected format float-quantized .* found 'dense'"),
        ("MXFP4A16", lambda m: m.describe(format="nvfp4-pack-quantized"), "expected format mxfp4-pack-.* 'nvfp4-pack-"),
        ("W8A8", empty, "expected quantised layers, found none"),
        ("W8A8", lambda m: m.quantization.update(config_groups={"W8A8": ["Linear"]}), "with a mapping for each group"),
        ("W8A8", lambda m: m.quantization.update(ignore=["re:("]), "expected names or regular expressions in targets"),
        ("W8A8", lambda m: m.quantization.update(ignore=[3]), "expected names or regular expressions in targets"),
    ],
)
def test_another_checkpoint_than_its_config_says_is_refused(
    scheme: str, change: Callable[[Checkpoint], None], said: str
) -> None:
    """A scale of another shape was spread over its row and served, and float weights unrounded."""
    made = Checkpoint(PRESETS[scheme])
    change(made)
    with pytest.raises(CheckpointError, match=f"^made/config.json: .*{said}"):
        made.check()


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_a_calibrated_cache_needs_its_scales(strategy: str) -> None:
    """Engines take 1 where there is none."""
    made = Checkpoint(PRESETS["FP8_DYNAMIC"])
    made.quantization["kv_cache_scheme"] = FP8_CACHE | {"strategy": strategy}
    shape = (8, 1, 1) if strategy == "attn_head" else (1,)
    made.parts |= dict.fromkeys(KEYS, ("BF16", shape))
    made.check()
    made.set("model.layers.1.self_attn.v_scale", "BF16", 4, 1, 1)
    with pytest.raises(CheckpointError, match=r"kv_cache_scheme: expected .*1.self_attn.v_scale .* found shape .4, 1"):
        made.check()
    made.drop("model.layers.1.self_attn.v_scale")
    with pytest.raises(CheckpointError, match=r"kv_cache_scheme: expected .*1.self_attn.v_scale .* found none"):
        made.check()
    made.set("model.layers.1.self_attn.v_proj.output_scale", "BF16", 1)  # where older releases stored it
    made.check()
    made.drop("model.layers.1.self_attn.v_proj.output_scale")
    made.quantization["kv_cache_scheme"]["dynamic"] = True
    made.check()


def test_attention_or_a_cache_alone_leaves_all_layers_dense() -> None:
    made = Checkpoint(PRESETS["FP8_DYNAMIC"])
    empty(made)
    made.quantization["format"] = "dense"
    made.quantization["config_groups"] = {"a": {"targets": ["LlamaAttention"], "input_activations": FP8_CACHE}}
    made.check()
    made.quantization |= {"config_groups": {}, "kv_cache_scheme": FP8_CACHE}
    with pytest.raises(CheckpointError, match=r"kv_cache_scheme: expected .*k_scale .* found none"):
        made.check()
    made.parts |= KEYS
    made.check()


def test_formats_and_names_that_are_not_known_are_left_to_the_loader() -> None:
    made = Checkpoint(PRESETS["W4A16"])
    spread(made)
    made.quantization["config_groups"]["group_0"]["weights"]["num_bits"] = 3
    made.check()
    made = Checkpoint(PRESETS["W4A16"])
    spread(made)
    made.quantization["format"] = made.quantization["config_groups"]["group_0"]["format"] = "marlin-24"
    made.check()


def test_a_name_counts_before_a_regex_and_that_before_all() -> None:
    groups = {
        "all": {"targets": ["Linear"], "weights": {"num_bits": 1}},
        "some": {"targets": ["re:.*proj"], "weights": {"num_bits": 2}},
        "one": {"targets": ["a.proj"], "weights": {"num_bits": 3}},
    }
    stored = StoredGroups({"config_groups": groups, "ignore": ["re:.*head", "b.proj"]})
    assert [stored.find_bits(name) for name in ("a.proj", "c.proj", "c.other")] == [3, 2, 1]
    assert stored.find("lm_head") is None and stored.find("b.proj") is None


def test_parameters_count_by_the_width_of_their_own_layer() -> None:
    """All layers counted by the first group's: of W4 and W8 by rules a fifth too many."""
    made = Checkpoint(PRESETS["W8A16"], PRESETS["W4A16"])
    sizes = {"I32": 4, "BF16": 2, "I64": 8}
    tensors = {
        name: TensorInfo(info.dtype, info.shape, info.num_elements * sizes[info.dtype], info.file)
        for name, info in made.tensors.items()
    }
    odd = find_preset("W4A16", 4)
    odd_parts = odd.list_parts((256, 172))
    alone = {f"a.{part}": TensorInfo(dtype, shape, 4 * 256 * 22, "") for part, (dtype, shape) in odd_parts.items()}
    groups = {"config_groups": {"a": odd.model_dump() | {"targets": ["Linear"]}}}
    assert _count_parameters(alone, {"quantization_config": groups}) == 256 * 172, "words are filled up to 176"
    kept = 2 * 64 * 256 + 256
    linear = sum(rows * columns for rows, columns in LAYERS.values())
    assert _count_parameters(tensors, made.config) == kept + linear
    assert count_load_bytes(tensors, made.config, dtype="bfloat16") >= 2 * (kept + linear)
