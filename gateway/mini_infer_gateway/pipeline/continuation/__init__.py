"""Continuations: the state with which another engine continues a stream whose engine died, one file for each form."""
