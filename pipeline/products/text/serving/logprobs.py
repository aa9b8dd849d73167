"""Write log-probabilities in the two forms that OpenAI's API has: that of completions, and that of chats.

They are of the raw logits, as `scoring` computes them. Natural logarithms, rounded to six digits.
"""

from __future__ import annotations

from typing import Any

from pipeline.products.text.serving.scoring import SequenceScores


class TokenNames(dict[int, str]):
    """How tokens are written, by their id: as text, or without a tokenizer as "token_id:<id>"."""

    def __init__(self, tokenizer: Any | None) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        self[token] = self._tokenizer.decode([token]) if self._tokenizer else f"token_id:{token}"
        return self[token]


def write_scores(scores: SequenceScores, names: TokenNames) -> dict[str, list[Any]]:
    """Return the log-probabilities of a sequence in OpenAI's form for completions."""
    tops = [
        _write_likely([names[token] for token in ids], values)
        for ids, values in zip(
            scores.top_ids.tolist(), scores.top_logprobs.astype("float64").round(6).tolist(), strict=True
        )
    ]
    return {
        "token_logprobs": [None, *scores.token_logprobs.astype("float64").round(6).tolist()],
        "top_logprobs": [None, *tops],
    }


def _write_likely(tokens: list[str], logprobs: list[float]) -> dict[str, float]:
    likely = dict(zip(tokens, logprobs, strict=True))
    if len(likely) < len(tokens):  # parts of characters look alike; the likeliest of them counts
        likely = dict(zip(reversed(tokens), reversed(logprobs), strict=True))
    return likely


def write_chat_scores(
    scores: SequenceScores, tokens: list[int], tokenizer: Any, *, num_likely: int
) -> list[dict[str, Any]]:
    """Return the log-probabilities of an answer in OpenAI's form for chats.

    Args:
        scores: of the prompt and the answer.
        tokens: of the answer.
        tokenizer: writes a token as text.
        num_likely: likely tokens beside each token.
    """

    def write(token: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token])
        return {"token": text, "logprob": round(logprob, 6), "bytes": list(text.encode())}

    first = len(scores.token_logprobs) - len(tokens)
    rows = zip(
        tokens,
        scores.token_logprobs[first:].tolist(),
        scores.top_ids[first:, :num_likely].tolist(),
        scores.top_logprobs[first:, :num_likely].tolist(),
        strict=True,
    )
    return [
        {**write(token, logprob), "top_logprobs": [write(*pair) for pair in zip(ids, values, strict=True)]}
        for token, logprob, ids, values in rows
    ]
