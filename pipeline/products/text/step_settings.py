"""The settings of the text product's optimisation steps: schemes of numbers, calibration, quantising and drafts.

What contradicts itself within one step is found here; `problems.py` finds what contradicts other settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pipeline.products.text.schemes import (
    PRESETS,
    NumberFormat,
    Scheme,
    build_cache_format,
    find_preset,
    has_free_groups,
)
from pipeline.settings.base import Settings


class Calibration(Settings):
    """Which texts a quantiser sees, how many, how long, and how they are weighted."""

    sources: list[str] = Field(min_length=1)  # buckets of the calibration set
    num_samples: int = Field(ge=1)
    max_tokens: int = Field(ge=1)  # a sample is cut after this many tokens
    length_exponent: float = Field(default=0, ge=0, le=4)  # sampling weight = (number of tokens) ** exponent
    seed: int = Field(default=0, ge=0)  # the sign would be dropped


class WeightStep(Settings):
    """A step that rewrites weights; without a calibration it needs no texts."""

    kind: str
    calibration: Calibration | None = None


class NumberFormats(Settings):
    """A scheme of numbers: a preset of compressed-tensors by its name, or weights and inputs spelt out."""

    scheme: str | None = None
    group_size: int | None = Field(default=None, ge=1)  # input channels that share a scale; None: as the scheme has it
    weights: NumberFormat | None = None
    input_activations: NumberFormat | None = None

    def resolve(self) -> Scheme:
        """Return the scheme, with its groups of the size that was asked for."""
        if self.weights is None:
            return find_preset(self.scheme or "", self.group_size)
        return Scheme(weights=self.weights, input_activations=self.input_activations)

    def find_problems(self) -> Iterator[str]:
        """Yield what contradicts itself, one line each, starting with the key."""
        spelt_out = next((name for name in ("input_activations", "weights") if getattr(self, name)), None)
        if self.scheme is not None and self.scheme not in PRESETS:
            yield f"scheme: expected one of {', '.join(PRESETS)}, got {self.scheme!r}"
        elif self.scheme is not None and spelt_out:
            yield f"{spelt_out}: expected none beside the scheme {self.scheme}; remove one"
        elif self.scheme is None and self.weights is None:
            yield f"scheme: expected one of {', '.join(PRESETS)}, or weights spelt out, found none"
        elif self.scheme is not None and self.group_size and not has_free_groups(PRESETS[self.scheme]):
            yield f"group_size: expected none with scheme {self.scheme}, which has its own; remove it"
        elif self.weights is not None and self.group_size is not None:
            yield "group_size: expected it in weights, as they are spelt out; move it there"
        elif self.weights is not None:
            yield from self.resolve().find_problems()


class KvCache(Settings):
    """How keys and values are stored while a model answers.

    Attributes:
        dtype: "fp8" is E4M3.
        strategy: what shares a scale: a layer or a head ("tensor", "attn_head"), calibrated and stored; or each token,
            whose scale is taken while it runs.
    """

    dtype: Literal["fp8"]
    strategy: Literal["tensor", "attn_head", "token"] = "tensor"

    def resolve(self) -> NumberFormat:
        """Return the numbers that it is stored in."""
        return build_cache_format(self.strategy)


class LayerRule(NumberFormats):
    """The scheme of some layers, in place of the step's own."""

    layers: list[str] = Field(min_length=1)  # names of layers, shell patterns, or "re:<regex>"


# settings that one algorithm alone has
_OWN_SETTINGS = {"damping_fraction": "gptq", "activation_order": "gptq", "num_grid_points": "awq"}


class QuantizeStep(WeightStep, NumberFormats):
    """Quantise the linear layers: store weights in few bits, and round inputs where the scheme says so.

    Attributes:
        algorithm: how weights are rounded. "rtn" rounds to nearest. "gptq" (Frantar et al. 2022) makes up for errors
            layer by layer, to second order. "awq" (Lin et al. 2023) scales salient channels before it rounds.
        rules: of some layers; the first that matches a layer counts.
        kv_cache: keys and values in few bits; None: as they are. Without a scheme it is all that the step quantises.
        smoothing_strength: of SmoothQuant (Xiao et al. 2022), which moves outliers of inputs into the weights before
            they are rounded; None: it is left out.
        world_size: processes that share the calibration, one a GPU. Another number writes other weights.
    """

    kind: Literal["quantize", "gptq", "awq"]  # the last two are read as `quantize`, see below
    algorithm: Literal["rtn", "gptq", "awq"] = "rtn"
    exclude: list[str] = ["lm_head"]  # names of layers, shell patterns, or "re:<regex>"
    rules: list[LayerRule] = []
    kv_cache: KvCache | None = None
    smoothing_strength: float | None = Field(default=None, gt=0, lt=1)
    damping_fraction: float = Field(default=0.01, gt=0, lt=1)  # of the mean Hessian diagonal
    activation_order: bool = False
    num_grid_points: int = Field(default=20, ge=3)  # the grid steps by 1 / (points - 2)
    world_size: int = Field(default=1, ge=1, le=64)

    @property
    def rounds_to_nearest(self) -> bool:
        """Whether no weight is further than half a step from its source."""
        return self.algorithm != "gptq"

    @property
    def is_cache_alone(self) -> bool:
        """Whether weights and inputs stay as they are."""
        others = (self.scheme, self.group_size, self.weights, self.input_activations, *self.rules)
        return self.kv_cache is not None and all(other is None for other in others)

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The step's own scheme, and those of its rules."""
        return () if self.is_cache_alone else (self.resolve(), *(rule.resolve() for rule in self.rules))

    def build_record(self) -> dict[str, Any]:
        """Return the settings as JSON, without those that another algorithm has; one process is as before any."""
        unused = {name for name, owner in _OWN_SETTINGS.items() if owner != self.algorithm}
        return self.model_dump(mode="json", exclude=unused | ({"world_size"} if self.world_size == 1 else set()))

    @model_validator(mode="before")
    @classmethod
    def _read_old(cls, data: Any) -> Any:
        """Take the settings of a released bundle, where the kind was the algorithm and `bits` stood for the scheme."""
        if not isinstance(data, dict) or data.get("kind") not in ("gptq", "awq"):
            return data
        bits, symmetric, size = data.get("bits", 4), data.get("symmetric", True), data.get("group_size", 128)
        weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": size, "symmetric": symmetric}
        presets = {"4 True": "W4A16", "4 False": "W4A16_ASYM", "8 True": "W8A16"}
        preset = presets.get(f"{bits!r} {symmetric!r}")
        old = {"scheme": preset, "group_size": size} if preset else {"weights": weights}
        kept = {key: value for key, value in data.items() if key not in ("bits", "symmetric", "group_size")}
        return kept | old | {"kind": "quantize", "algorithm": data["kind"]}

    def find_problems(self) -> Iterator[str]:
        """Yield what contradicts itself, one line each, starting with the key."""
        formats: dict[str, NumberFormats] = {} if self.is_cache_alone else {"": self}
        formats |= {f"rules.{i}.": rule for i, rule in enumerate(self.rules)}
        problems = [at + text for at, one in formats.items() for text in NumberFormats.find_problems(one)]
        yield from problems
        for name, algorithm in _OWN_SETTINGS.items():
            is_changed = getattr(self, name) != type(self).model_fields[name].default
            if is_changed and algorithm != self.algorithm:
                yield f"{name}: {algorithm} alone has it, got algorithm {self.algorithm}; remove it"
        if self.smoothing_strength is not None and self.algorithm == "awq":
            yield "smoothing_strength: expected none with algorithm awq, which scales channels itself; remove it"
        if self.is_cache_alone and self.exclude != type(self).model_fields["exclude"].default:
            yield "exclude: expected none without a scheme, as no layer is quantised; remove it"
        if self.is_cache_alone and (self.algorithm != "rtn" or self.smoothing_strength is not None):
            yield "scheme: expected the numbers that weights are stored in, found none beside kv_cache; set one"
            return
        if problems:
            return
        coarse = next((s.weights.name for s in self.schemes if s.weights.strategy == "tensor"), None)
        if coarse and self.algorithm == "awq":
            yield f"algorithm: expected rtn or gptq, as {coarse} has one scale a layer and awq scales channels, got awq"
        needs = next((scheme.name for scheme in self.schemes if scheme.needs_calibration), None)
        if self.kv_cache and not self.kv_cache.resolve().dynamic:
            needs = f"kv_cache with strategy {self.kv_cache.strategy}"
        if self.smoothing_strength is not None:
            needs = "smoothing_strength"
        if self.algorithm != "rtn":
            needs = self.algorithm
        if needs and self.calibration is None:
            yield f"calibration: expected the texts that {needs} is calibrated on, found none"
        if self.calibration and not needs:
            yield "calibration: expected none, as rounding to nearest looks at no text here; remove it"
        if self.world_size > 1 and self.calibration is None:
            yield f"world_size: expected 1 without calibration, which is all that ranks share, got {self.world_size}"
        if self.calibration and self.world_size > (num := self.calibration.num_samples):
            yield f"world_size: expected at most a rank for each of {num} samples, got {self.world_size}"


class SpeculativeStep(Settings):
    """Speculative decoding (Leviathan et al. 2022): tokens are drafted cheaply, the target checks them in one pass."""

    kind: Literal["speculative"]
    method: str  # "draft_model", "prompt_lookup", or another one that the engine knows
    draft: str | None = None  # checkpoint of the draft model: a folder, or hf://ORG/NAME@REVISION
    num_speculative_tokens: int = Field(ge=1, le=16)  # drafted per target forward pass
    min_acceptance: float | None = Field(default=None, gt=0, le=1)  # of the drafted tokens; below it fails
    options: dict[str, Any] = {}  # further ones of the method, as the engine spells them
    lossy: bool = False  # the answers may be others than the target's own

    def build_record(self) -> dict[str, Any]:
        """Return the settings as JSON, without the gate's: another threshold makes no other candidate."""
        return self.model_dump(mode="json", exclude={"min_acceptance"})

    @model_validator(mode="before")
    @classmethod
    def _read_old(cls, data: Any) -> Any:
        """Take the settings of a released bundle, which may spell the number of drafted tokens `num_tokens`."""
        if not isinstance(data, dict) or "num_tokens" not in data or "num_speculative_tokens" in data:
            return data
        kept = {key: value for key, value in data.items() if key != "num_tokens"}
        return kept | {"num_speculative_tokens": data["num_tokens"]}


Step = Annotated[QuantizeStep | SpeculativeStep, Field(discriminator="kind")]
