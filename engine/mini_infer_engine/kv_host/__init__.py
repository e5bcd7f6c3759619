"""The pool of main memory that the engines of a server share, and that outlives them. No torch, no decisions."""
