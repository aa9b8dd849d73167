"""No search for garbage while libraries are imported, and the usual one afterwards."""

from __future__ import annotations

import gc

import pytest

from pipeline.running.importing import pause_collection


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_afterwards_as_it_was_also_after_a_failure(enabled: bool) -> None:
    def fail() -> None:
        with pause_collection():
            assert not gc.isenabled()
            raise ImportError

    frozen, was_enabled = gc.get_freeze_count(), gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ImportError):
            fail()
        assert gc.isenabled() is enabled and gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
        (gc.enable if was_enabled else gc.disable)()
