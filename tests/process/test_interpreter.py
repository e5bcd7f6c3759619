import gc
import sys

import pytest

from mini_infer_process.interpreter import import_permanently, no_collection


def test_what_is_imported_to_stay_is_no_longer_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    import_permanently("colorsys")
    module = sys.modules["colorsys"]
    assert gc.isenabled()
    assert not any(each is module.__dict__ for each in gc.get_objects())  # those that are frozen are not listed


def test_an_import_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_permanently("mini_infer_contract.there_is_none")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with no_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
