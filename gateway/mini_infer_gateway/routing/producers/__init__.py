"""Producers that gather facts about the candidates: one producer a file, each fills tables that scorers read."""
