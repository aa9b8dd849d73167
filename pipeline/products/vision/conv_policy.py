"""The algorithm and the number format of each convolution of a network, and running it that way.

    resolved = resolve_policy(network, algorithm="winograd_f43", dtype="float16",
                              rules=[(["branches.small.*"], "direct", "float16")])
    apply_policy(network, resolved.layers)

A policy gives every 2d convolution an algorithm and a dtype: those of the first rule with a pattern that matches its
name, or the default. Only 3x3 convolutions with stride 1 have a Winograd algorithm; others run direct in the same
dtype, and each is a fallback. `apply_policy` makes a convolution compute what such a kernel would
(`pipeline/numerics/winograd.py`): operands rounded, the result float32 with values of the dtype. Autocast does not
reach inside. Between convolutions nothing changes.

Not covered: transposed, 1d and 3d convolutions, and subclasses of Conv2d that compute in their own way. They run as
torch runs them. It is slower than torch, not faster: what a kernel would gain is measured elsewhere.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from pipeline.errors import NumericsError, SettingsError
from pipeline.numerics.winograd import direct_conv2d, winograd_conv2d
from pipeline.records.serving import ConvArithmetic

Algorithm = Literal["direct", "winograd_f23", "winograd_f43"]
Dtype = Literal["float32", "bfloat16", "float16"]
Rule = tuple[Sequence[str], Algorithm, Dtype]  # patterns of layer names, and what these layers get

TILES = {"winograd_f23": 2, "winograd_f43": 4}  # output pixels a side of a tile
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NUM_NEAREST = 3  # names in a message


@dataclass(frozen=True)
class ResolvedPolicy:
    """What each convolution gets, in the network's order, and where that is not what was asked for."""

    layers: dict[str, ConvArithmetic]
    fallbacks: tuple[tuple[str, str], ...]  # layer and reason


class EmulatedConv2d(nn.Conv2d):
    """A Conv2d that computes in a given arithmetic; `apply_policy` makes it out of one that is there."""

    arithmetic: ConvArithmetic

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 with values of the dtype; x is (images, channels, rows, columns), or one image."""
        images = x if x.dim() == 4 else x[None]
        with torch.autocast(x.device.type, enabled=False):
            output = convolve(self, images, self.arithmetic)
        return output if x.dim() == 4 else output[0]

    def extra_repr(self) -> str:
        """Say what torch says, and the arithmetic."""
        return f"{super().extra_repr()}, {self.arithmetic.algorithm} in {self.arithmetic.dtype}"


def convolve(conv: nn.Conv2d, x: torch.Tensor, arithmetic: ConvArithmetic) -> torch.Tensor:
    """Return what a convolution gives in an arithmetic, float32.

    Args:
        conv: its weights and settings are used, its hooks are not run.
        x: (images, channels, rows, columns).
        arithmetic: a Winograd algorithm only where `can_run_winograd`.

    Raises:
        NumericsError: the convolution can't run this algorithm, or not on so small an input.
    """
    dtype = TORCH_DTYPES[arithmetic.dtype]
    if arithmetic.algorithm != "direct":
        if reason := explain_no_winograd(conv):
            raise NumericsError(f"{arithmetic.algorithm}: expected a 3x3 convolution with stride 1, got {reason}")
        tile = TILES[arithmetic.algorithm]
        return winograd_conv2d(x, conv.weight, conv.bias, tile=tile, dtype=dtype, padding=find_padding(conv))
    padding = conv.padding
    if conv.padding_mode != "zeros":  # as Conv2d does
        x, padding = F.pad(x.float(), conv._reversed_padding_repeated_twice, mode=conv.padding_mode), 0
    return direct_conv2d(
        x,
        conv.weight,
        conv.bias,
        dtype=dtype,
        padding=padding,
        stride=conv.stride,
        dilation=conv.dilation,
        groups=conv.groups,
    )


def list_convolutions(network: nn.Module) -> dict[str, nn.Conv2d]:
    """Return the convolutions that a policy covers, by layer name in the network's order."""
    return {name: module for name, module in network.named_modules() if _is_covered(module)}


def can_run_winograd(conv: nn.Conv2d) -> bool:
    """Say whether a convolution is 3x3 with stride 1, no dilation, no groups, and equal padding with zeros."""
    return not explain_no_winograd(conv)


def explain_no_winograd(conv: nn.Conv2d) -> str:
    """Return why a convolution has no Winograd algorithm ("stride 2"), or an empty text if it has."""
    rows, columns = conv.kernel_size
    if (rows, columns) != (3, 3):
        return f"{rows}x{columns} kernel"
    for name, (down, across) in (("stride", conv.stride), ("dilation", conv.dilation)):
        if (down, across) != (1, 1):
            return f"{name} {down}" if down == across else f"{name} {down}x{across}"
    if conv.groups != 1:
        return f"{conv.groups} groups"
    if conv.padding_mode != "zeros":
        return f"padding mode {conv.padding_mode}"
    if not isinstance(conv.padding, str) and conv.padding[0] != conv.padding[1]:
        return f"padding {conv.padding[0]}x{conv.padding[1]}"
    return ""


def find_padding(conv: nn.Conv2d) -> int:
    """Return the rows and columns of zeros on each side of a convolution that can run Winograd."""
    return {"same": 1, "valid": 0}[conv.padding] if isinstance(conv.padding, str) else int(conv.padding[0])


def resolve_policy(
    network: nn.Module, *, algorithm: Algorithm, dtype: Dtype, rules: Sequence[Rule] = ()
) -> ResolvedPolicy:
    """Give every convolution its arithmetic.

    Args:
        network: its layer names are what `named_modules` gives.
        algorithm: of convolutions that no rule names.
        dtype: of convolutions that no rule names.
        rules: patterns as a shell has them (`branches.small.*`), algorithm and dtype; the first that matches holds.

    Returns:
        The arithmetic of each convolution that is covered. A fallback for each that can't run the Winograd algorithm
        it was given, and for each that is not covered and was given anything but float32.

    Raises:
        SettingsError: an unknown algorithm or dtype, or a pattern that matches no convolution.
    """
    covered, others = list_convolutions(network), list_others(network)
    _check_patterns(rules, covered, others)
    default = ConvArithmetic(algorithm=algorithm, dtype=dtype)
    parsed = [(patterns, ConvArithmetic(algorithm=asked, dtype=in_dtype)) for patterns, asked, in_dtype in rules]
    layers, fallbacks = {}, []
    for name, conv in covered.items():
        given = _find_arithmetic(name, parsed, default)
        reason = explain_no_winograd(conv) if given.algorithm != "direct" else ""
        if reason:
            fallbacks.append((name, f"{reason}: direct instead of {given.algorithm}"))
        layers[name] = ConvArithmetic(algorithm="direct", dtype=given.dtype) if reason else given
    for name, module in others.items():
        if _find_arithmetic(name, parsed, default) != ConvArithmetic(algorithm="direct", dtype="float32"):
            fallbacks.append((name, f"{type(module).__name__} is not covered: it runs as torch runs it"))
    return ResolvedPolicy(layers, tuple(fallbacks))


def apply_policy(network: nn.Module, policy: Mapping[str, ConvArithmetic]) -> None:
    """Make convolutions compute in their arithmetic, in place; names, weights and hooks stay as they are.

    Args:
        network: convolutions that the policy does not name stay as they are.
        policy: arithmetic by layer name; a second policy replaces the first.

    Raises:
        SettingsError: a name is that of no convolution.
        NumericsError: a convolution can't run the algorithm it was given.
    """
    covered = list_convolutions(network)
    for name, arithmetic in policy.items():
        if name not in covered:
            raise SettingsError(format_miss(name, covered, list_others(network)))
        if arithmetic.algorithm != "direct" and (reason := explain_no_winograd(covered[name])):
            raise NumericsError(
                f"{name}: expected a 3x3 convolution with stride 1 for {arithmetic.algorithm}, "
                f"got {reason}; `resolve_policy` finds what a layer can run"
            )
    for name, arithmetic in policy.items():
        # the class and not a closure as `forward`: a deep copy of the network would go on reading these weights
        covered[name].__class__ = EmulatedConv2d
        covered[name].arithmetic = arithmetic


def _is_covered(module: nn.Module) -> bool:
    """Say whether a module is a Conv2d that computes as Conv2d does."""
    if isinstance(module, EmulatedConv2d):
        return True
    return (
        isinstance(module, nn.Conv2d)
        and type(module).forward is nn.Conv2d.forward
        and type(module)._conv_forward is nn.Conv2d._conv_forward
        and not parametrize.is_parametrized(module)
    )


def list_others(network: nn.Module) -> dict[str, nn.Module]:
    """Return the convolutions that a policy does not cover."""
    return {name: m for name, m in network.named_modules() if isinstance(m, _ConvNd) and not _is_covered(m)}


def _find_arithmetic(
    name: str, rules: Sequence[tuple[Sequence[str], ConvArithmetic]], default: ConvArithmetic
) -> ConvArithmetic:
    matching = (given for patterns, given in rules if any(fnmatchcase(name, pattern) for pattern in patterns))
    return next(matching, default)


def _check_patterns(rules: Sequence[Rule], covered: Mapping[str, nn.Module], others: Mapping[str, nn.Module]) -> None:
    for path, pattern in _list_patterns(rules):
        if not any(fnmatchcase(name, pattern) for name in covered):
            raise SettingsError(f"{path}: {format_miss(pattern, covered, others)}")
    taken: set[str] = set()
    for i, (patterns, *_) in enumerate(rules):
        named = {name for name in covered if any(fnmatchcase(name, pattern) for pattern in patterns)}
        if named <= taken:
            raise SettingsError(
                f"rules.{i}: every layer that it names is named by a rule before it, and the first "
                "that matches holds; move it forward, or remove it"
            )
        taken |= named


def _list_patterns(rules: Sequence[Rule]) -> Iterator[tuple[str, str]]:
    for i, (patterns, *_) in enumerate(rules):
        for j, pattern in enumerate(patterns):
            yield f"rules.{i}.layers.{j}", pattern


def format_miss(pattern: str, covered: Mapping[str, nn.Module], others: Mapping[str, nn.Module]) -> str:
    """Say what a pattern that matches no covered convolution does match, or would nearly."""
    if matched := next((name for name in others if fnmatchcase(name, pattern)), None):
        return (
            f"{pattern!r} matches {matched}, a {type(others[matched]).__name__}, which a policy does not cover: it "
            "runs as torch runs it; remove the pattern"
        )
    if not covered:
        return f"{pattern!r} matches no convolution: this network has none"
    nearest = difflib.get_close_matches(pattern, list(covered), n=_NUM_NEAREST, cutoff=0)
    return f"{pattern!r} matches no convolution; the nearest are {', '.join(nearest)}"
