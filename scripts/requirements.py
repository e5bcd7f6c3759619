"""Prints what pyproject.toml asks for, one requirement a line, so that an image's packages are a layer below its code.

usage: requirements.py PYPROJECT EXTRA...
"""

import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
requirements = list(project["dependencies"])
for extra in sys.argv[2:]:
    requirements += project["optional-dependencies"][extra]
print("\n".join(requirements))
