"""An engine's options (contract.engine_options), with what the engine itself checks and resolves. No torch here."""

import msgspec

from mini_infer_contract.engine_options import EngineOptions
from mini_infer_engine.config.mechanisms import parse_mechanisms
from mini_infer_engine.speculation.config import speculation_of

_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Tokens of one forward pass where nobody asks for a number, by device."""


class EngineSettings(EngineOptions, frozen=True, kw_only=True):
    """What an engine is started with."""

    def __post_init__(self) -> None:
        """ValueError: `disable` names a mechanism that there is not, or options of speculation do not go together."""
        parse_mechanisms(self.disable)
        speculation_of(self)

    def resolved(self, device_type: str = "cpu") -> "ResolvedSettings":
        """With what depends on the device filled in, once: whoever sizes memory and whoever schedules read the same."""
        values = msgspec.structs.asdict(self)
        if self.max_num_batched_tokens is None:
            values["max_num_batched_tokens"] = _BATCHED_TOKENS[device_type]
        return ResolvedSettings(**values)


class ResolvedSettings(EngineSettings, frozen=True, kw_only=True):
    """Settings without open questions."""

    max_num_batched_tokens: int
    """Tokens of one forward pass."""
