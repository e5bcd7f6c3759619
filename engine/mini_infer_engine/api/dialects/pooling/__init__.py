"""Endpoints whose answers are numbers: scores, reranked documents and classes; vLLM's, Cohere's and Jina's shapes."""
