"""Blanks the GPU code that one architecture does not run in a CUDA shared library, so that it packs small.

    python scripts/thin_cuda_library.py --architecture 90 LIBRARY...    in place

A library carries "fat binaries": for each source file one entry an architecture, machine code (cubin) or PTX. The
driver takes the entry that fits and never reads the others, whose bytes are overwritten with zeros here: headers and
offsets stay, and a compressor makes next to nothing of the rest. The layout is documented by the projects that read
it, e.g. cricket's `cubin/` (github.com/RWTH-ACS/cricket).
"""

import argparse
import struct
from collections.abc import Iterator
from pathlib import Path

_MAGIC = struct.pack("<I", 0xBA55ED50)
_HEADER = struct.Struct("<IHHQ")
"""Of a fat binary: magic, version, bytes of this header, bytes of all entries."""
_ENTRY = struct.Struct("<HHIQ")
"""The first fields of an entry: kind, unknown, bytes of its header, bytes of its payload."""
_ARCHITECTURE_OFFSET = 28
_PTX, _CUBIN = 1, 2


def entries(data: bytes | bytearray) -> Iterator[tuple[int, int, int, int]]:
    """Of every entry of every fat binary: kind, architecture (90 is sm_90 and sm_90a), payload's begin and end."""
    at = 0
    while (at := data.find(_MAGIC, at)) >= 0:
        _, _, header, size = _HEADER.unpack_from(data, at)
        if header != _HEADER.size or at + header + size > len(data):
            at += len(_MAGIC)
            continue
        entry, end = at + header, at + header + size
        while entry < end:
            kind, _, entry_header, payload = _ENTRY.unpack_from(data, entry)
            if kind not in (_PTX, _CUBIN):
                break
            (architecture,) = struct.unpack_from("<I", data, entry + _ARCHITECTURE_OFFSET)
            begin = entry + entry_header
            yield kind, architecture, begin, min(end, begin + payload)
            entry = begin + payload
        at = end


def thin(data: bytearray, architecture: int) -> tuple[int, int]:
    """Blank all but the machine code of `architecture`; bytes kept and blanked.

    A library without machine code for it keeps everything, for the driver would compile its PTX.
    """
    found = list(entries(data))
    if not any(kind == _CUBIN and arch == architecture for kind, arch, _, _ in found):
        return sum(end - begin for _, _, begin, end in found), 0
    kept = blanked = 0
    for kind, arch, begin, end in found:
        if kind == _CUBIN and arch == architecture:
            kept += end - begin
        else:
            data[begin:end] = bytes(end - begin)
            blanked += end - begin
    return kept, blanked


def main() -> int:
    """Parse flags, and thin each library."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", type=int, default=90, help="compute capability without its dot (default: 90)")
    parser.add_argument("libraries", nargs="+", type=Path, metavar="LIBRARY")
    options = parser.parse_args()
    for library in options.libraries:
        data = bytearray(library.read_bytes())
        kept, blanked = thin(data, options.architecture)
        library.write_bytes(data)
        print(f"{library.name}: {kept / 1e6:.1f} MB of GPU code kept, {blanked / 1e6:.1f} MB blanked")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
