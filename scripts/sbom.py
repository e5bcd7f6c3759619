"""Writes which packages an environment has, as CycloneDX JSON: the bill of materials in our images.

usage: PYTHON sbom.py OUTPUT, with the environment's own Python
"""

import json
import sys
from importlib.metadata import distributions
from pathlib import Path

packages = sorted({(found.name.lower().replace("_", "-"), found.version) for found in distributions()})
components = [
    {"type": "library", "name": name, "version": version, "purl": f"pkg:pypi/{name}@{version}"}
    for name, version in packages
]
document = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": components}
Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n")
