"""The stages of one request, a file each: read, resolve, tokenise, place, attempt (with its answer), relay, resume."""
