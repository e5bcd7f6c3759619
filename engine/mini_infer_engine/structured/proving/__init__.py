"""Proves in a process of its own, under limits of memory, CPU time and stack, that a grammar is safe to compile."""
