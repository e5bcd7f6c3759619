"""Chooses the GPUs of this machine for an engine: as many as it asks for, of those that fewest engines use. Pure."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mini_infer_operator.gpus import computes_on_cpu, gpus_of_engine
from mini_infer_operator.resource import RoleSpec

VARIABLE = "CUDA_VISIBLE_DEVICES"
DRIVER = Path("/proc/driver/nvidia/gpus")


def visible_gpus(environment: Mapping[str, str] = os.environ, driver: Path = DRIVER) -> tuple[str, ...]:
    """Returns the NVIDIA GPUs that we may use, as CUDA_VISIBLE_DEVICES names them; found without loading a driver
    library.
    """
    present = len(list(driver.glob("*")))
    if VARIABLE not in environment:
        return tuple(map(str, range(present)))
    return tuple(part.strip() for part in environment[VARIABLE].split(",") if part.strip())[:present]


def gpus_of(role: RoleSpec) -> int:
    """Returns the GPUs that an engine of this role needs, over all its nodes; 1 if the role gives no number, 0 on the
    CPU.
    """
    return 0 if computes_on_cpu(role) else gpus_of_engine(role) or 1


def choose_gpus(count: int, visible: Sequence[str], used: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Returns `count` of the visible GPUs, those in the fewest of the `used` sets; all if there are not so many."""
    users = Counter(gpu for each in used for gpu in each)
    return tuple(sorted(sorted(visible, key=lambda gpu: (users[gpu], visible.index(gpu)))[:count], key=visible.index))
