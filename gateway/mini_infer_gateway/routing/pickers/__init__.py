"""Who it is: one picker a file, each takes the total scores and chooses one candidate."""
