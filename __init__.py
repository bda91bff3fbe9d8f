"""fxopt."""
