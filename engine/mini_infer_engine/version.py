"""The version of the engine, which files and messages to other engines contain."""

__version__ = "0.1.0"
