"""Stands in for packages that kvpress imports for its data sets and its command line, which no test here uses."""

import sys
from importlib.util import find_spec
from types import ModuleType

for name in ("datasets", "fire", "requests"):
    if find_spec(name) is None:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].load_dataset = None  # type: ignore[attr-defined]  # modules have no such field
