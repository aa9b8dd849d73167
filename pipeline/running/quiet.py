"""Silence what packages warn of while they are imported, and no user can do anything about."""

from __future__ import annotations

import logging


def silence_torchao() -> None:
    """Keep back what torchao says wherever it is imported, as transformers and diffusers do where they find it.

    On a CPU it can't load its CUDA kernels, and torch does not like how it registers its enums.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
