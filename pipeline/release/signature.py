"""Sign a bundle and check its signature: the only importer of OpenSSF's model-signing.

A local elliptic-curve key (P-256, P-384 or P-521, PEM, not encrypted) signs the digests of all files of the bundle but
SHA256SUMS, which is written last and follows from the rest. Not covered: making keys, and sigstore's keyless signing,
which needs a network; `model_signing` itself does both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import EvidenceError, SettingsError
from pipeline.records.checksums import SUMS

SIGNATURE = "model.sig"


def sign(bundle: Path, private_key: Path) -> None:
    """Write the signature of a bundle into it.

    Raises:
        SettingsError: the key can't be read or is of another kind.
    """
    signing, hashing = _import("signing"), _import("hashing")
    try:
        config = signing.Config().use_elliptic_key_signer(private_key=private_key)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise SettingsError(
            f"{private_key}: expected an unencrypted PEM private key on P-256, P-384 or P-521, got "
            f"{type(error).__name__}: {_one_line(error)}"
        ) from None
    config.set_hashing_config(_ignore(hashing)).sign(bundle, bundle / SIGNATURE)


def find_forgery(bundle: Path, public_key: Path) -> str | None:
    """Say why a bundle is not what the owner of a key signed, else None.

    Raises:
        SettingsError: the key can't be read or is of another kind.
    """
    path = bundle / SIGNATURE
    verifying, hashing = _import("verifying"), _import("hashing")
    try:
        config = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise SettingsError(
            f"{public_key}: expected a PEM public key on P-256, P-384 or P-521, got "
            f"{type(error).__name__}: {_one_line(error)}"
        ) from None
    if not path.is_file():
        return f"{path}: expected a signature, as a public key is given, found none"
    try:
        config.set_hashing_config(_ignore(hashing)).verify(bundle, path)
    except Exception as error:  # whatever a damaged signature makes its parsers raise, it is no signature
        return f"{path}: not the signature of this bundle by this key: {_one_line(error) or type(error).__name__}"
    return None


def _ignore(hashing: Any) -> Any:
    return hashing.Config().set_ignored_paths(paths=[SIGNATURE, SUMS], ignore_git_paths=False)


def _import(name: str) -> Any:
    try:
        from model_signing import hashing, signing, verifying
    except ImportError as error:
        raise EvidenceError(
            f"signatures need the package model-signing, and it can't be imported ({error}); run `make setup`"
        ) from None
    return {"hashing": hashing, "signing": signing, "verifying": verifying}[name]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
