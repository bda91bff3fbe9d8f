"""`add`: the element-wise example; docs/writing-an-operator.md goes through it line by line."""

from .definition import add

__all__ = ["add"]
