"""Draws a package: its rooms (files and folders) floor by floor, and the imports between them.

    python scripts/structure.py mini_infer_engine.kv_transfer [PACKAGE...]

A room stands one floor above the highest room that it imports. Imports inside functions count, those for type checkers
do too. Rooms that import each other form a circle and are named.
"""

import sys
from pathlib import Path

import grimp


def arrows(package: str, graph: grimp.ImportGraph) -> dict[str, set[str]]:
    """Returns the rooms that each room of the package imports, by their names inside the package."""
    rooms = sorted(graph.find_children(package))
    prefix = len(package) + 1
    return {
        room[prefix:]: {
            other[prefix:]
            for other in rooms
            if other != room and graph.direct_import_exists(importer=room, imported=other, as_packages=True)
        }
        for room in rooms
    }


def floors(imports: dict[str, set[str]]) -> tuple[dict[str, int], set[str]]:
    """Returns the floor of each room, counted from 1, and the rooms that belong to or stand on circles."""
    placed: dict[str, int] = {}
    while True:
        ready = [room for room in imports.keys() - placed.keys() if imports[room] <= placed.keys()]
        if not ready:
            return placed, imports.keys() - placed.keys()
        placed |= {room: 1 + max((placed[other] for other in imports[room]), default=0) for room in ready}


def lines(package: str, room: str) -> int:
    """Returns the number of lines of a room's Python files."""
    file = Path(sys.modules[package].__path__[0]) / room
    files = [*file.rglob("*.py")] or [file.with_suffix(".py")]
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def main(packages: list[str]) -> int:
    """Prints a drawing in words of each package, and returns 1 if one has a circle."""
    found_circle = False
    for package in packages:
        __import__(package)
        top = package.partition(".")[0]
        imports = arrows(package, grimp.build_graph(top, cache_dir=None))
        placed, circle = floors(imports)
        count = sum(map(len, imports.values()))
        print(f"{package}: {len(imports)} rooms, {max(placed.values(), default=0)} floors, {count} arrows")
        for floor in sorted(set(placed.values()), reverse=True):
            for room in sorted(room for room, at in placed.items() if at == floor):
                print(f"  {floor:2}  {room} ({lines(package, room)}): {', '.join(sorted(imports[room]))}")
        if circle:
            found_circle = True
            print(f"  circle: {', '.join(sorted(circle))}")
    return int(found_circle)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
