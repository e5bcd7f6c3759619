"""YAML for people: in the order given, without anchors."""

from collections.abc import Iterable
from typing import Any

import yaml


class _PlainDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Write everything out, even what stands in several places."""
        return True


def to_yaml(documents: Iterable[Any]) -> str:
    """The documents, separated by `---`."""
    return yaml.dump_all(documents, Dumper=_PlainDumper, sort_keys=False, width=120)
