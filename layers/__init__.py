"""Modules that passes put into models."""
