"""Pickers that make the final choice: one picker a file, each chooses one candidate by the total scores."""
