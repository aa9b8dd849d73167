"""Every exception that quantgate raises on purpose, in one tree.

    QuantgateError            anything a user can act on; stages print it as one line and exit 1
    ├── SettingsError         params.yaml is wrong: carries the path of the offending key
    ├── CheckpointError       a checkpoint folder can't be opened, or is not what it claims to be
    ├── EvalsetError          a card or a case file is malformed: carries file and line
    ├── QuantizationError     an optimisation step can't do, or did not do, what was asked
    ├── EngineError           a serving engine did not start, died, hung or answered nonsense
    │   └── RequestError      one request was refused for good (for example HTTP 400)
    ├── JournalError          finished cases can't be written or read back
    └── EvidenceError         records are not fit to be judged (missing, duplicated, unmatched)

A message says what was expected, what came, where, and what to do. A regression is never an
exception: it is a `Verdict`.
"""

from __future__ import annotations


class QuantgateError(Exception):
    """An error whose message is meant for the user and fits on one line."""


class SettingsError(QuantgateError):
    """params.yaml is wrong; the message starts with the path of the key."""


class CheckpointError(QuantgateError):
    """A checkpoint folder is missing, unsafe, damaged or inconsistent."""


class EvalsetError(QuantgateError):
    """An evalset's card or cases are malformed; the message carries file and line."""


class QuantizationError(QuantgateError):
    """A quantisation step was refused or did not produce what was asked for."""


class EngineError(QuantgateError):
    """A serving engine failed; the message names its log file where there is one."""


class RequestError(EngineError):
    """One request was refused for good and is not worth repeating."""


class JournalError(QuantgateError):
    """The journal of finished cases can't be written or read."""


class EvidenceError(QuantgateError):
    """Records are missing, duplicated, unmatched or do not belong to this candidate."""
