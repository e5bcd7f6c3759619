"""scripts/thin_cuda_library.py: what an architecture does not run is blanked, and nothing else is touched."""

import struct
import subprocess
import sys
from pathlib import Path

from tests.engine.server.dry_server import ROOT

PTX, CUBIN = 1, 2


def entry(kind: int, architecture: int, payload: bytes) -> bytes:
    """With a header of 64 bytes, as nvcc writes it."""
    header = bytearray(64)
    struct.pack_into("<HHIQ", header, 0, kind, 0x101, len(header), len(payload))
    struct.pack_into("<I", header, 28, architecture)
    return bytes(header) + payload


def fat_binary(*entries: bytes) -> bytes:
    """As the section .nv_fatbin holds it."""
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def thinned(library: Path, data: bytes) -> bytes:
    library.write_bytes(data)
    command = [sys.executable, ROOT / "scripts/thin_cuda_library.py", "--architecture", "90", library]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return library.read_bytes()


def test_only_code_of_the_architecture_stays_in_a_thinned_library(tmp_path: Path) -> None:
    one = fat_binary(entry(CUBIN, 80, b"a" * 24), entry(CUBIN, 90, b"b" * 40), entry(PTX, 90, b"c" * 16))
    two = fat_binary(entry(CUBIN, 90, b"d" * 8))
    host = b"host code" + struct.pack("<I", 0xBA55ED50) + b"no fat binary"
    after = thinned(tmp_path / "library.so", host + one + b"between" + two + b"end")
    kept = fat_binary(entry(CUBIN, 80, bytes(24)), entry(CUBIN, 90, b"b" * 40), entry(PTX, 90, bytes(16)))
    assert after == host + kept + b"between" + two + b"end"


def test_a_library_is_not_thinned_when_no_code_would_be_left(tmp_path: Path) -> None:
    data = fat_binary(entry(CUBIN, 80, b"a" * 24), entry(PTX, 80, b"c" * 16))
    assert thinned(tmp_path / "library.so", data) == data
