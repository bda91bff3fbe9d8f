"""The version of fxopt, said once: packaging, plans, archives and `fxopt doctor` read it here."""

__all__ = ["VERSION"]

VERSION = "0.1.0"
