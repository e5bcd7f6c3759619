"""YAML for people: in the order given, without anchors."""

from collections.abc import Iterable
from typing import Any

import yaml


class _PlainDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Write everything out, even what stands in several places."""
        return True


class _CompactDumper(_PlainDumper):
    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        """Put a mapping that is short, with all that it holds, on one line or a few."""
        node: yaml.MappingNode = super().represent_mapping(tag, mapping, flow_style)
        node.flow_style = _length(node) <= _SHORT
        return node


_SHORT = 400
"""Characters."""


def _length(node: yaml.Node) -> int:
    if isinstance(node, yaml.ScalarNode):
        return len(node.value) + 2
    items = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
    return 2 + sum(_length(item) for item in items)


def to_yaml(documents: Iterable[Any], *, compact: bool = False) -> str:
    """The documents, separated by `---`; compact: short mappings on one line."""
    if compact:
        return yaml.dump_all(documents, Dumper=_CompactDumper, sort_keys=False, width=160)
    return yaml.dump_all(documents, Dumper=_PlainDumper, sort_keys=False, width=120)
