"""Writes YAML for people: in the order given, without anchors."""

from collections.abc import Iterable
from typing import Any

import yaml


class _PlainDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        """Returns True for every value: a value that occurs in several places is written out each time."""
        return True


class _CompactDumper(_PlainDumper):
    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        """Writes a short mapping, with everything inside it, on one line or a few."""
        node: yaml.MappingNode = super().represent_mapping(tag, mapping, flow_style)
        node.flow_style = _length(node) <= _SHORT
        return node


_SHORT = 400
"""The most characters of a mapping that counts as short."""


def _length(node: yaml.Node) -> int:
    if isinstance(node, yaml.ScalarNode):
        return len(node.value) + 2
    items = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
    return 2 + sum(_length(item) for item in items)


def to_yaml(documents: Iterable[Any], *, compact: bool = False) -> str:
    """Returns the documents, separated by `---`; `compact` puts short mappings on one line."""
    if compact:
        return yaml.dump_all(documents, Dumper=_CompactDumper, sort_keys=False, width=160)
    return yaml.dump_all(documents, Dumper=_PlainDumper, sort_keys=False, width=120)
