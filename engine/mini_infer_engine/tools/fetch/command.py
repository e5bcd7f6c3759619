"""Implements `mini-infer fetch`: copies a model into a folder once, verified by hash, and prints its progress."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from mini_infer_engine.tools.fetch import neighbours
from mini_infer_engine.tools.fetch.fill import Progress, fill, verify
from mini_infer_engine.tools.fetch.manifest import FetchError, Manifest
from mini_infer_engine.tools.fetch.progress_server import ProgressServer
from mini_infer_engine.tools.fetch.sources import source_of
from mini_infer_engine.tools.fetch.wait import wait_until_complete
from mini_infer_process.logs import show_crashes

_REPORT_EVERY_S = 5.0
_DESCRIPTION = """\
Copy a model into a folder, such as a volume that all engines share, once.

  mini-infer fetch https://models.example.org/qwen3-8b /models/qwen3-8b
  mini-infer fetch s3://models/qwen3-8b /models/qwen3-8b
  mini-infer fetch /mnt/nfs/qwen3-8b /models/qwen3-8b
  mini-infer fetch --verify /models/qwen3-8b

Each file's SHA-256 is kept in mini-infer-manifest.json, which is written last: a folder that has one is complete, and
is left as it is. A source with such a manifest is checked against it. Processes that fetch into one folder take turns,
and one that was interrupted goes on with the files that are missing.
"""


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="mini-infer fetch", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", nargs="?", metavar="SOURCE", help="folder, or its http(s)://, s3:// or gs:// address")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder to fill")
    parser.add_argument("--verify", action="store_true", help="hash the files of FOLDER and compare; copy nothing")
    parser.add_argument(
        "--await", dest="awaits", action="store_true", help="wait until another process has filled FOLDER; copy nothing"
    )
    parser.add_argument(
        "--progress-port", type=int, metavar="PORT", help="answer GET /progress with the bytes that are there"
    )
    parser.add_argument(
        "--prune",
        action="store_true",
        help="first delete the folders of models beside FOLDER that no --keep names, as the operator does",
    )
    parser.add_argument(
        "--make-room",
        action="store_true",
        help="if space is short, delete models beside FOLDER that no engine reads, the least recently used first",
    )
    parser.add_argument(
        "--keep", action="append", default=[], metavar="NAME", help="a folder beside FOLDER that --prune leaves"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Fills or verifies the folder. Returns 0, or 1 with the reason on standard error."""
    show_crashes()
    parser = build_parser()
    options = parser.parse_args(arguments)
    if (options.source is not None) + options.verify + options.awaits != 1:
        parser.error("write SOURCE and FOLDER, --verify and FOLDER, or --await and FOLDER")
    try:
        manifest = _run(options)
    except FetchError as error:
        print(f"mini-infer fetch: {error}", file=sys.stderr)
        return 1
    verb = "verified" if options.verify else "complete"
    print(f"{verb}: {len(manifest.files)} files, {manifest.total_bytes:,} bytes in {options.folder}", flush=True)
    return 0


def printing(clock: Callable[[], float]) -> Progress:
    """Returns a progress that prints bytes and per cent, at most every few seconds."""
    reported = clock()

    def progress(done: int, total: int | None) -> None:
        nonlocal reported
        now = clock()
        if now - reported < _REPORT_EVERY_S:
            return
        reported = now
        share = f" of {total:,} ({done / total:.0%})" if total else ""
        print(f"{done:,}{share} bytes", flush=True)

    return progress


def _run(options: argparse.Namespace) -> Manifest:
    prints = printing(time.monotonic)
    if options.verify:
        return verify(options.folder, prints)
    if options.awaits:
        return wait_until_complete(options.folder, time.sleep)
    source = source_of(options.source)
    for name in neighbours.prune_neighbours(options.folder, options.keep) if options.prune else ():
        print(f"deleted {name}, which no service uses", flush=True)
    with nullcontext() if options.progress_port is None else ProgressServer(options.progress_port) as server:

        def progress(done: int, total: int | None) -> None:
            prints(done, total)
            if server is not None:
                server.report(done, total)

        def make_room(num_bytes: int) -> None:
            for name in neighbours.make_room(options.folder, num_bytes) if options.make_room else ():
                print(f"deleted {name}, to make room", flush=True)

        manifest = fill(options.folder, options.source, source, progress, make_room)
        if options.make_room:
            neighbours.touch(options.folder)
        return manifest


if __name__ == "__main__":
    raise SystemExit(main())
