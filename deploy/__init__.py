"""Save, load and export optimized models."""
