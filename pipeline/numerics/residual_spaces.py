"""Which tensors inside an AutoencoderKL share a scale, and which layers lead from one scale to another.

A space is a set of tensors that have to be scaled together: the residual stream between two resampling
or shortcut convolutions, the output of a block's conv1, an attention's values. An edge is a layer that
reads one space and writes another. GroupNorm ends a space: what follows it has no scale. `range_fix`
chooses the scales. Modules are recognised by their parts, so that diffusers need not be imported; whatever
is not laid out like AutoencoderKL's encoder or decoder is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal

from torch import nn

from pipeline.errors import NumericsError

Part = Literal["decoder", "encoder"]

UNSCALED = ""  # the space of inputs and of what follows a norm


@dataclass(frozen=True)
class Edge:
    """A convolution or linear layer; its weight scales by target over source, its bias by target."""

    module: str
    source: str
    target: str


@dataclass
class ResidualSpaces:
    """Spaces by name, each with the modules that write into it, and the edges between them."""

    members: dict[str, list[str]] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    stream: str = UNSCALED  # where the walk is

    def add_edge(self, module: str, target: str, *, source: str = UNSCALED) -> None:
        """Let a layer write into a space, which begins to exist with its first writer."""
        self.members.setdefault(target, []).append(module)
        self.edges.append(Edge(module, source, target))

    def bridge(self, module: str) -> None:
        """Let a layer read the stream and begin a new one, named after it."""
        self.add_edge(module, module, source=self.stream)
        self.stream = module

    def add_block(self, path: str, block: Any) -> None:
        """Take in a residual block: norm1, conv1, norm2, conv2, and perhaps a shortcut convolution."""
        _require(block.time_emb_proj is None, path, "no time embedding")
        _require(block.upsample is None and block.downsample is None, path, "no resampling inside the block")
        for name in ("norm1", "norm2"):
            _require(isinstance(getattr(block, name), nn.GroupNorm), f"{path}.{name}", "a GroupNorm")
        self.add_edge(f"{path}.conv1", f"{path}.conv1")
        if block.conv_shortcut is not None:
            self.bridge(f"{path}.conv_shortcut")
        self.add_edge(f"{path}.conv2", self.stream)
        self.members[self.stream].append(path)

    def add_attention(self, path: str, attention: Any) -> None:
        """Take in an attention block: the values are a space of their own, the projection writes the stream."""
        _require(isinstance(attention.group_norm, nn.GroupNorm), f"{path}.group_norm", "a GroupNorm")
        _require(getattr(attention, "spatial_norm", None) is None, path, "no spatial norm")
        _require(not getattr(attention, "fused_projections", False), path, "separate projections (unfuse them)")
        values, projection = f"{path}.to_v", f"{path}.to_out.0"
        self.add_edge(values, values)
        if not attention.residual_connection:
            self.stream = projection
        self.add_edge(projection, self.stream, source=values)
        self.members[self.stream].append(path)

    def add_sampler(self, path: str, sampler: Any) -> None:
        """Take in an up- or downsampler: with a convolution it begins a new stream, without one it changes none."""
        _require(getattr(sampler, "norm", None) is None, path, "no norm of its own")
        if isinstance(getattr(sampler, "conv", None), nn.Conv2d):
            self.bridge(f"{path}.conv")
            self.members[self.stream].append(path)
        else:
            _require(not any(True for _ in sampler.parameters()), path, "one convolution named `conv`, or none")

    def add_stage(self, path: str, stage: Any, *, is_mid: bool = False) -> None:
        """Take in a stage; attention follows its block, but in the middle the first block stands alone."""
        blocks = [(f"{path}.resnets.{i}", block) for i, block in enumerate(stage.resnets)]
        attentions = [(f"{path}.attentions.{i}", a) for i, a in enumerate(getattr(stage, "attentions", None) or [])]
        if is_mid:
            self.add_block(*blocks.pop(0))
        for block, attention in zip_longest(blocks, attentions):
            steps = [(self.add_block, block), (self.add_attention, attention)]
            for add, step in reversed(steps) if is_mid else steps:
                if step is not None and step[1] is not None:
                    add(*step)
        for kind in ("upsamplers", "downsamplers"):
            for i, sampler in enumerate(getattr(stage, kind, None) or []):
                self.add_sampler(f"{path}.{kind}.{i}", sampler)


def trace_spaces(vae: nn.Module, part: Part) -> ResidualSpaces:
    """Walk one half of an AutoencoderKL in the order in which it runs.

    Args:
        vae: with or without attention in the middle, shortcut convolutions and (post_)quant_conv.
        part: which half.

    Raises:
        NumericsError: the half is not laid out like AutoencoderKL's; names the module.
    """
    half: Any = getattr(vae, part, None)
    needed = ("conv_in", "mid_block", "conv_norm_out", "conv_out", "up_blocks" if part == "decoder" else "down_blocks")
    _require(half is not None and all(hasattr(half, name) for name in needed), part, f"the parts {', '.join(needed)}")
    _require(isinstance(half.conv_norm_out, nn.GroupNorm), f"{part}.conv_norm_out", "a GroupNorm")
    spaces = ResidualSpaces()
    if part == "decoder" and getattr(vae, "post_quant_conv", None) is not None:
        spaces.bridge("post_quant_conv")
    spaces.bridge(f"{part}.conv_in")
    if part == "decoder":
        spaces.add_stage("decoder.mid_block", half.mid_block, is_mid=True)
    for i, stage in enumerate(half.up_blocks if part == "decoder" else half.down_blocks):
        spaces.add_stage(f"{part}.{'up' if part == 'decoder' else 'down'}_blocks.{i}", stage)
    if part == "encoder":
        spaces.add_stage("encoder.mid_block", half.mid_block, is_mid=True)
    return spaces


def _require(is_met: bool, path: str, expected: str) -> None:
    if not is_met:
        raise NumericsError(
            f"range fix: expected {expected} at {path!r}, found another layout; "
            "decode this VAE in float32 or bfloat16 instead"
        )
