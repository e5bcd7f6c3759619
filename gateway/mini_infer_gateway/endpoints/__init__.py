"""Where endpoints come from: a file, or a watch of pods; one source a file."""
