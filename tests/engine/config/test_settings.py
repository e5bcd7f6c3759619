import msgspec
import pytest

from mini_infer_engine.config.settings import EngineSettings


@pytest.mark.parametrize(("device", "tokens"), [("cpu", 2048), ("cuda", 8192)])
def test_what_depends_on_the_device_is_filled_in_once(device: str, tokens: int) -> None:
    settings = EngineSettings(model="m", seed=5)
    resolved = settings.resolved(device)
    assert resolved.max_num_batched_tokens == tokens
    assert resolved.resolved("cpu") == resolved.resolved("cuda") == resolved
    assert msgspec.structs.asdict(settings) | {"max_num_batched_tokens": tokens} == msgspec.structs.asdict(resolved)


def test_a_number_that_is_asked_for_stays() -> None:
    assert EngineSettings(model="m", max_num_batched_tokens=77).resolved("cuda").max_num_batched_tokens == 77
