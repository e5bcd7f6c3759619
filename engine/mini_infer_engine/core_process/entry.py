"""The core process, before anything else is imported: what needs no interpreter runs while Python imports modules."""

import json
import sys
from pathlib import Path

from mini_infer_engine.core_process.preload import begin_hashing_compiler, begin_mapping_torch, begin_opening_gpu


def main() -> None:
    """Runs as `python -m mini_infer_engine.core_process.entry CONFIG`, which only `CoreProcess` starts."""
    path = Path(sys.argv[1])
    config = json.loads(path.read_bytes())
    if config.get("dry_run") is None:
        begin_mapping_torch()
        if config["settings"].get("device") != "cpu":
            begin_opening_gpu()
            begin_hashing_compiler()
    from mini_infer_engine.core_process.loop import run

    run(path)


if __name__ == "__main__":
    main()
