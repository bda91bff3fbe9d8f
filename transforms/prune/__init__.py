"""Pruning: which weights a model can do without, and how they go."""
