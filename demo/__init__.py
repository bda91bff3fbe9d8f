"""The ensemble that `fxopt demo` shows, also as `fxopt.demo:build` on the command line."""

from .demo import DIM_STATE, Demo, MultiHead, Vmapped, build, example_inputs

__all__ = ["DIM_STATE", "Demo", "MultiHead", "Vmapped", "build", "example_inputs"]
