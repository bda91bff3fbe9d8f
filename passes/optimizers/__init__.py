"""The form in which an optimizer takes its steps: parameter by parameter, or many at once."""

from __future__ import annotations

from .choosing import Choice, choose_form
from .forms import reset_form

__all__ = ["Choice", "choose_form", "reset_form"]
