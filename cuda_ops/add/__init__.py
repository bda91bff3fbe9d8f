"""`add`: the element-wise example; docs/writing-an-operator.md goes through it line by line."""

from .definition import ROWS, add

__all__ = ["ROWS", "add"]
