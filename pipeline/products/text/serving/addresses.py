"""Where a server is, and the key that it asks for."""

from __future__ import annotations


def strip_address(url: str) -> str:
    """Return the address of a server without the "/v1" that OpenAI's clients want of it."""
    return url.rstrip("/").removesuffix("/v1")


def authorize(api_key: str | None) -> dict[str, str]:
    """Return the header that carries an endpoint's key; none where it asks for none."""
    return {"authorization": f"Bearer {api_key}"} if api_key else {}
