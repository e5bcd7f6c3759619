"""Defines the options of a dry run. It needs no engine: the HTTP process passes them to the core."""

import msgspec

from mini_infer_engine.dry.script import Script

DRY_MODEL = "dry"
"""The name of the pretended model."""


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """A pretended model instead of a real one."""

    step_ms: float = 0.0
    """Milliseconds that a forward pass pretends to take."""
    script: Script = ()
    """Replies to certain prompts; without a fitting one the model repeats the prompt."""
