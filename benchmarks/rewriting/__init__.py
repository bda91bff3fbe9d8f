"""Rewrites of one place in a small model, wrong ones and honest ones, for verification to tell apart."""
