"""The formats of exported models: their names, and what they need; without torch, for the command line."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ...errors import UsageError, did_you_mean

__all__ = ["FORMATS", "PT2", "Format", "chosen_format", "warn_of_format"]


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        name: what users call it.
        suffixes: how such files are named; the first is the usual one.
        packages: what writes and reads it, besides torch, as pip calls it.
        is_traced: whether it is made of the model itself and not of what `torch.export` makes of it.
        is_flat: whether it takes and gives tensors in a row, without what holds them.
    """

    name: str
    suffixes: tuple[str, ...]
    packages: tuple[str, ...] = ()
    is_traced: bool = False
    is_flat: bool = False


PT2 = Format("pt2", (".pt2",))
FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        form.name: form
        for form in (
            PT2,
            Format("onnx", (".onnx",), ("onnx", "onnxscript", "onnxruntime"), is_flat=True),
            Format("openvino", (".xml",), ("openvino",), is_flat=True),
            Format("aoti", (".pt2",)),
            Format("torchscript", (".ts", ".pt", ".pth"), is_traced=True),
        )
    }
)


def chosen_format(name: str | None, path: Path) -> Format:
    """Return the format of a name, by default what the name of a file says, else `.pt2`.

    Raises:
        UsageError: there is no such format, its packages are not installed, or the file needs another name.
    """
    if name is None:
        form = next((form for form in FORMATS.values() if path.suffix == form.suffixes[0]), PT2)
    elif name in FORMATS:
        form = FORMATS[name]
    else:
        raise UsageError(f"unknown format {name!r}{did_you_mean(name, FORMATS)}; there are {', '.join(FORMATS)}")
    missing = [package for package in form.packages if importlib.util.find_spec(package) is None]
    if missing:
        raise UsageError(f"the format {form.name} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    if form is not PT2 and path.suffix not in form.suffixes:
        raise UsageError(
            f"files of the format {form.name} end in {form.suffixes[0]}; name it {path.name}{form.suffixes[0]}"
        )
    return form


def warn_of_format(form: Format, path: Path) -> None:
    """Tell the user where a name says something else than what is in a file, and what torch has deprecated."""
    if form is PT2 and path.suffix not in ("", *PT2.suffixes):
        warnings.warn(
            f"'{path.name}' is written in the format of .pt2 files, whatever its name says; name it "
            f"'{path.with_suffix('.pt2').name}'",
            stacklevel=3,
        )
    if form.name == "torchscript":
        warnings.warn(
            "TorchScript is deprecated in torch; it is for what loads nothing else. The formats pt2 and aoti take its "
            "place",
            FutureWarning,
            stacklevel=3,
        )
