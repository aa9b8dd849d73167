"""Latents of the reference, for candidates that denoise as it does: then only what decodes them differs.

Denoising is most of the time of an evaluation, and of a step that changes the decoder alone it makes the same latents
to the last bit. So the reference keeps its own, batch by batch:

    build/<product>/latents/<eval>/<what makes them>/<batch>

What makes them: all files of the pipeline but the VAE's and pictures beside it, all settings but those of a decode, the
eval with its prompts and judges, the code, the libraries and the machine. A process that draws for another candidate
first draws two batches by itself, the second after a decode of its own. It takes the others from here if both are equal
bit by bit. Once one is not, it draws the rest. What has the reference's own fingerprint, under whatever name, takes
none: it is there to show whether anything moves.

To remove the folder costs time alone.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.errors import EvidenceError
from pipeline.products.images.rendering import Latents
from pipeline.records.digests import digest_bytes, digest_json
from pipeline.records.files import read_bounded, write_bytes

NUM_COMPARED = 2  # batches: what one leaves behind in its process, the next would show
DECODING = ("vae_dtype", "tiling")  # what a setting of a decode begins with
PICTURE = ".png"  # some pipelines come with a few, which they do not read
_MARK = 64  # bytes of a digest: a file begins with that of the rest, which begins with a fingerprint


@dataclass
class SharedLatents:
    """The reference's latents, as a process sees them that keeps or takes them."""

    folder: Path  # of those that are made in one way
    mark: str  # the fingerprint of what this process draws for
    is_kept_here: bool  # the process draws for the reference
    num_equal: int = 0  # batches that were drawn here and compared
    differ: bool = False  # one of them was not equal

    def remove_others(self) -> None:
        """Remove what was made in another way."""
        for other in self.folder.parent.glob("*"):
            if other != self.folder and not self.folder.parent.is_symlink():
                shutil.rmtree(other, ignore_errors=True)

    def take(self, batch: str, device: torch.device) -> Latents | None:
        """Return a batch's latents, on a device; None where they are to be drawn.

        Args:
            batch: digest of its prompts.
            device: where they are decoded.
        """
        return self._read(batch, device) if self.num_equal >= NUM_COMPARED and not self.differ else None

    def keep_or_compare(self, batch: str, drawn: Latents) -> None:
        """Keep a batch that was drawn for the reference; compare one of another candidate, until that is settled."""
        if self.is_kept_here:
            with contextlib.suppress(OSError):  # without it others draw their own
                self._write(batch, drawn)
        elif not self.differ and (kept := self._read(batch, drawn.values.device)):
            is_equal = _are_equal(kept.values, drawn.values)
            self.num_equal += is_equal
            self.differ = not is_equal

    def _write(self, batch: str, latents: Latents) -> None:
        from safetensors.torch import save

        tensors = {"values": latents.values.cpu()}
        if latents.std_ratios:
            tensors["std_ratios"] = torch.stack(latents.std_ratios)
        data = self.mark.encode() + save(tensors)
        write_bytes(self.folder / batch, digest_bytes(data).encode() + data)

    def _read(self, batch: str, device: torch.device) -> Latents | None:
        """Return what was written; None where there is nothing, not all of it, or what this process draws itself."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            written = read_bounded(self.folder / batch)
            data = written[_MARK:]
            if digest_bytes(data).encode() != written[:_MARK] or data[:_MARK] == self.mark.encode():
                return None
            tensors = load(data[_MARK:])
            return Latents(tensors["values"].to(device), list(tensors.get("std_ratios", ())))
        except (OSError, EvidenceError, SafetensorError, KeyError):
            return None


def _are_equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Say whether two float32 tensors are equal bit by bit, of which NaN is no exception."""
    return ours.shape == theirs.shape and torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def describe_denoising(facts: Mapping[str, Any], vae_scale_factor: int) -> str:
    """Return the digest of all that makes a pipeline's latents what they are.

    Args:
        facts: of a process that loaded it, by section of its fingerprint, and the key of the eval.
        vae_scale_factor: pixels a latent pixel; some U-Nets are told the size of the picture.
    """
    digests = facts["checkpoint"]["files"].items()
    files = {name: digest for name, digest in digests if not name.startswith("vae/") and not name.endswith(PICTURE)}
    serving = {key: value for key, value in facts["serving"].items() if not key.startswith(DECODING)}
    serving["channels_last"] = sorted(set(serving["channels_last"]) - {"vae"})
    rest = {key: value for key, value in facts.items() if key not in ("checkpoint", "serving")}
    return digest_json([files, serving, rest, vae_scale_factor])
