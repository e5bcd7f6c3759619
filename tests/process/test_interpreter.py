import gc
import sys

import pytest

from mini_infer_process.interpreter import import_permanently, no_collection


def test_permanently_imported_modules_are_frozen_for_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    import_permanently("colorsys")
    module = sys.modules["colorsys"]
    assert gc.isenabled()
    assert not any(each is module.__dict__ for each in gc.get_objects())  # those that are frozen are not listed


def test_the_collector_stays_on_when_a_permanent_import_fails() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_permanently("mini_infer_contract.there_is_none")
    assert gc.isenabled()


def test_the_collector_stays_off_when_it_was_off() -> None:
    gc.disable()
    try:
        with no_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
