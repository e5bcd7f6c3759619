"""Options of engine and server: declared, parsed and checked."""
