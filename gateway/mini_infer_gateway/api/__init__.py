"""What the gateway answers: questions about the gateway itself; requests to engines are the pipeline's."""
