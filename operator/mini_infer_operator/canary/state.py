"""The state of a canary, as it stands in the service's status: the only memory that decisions have."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from pydantic import ValidationError

from mini_infer_operator.resource import CanaryStatus

Phase = Literal["Running", "Promoted", "RolledBack"]
STARTED, EDITED_BACK = "Started", "EditedBack"


@dataclass(frozen=True, slots=True)
class CanaryState:
    """A new revision that is judged, or was."""

    phase: Phase
    revision: str
    stable: str
    """The revision that serves, and that the new one is compared with."""
    step: int = 0
    """Index of the present or last step."""
    steps: int = 0
    step_began: datetime | None = None
    """None while engines are missing for the step."""
    weight: int = 0
    mirror: int = 0
    replay: bool = False
    reason: str = STARTED
    message: str = ""
    requests: int = 0
    errors: int = 0
    replays: int = 0
    divergence: float | None = None
    observed_at: datetime | None = None
    announced: bool = True
    """False in the very first pass: engines are started once gateways can know that they get a share only."""

    @property
    def is_running(self) -> bool:
        """True while the revision is judged."""
        return self.phase == "Running"

    @property
    def is_rolled_back(self) -> bool:
        """True if the old revision serves."""
        return self.phase == "RolledBack"

    def target(self, revision: str) -> str:
        """Returns the revision that is to run, if the spec asks for `revision`."""
        return self.stable if self.is_rolled_back and self.revision == revision else revision

    def status(self) -> CanaryStatus:
        """Returns the state as the resource's status has it."""
        return CanaryStatus(
            phase=self.phase,
            revision=self.revision,
            stable_revision=self.stable,
            step=self.step + 1,
            steps=self.steps,
            step_began=_text(self.step_began),
            weight=self.weight,
            mirror=self.mirror,
            replay=self.replay,
            reason=self.reason,
            message=self.message[:1024],
            requests=self.requests,
            errors=self.errors,
            replays=self.replays,
            divergence=None if self.divergence is None else f"{min(self.divergence, 999.0):.4f}",
            observed_at=_text(self.observed_at),
        )


def read_canary(status: Mapping[str, Any]) -> CanaryState | None:
    """Returns the state in a stored status; None if there is none, or none that can be read: others may write it."""
    try:
        found = CanaryStatus.model_validate(status.get("canary"))
        return CanaryState(
            phase=found.phase,
            revision=found.revision,
            stable=found.stable_revision,
            step=max(0, found.step - 1),
            steps=found.steps,
            step_began=_time(found.step_began),
            weight=found.weight,
            mirror=found.mirror,
            replay=found.replay,
            reason=found.reason,
            message=found.message,
            requests=found.requests,
            errors=found.errors,
            replays=found.replays,
            divergence=None if found.divergence is None else float(found.divergence),
            observed_at=_time(found.observed_at),
        )
    except (ValidationError, ValueError):
        return None


def _text(moment: datetime | None) -> str | None:
    return None if moment is None else moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text).astimezone()
