"""Case records as the gate reads them: in a quarter of the time, as it may read millions.

A row has the fields of a CaseRecord, and none of its methods. It is made by msgspec, which is stricter: what it takes,
pydantic takes too. What it does not take is left to `read_cases`, which names the line and what is wrong there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pipeline.records.evaluations import CaseRecord

if TYPE_CHECKING:
    CaseRow = CaseRecord  # to a checker of types, which can't see the fields of what is defined below
else:
    CaseRow = msgspec.defstruct(
        "CaseRow",
        [
            (name, field.annotation) if field.is_required() else (name, field.annotation, field.default)
            for name, field in CaseRecord.model_fields.items()
        ],
        frozen=True,
        forbid_unknown_fields=True,
        kw_only=True,
    )


def _read_inner(kind: Any, value: Any) -> Any:
    """Return a record within a case."""
    return kind.model_validate(value)


_DECODER = msgspec.json.Decoder(CaseRow, dec_hook=_read_inner)


def parse_rows(data: bytes) -> list[CaseRow] | None:
    """Return the records of JSON lines; None where anything is unusual."""
    try:
        rows = _DECODER.decode_lines(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    num_ends = data.count(b"}\n{") + 1 if data else 0  # decode_lines skips an empty line, and parts two on one line
    return rows if len(rows) == num_ends == data.removesuffix(b"\n").count(b"\n") + bool(data) else None


def change_row(row: CaseRow, **fields: Any) -> CaseRow:
    """Return a row, or a CaseRecord, with other values in some fields."""
    return row.model_copy(update=fields) if isinstance(row, CaseRecord) else msgspec.structs.replace(row, **fields)
