"""Does the name of a score sound as if less of it were better? Then nobody guesses, and its author is asked.

A list of words can't be whole; it is there for the names that people give to what they count. One that is asked for in
vain ("no_error") costs an option, one that is not asked for lets every loss through as a gain.
"""

from __future__ import annotations

import re

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_STARTS = ("abus", "anomal", "attack", "bias", "complain", "contaminat", "contradict", "corrupt", "crash", "danger",
           "defect", "degrad", "deviat", "disallow", "discriminat", "err", "fail", "false", "fault", "flag",
           "gibberish", "halluc", "harm", "hate", "illegal", "inaccura", "incident", "incomplet", "incorrect",
           "infring", "insecur", "invalid", "jailbr", "laten", "leak", "malform", "misinf", "mistake", "noncompli",
           "nonsens", "offens", "overrefus", "penalt", "perplex", "plagiar", "profan", "racis", "refus", "regress",
           "reject", "repetit", "sexis", "sexual", "slur", "stereotyp", "threat", "timed", "timeout", "tox",
           "truncat", "unfaith", "unfinish", "unground", "unresolv", "unsafe", "unsound", "unsupport", "violat",
           "violen", "vulnerab", "wrong")  # fmt: skip
_WORDS = {"asr", "bad", "broken", "bug", "bugs", "cer", "cost", "costs", "distance", "duration", "edits", "eer",
          "exception", "exceptions", "fnr", "fpr", "loss", "losses", "mae", "mer", "miss", "missed", "misses",
          "missing", "mse", "nll", "nsfw", "pii", "ppl", "risk", "risks", "rmse", "seconds", "spam", "ter", "time",
          "wer"}  # fmt: skip


def looks_lower(name: str) -> bool:
    """Say whether less may be better, by the words of a name: `num_errors`, `ErrorRate`, `wer`."""
    words = [word.lower() for word in _WORD.findall(name)]
    return any(word in _WORDS or word.startswith(_STARTS) for word in words)
