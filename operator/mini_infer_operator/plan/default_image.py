"""Chooses the image of a service that names none, while the operator's default image changes. Pure.

Every such service rolls when the operator is given a new default. All at once would load every model of the cluster
again, and a bad image would reach all of them; so they roll in turn, and a user may opt out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from mini_infer_operator.launch import service_revision
from mini_infer_operator.resource import InferenceService


class Change(Enum):
    """The effect that the current default image has on a service."""

    NONE = "it runs from the default, or does not run, or was edited too: no turn is needed"
    ROLLING = "it is on its way to the default"
    DUE = "nothing but the default image changed"


@dataclass(frozen=True, slots=True)
class ImageChange:
    """The effect of a changed default image on one service, and the image that the service runs from until it rolls."""

    change: Change
    running: str | None = None


def image_change(service: InferenceService, default: str, running: Mapping[str, str]) -> ImageChange:
    """Compares the default image with the images that a service runs from; `running` is the image of each existing
    revision.
    """
    if service.spec.image is not None:
        return ImageChange(Change.NONE)
    if service_revision(service, default) in running:
        return ImageChange(Change.ROLLING if len(running) > 1 else Change.NONE)
    for revision, image in sorted(running.items()):
        if service_revision(service, image) == revision:
            return ImageChange(Change.DUE, image)
    return ImageChange(Change.NONE)
