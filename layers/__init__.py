"""Modules and functions that passes put into models, or that users use directly."""
