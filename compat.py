"""Every private or version-dependent torch API that fxopt uses, one small function each, in alphabetical order."""
