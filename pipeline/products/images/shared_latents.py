"""Latents of the reference, for candidates that denoise as it does: then only what decodes them differs.

Denoising is most of the time of an evaluation, and of a step that changes the decoder alone it makes the same latents
to the last bit. So the reference keeps its own, batch by batch:

    build/<product>/latents/<what makes them>/<batch>.npz

What makes them: all files of the pipeline but the VAE's, all settings but those of a decode, the libraries and the
machine. A process that draws for another candidate first draws a batch of its own; it takes the others from here if
that one is equal bit by bit, and otherwise draws all. A candidate without steps is the reference once more: what moves
between two repeats is what it is there to show, so it takes none.

A folder of other latents goes when the reference writes; `rm -r` of all of them costs time alone.
"""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.products.images.rendering import Latents
from pipeline.records.digests import digest_json
from pipeline.records.files import write_bytes

DECODING = ("vae_dtype", "tiling")  # what a setting of a decode begins with
PICTURE = ".png"  # some pipelines come with a few, which they do not read


@dataclass
class SharedLatents:
    """What a process keeps of the reference's latents, or takes."""

    folder: Path  # of those that are made in one way
    is_kept_here: bool  # the process draws for the reference
    are_equal: bool | None = None  # to what this process draws; None: it has not compared any yet

    def keep(self, batch: str, latents: Latents) -> None:
        """Write a batch's latents, and remove those that were made in another way."""
        for other in self.folder.parent.glob("*"):
            if other != self.folder:
                shutil.rmtree(other, ignore_errors=True)
        arrays = {"values": latents.values.cpu().numpy()}
        if latents.std_ratios:
            arrays["std_ratios"] = torch.stack(latents.std_ratios).numpy()
        file = io.BytesIO()
        np.savez(file, allow_pickle=False, **arrays)
        write_bytes(self.folder / f"{batch}.npz", file.getvalue())

    def find(self, batch: str, device: torch.device) -> Latents | None:
        """Return a batch's latents, on a device; None where there are none, or none that is whole."""
        try:
            with np.load(self.folder / f"{batch}.npz", allow_pickle=False) as arrays:
                values = torch.from_numpy(arrays["values"]).to(device)
                ratios = torch.from_numpy(arrays["std_ratios"]) if "std_ratios" in arrays else ()
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
            return None
        return Latents(values, list(ratios))


def describe_denoising(facts: Mapping[str, Any], vae_scale_factor: int) -> str:
    """Return the digest of all that makes a pipeline's latents what they are.

    Args:
        facts: of a process that loaded it, by section of its fingerprint.
        vae_scale_factor: pixels a latent pixel; some U-Nets are told the size of the picture.
    """
    digests = facts["checkpoint"]["files"].items()
    files = {name: digest for name, digest in digests if not name.startswith("vae/") and not name.endswith(PICTURE)}
    serving = {key: value for key, value in facts["serving"].items() if not key.startswith(DECODING)}
    serving["channels_last"] = sorted(set(serving["channels_last"]) - {"vae"})
    rest = {key: value for key, value in facts.items() if key not in ("checkpoint", "serving")}
    return digest_json([files, serving, rest, vae_scale_factor])
