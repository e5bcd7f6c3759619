"""docs/options.md out of the declared options: `python scripts/option_docs.py > docs/options.md`."""

import msgspec

from mini_infer_contract.engine_options import EngineOptions
from mini_infer_contract.options import option_rows
from mini_infer_engine.config.options.server_options import ServerOptions

_HEAD = """\
# Every option of an engine

Made by `make crds` from what the code declares; do not edit. In the resource an option of `engine` has its flag's name:
`maxModelLen: 4096` is `--max-model-len=4096`.
"""


def option_table(struct: type[msgspec.Struct]) -> str:
    """Returns all options as a table of Markdown."""
    lines = ["| flag | default | |", "|---|---|---|"]
    for row in option_rows(struct):
        where = " Field of `engine` in the resource." if row.option.in_resource else ""
        lines.append(f"| `{row.flag}` | {row.shown_default} | {row.description}{where} |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole page."""
    return "\n".join(
        [
            _HEAD,
            "## The engine\n",
            option_table(EngineOptions),
            "## The HTTP server\n",
            option_table(ServerOptions).rstrip(),
            "",
        ]
    )


if __name__ == "__main__":
    print(page(), end="")
