"""What libraries say, by loggers and warnings, of calls that fxopt makes and no user."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["unheard"]


@contextmanager
def unheard(*names: str) -> Generator[None]:
    """Silence warnings, and all but errors of the loggers of these libraries."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
