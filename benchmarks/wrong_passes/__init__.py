"""Rewrites as authors of passes get them wrong, each on a small model with one example; and the same done right."""
