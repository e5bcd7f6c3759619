"""What the gateway answers: relayed requests in generate, questions about itself in operations."""
