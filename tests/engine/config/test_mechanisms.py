"""Which mechanisms an engine switches off."""

import pytest

from mini_infer_engine.config.mechanisms import SWITCH, UNMEASURED, Mechanism, disabled_in_engines, parse_mechanisms


def test_kernels_that_no_gpu_has_run_are_off_in_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    assert parse_mechanisms(disabled_in_engines(["pdl"])) == {Mechanism.PDL, *UNMEASURED}
    monkeypatch.setenv(SWITCH, "1")
    assert parse_mechanisms(disabled_in_engines(["pdl"])) == {Mechanism.PDL}
