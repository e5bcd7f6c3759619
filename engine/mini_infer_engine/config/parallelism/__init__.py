"""Shares of a model: the layers of a stage, and the part of each weight of a rank."""
