"""Formats of exported models: which there are (`kinds.py`, without torch), who writes each, and what it then gives."""
