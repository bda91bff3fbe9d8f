"""What stands in the place of weights that nobody reads: whoever reads them after all is told."""

from __future__ import annotations

from typing import Any, NoReturn

from ...errors import FxoptError

__all__ = ["weights_left_out"]


class _LeftOut:
    """Attention weights that were not computed; any use of them is an error."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def __repr__(self) -> str:
        return "<attention weights that were left out>"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise FxoptError(
            "these attention weights were left out by the pass 'attention', as no call in example_inputs read them; "
            "add the call that does to example_inputs, or call fxopt.restore"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __rmatmul__ = _refuse
    __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __neg__ = __torch_function__ = _refuse


_LEFT_OUT = _LeftOut()


def weights_left_out() -> Any:
    """Return what stands for weights that were not computed."""
    return _LEFT_OUT
