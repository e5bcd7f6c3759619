"""What is known of the candidates: one producer a file, each fills tables that scorers read."""
