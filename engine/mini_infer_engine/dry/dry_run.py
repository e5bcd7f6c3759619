"""What a server is told of its pretended model. No engine here: the HTTP process passes it on."""

import msgspec

from mini_infer_engine.dry.script import Script


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """A pretended model instead of a real one."""

    step_ms: float = 0.0
    """How long a forward pass pretends to take."""
    script: Script = ()
    """What it says to which prompts, instead of repeating them."""
