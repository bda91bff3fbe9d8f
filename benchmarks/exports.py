"""21 small models through each format of `fxopt.export`: equal, or refused with the reason.

    python benchmarks/exports.py --json benchmarks/results/exports.json [--only bert ...] [--formats onnx ...]
    python benchmarks/exports.py --table --json benchmarks/results/exports.json

A model is exported with its batch size free and what differs between two example calls (the length of a text, the
number of nodes). What cannot be exported so is tried once more in the sizes of the first call. `fxopt.export` compares
each file in a fresh process; here each is loaded in another one and run on a call that the export did not see.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import begun
from torch import Tensor, nn

import fxopt
from fxopt.deploy.formats.fresh import results_in_fresh_process
from fxopt.deploy.formats.kinds import FORMATS
from fxopt.runtime.values import flatten, plain
from fxopt.tracing.examples import Inputs

_of: Callable[[str], Any] = importlib.import_module  # what makes models imports libraries for seconds

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "tests" / part) for part in ("", "deploy")]

Row = dict[str, Any]
SUFFIXES = {name: form.suffixes[0] for name, form in FORMATS.items()}


@dataclass(frozen=True)
class Subject:
    """A model, two calls that it is exported by, and one more.

    Attributes:
        passes: what it is rewritten by first.
        free: which sizes the file is to leave free.
    """

    kind: str
    make: Callable[[], nn.Module]
    calls: Callable[[], list[Inputs]]
    free: str = "batch"
    passes: str = ""


def _images(size: int = 32) -> list[Inputs]:
    return [Inputs(torch.randn(rows, 3, size, size)) for rows in (2, 2, 5)]


def _sequences(width: int, lengths: tuple[int, int, int]) -> list[Inputs]:
    return [Inputs(torch.randn(rows, length, width)) for rows, length in zip((2, 3, 5), lengths, strict=True)]


def _texts(**more: Any) -> list[Inputs]:
    """Return texts of several lengths, with masks that leave out the ends of some."""
    calls: list[Inputs] = []
    for rows, length in ((2, 9), (3, 12), (5, 7)):
        mask = torch.ones(rows, length, dtype=torch.int64)
        mask[-1, length - 2 :] = 0
        calls.append(Inputs(input_ids=torch.randint(3, 99, (rows, length)), attention_mask=mask, **more))
    return calls


def _graphs(name: str) -> list[Inputs]:
    return [Inputs(**_of("support.model_zoo.graphs").MODELS[name].inputs(nodes)) for nodes in (24, 33, 40)]


def _family(name: str, passes: str = "", **more: Any) -> Subject:
    return Subject(
        "transformer", lambda: _of("test_families").made(name), lambda: _texts(**more), "batch, length", passes
    )


def _cnn(name: str) -> Subject:
    return Subject("CNN", lambda: _of("efficient_networks").network(name, 0.25), lambda: _images(64))


def _of_graphs(name: str) -> Subject:
    def make() -> nn.Module:
        return _of("support.model_zoo.graphs").MODELS[name].make()

    return Subject("graph", make, lambda: _graphs(name), "nodes, edges")


class Recurrent(nn.Module):
    """Two layers in both directions, and a linear layer."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(8, 16, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0])


def _small_cnn() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8))
    return _of("ordinary_models.networks").settled(model, _images()[0].args[0])


def _unet() -> nn.Module:
    networks = _of("ordinary_models.networks")
    return networks.settled(networks.UNet(4, 2), _images()[0].args[0])


def _rewritten(passes: str, make: Callable[[], nn.Module], calls: Callable[[], list[Inputs]], free: str) -> Subject:
    return Subject("rewritten", make, calls, free, passes)


SUBJECTS = {
    "resnet": Subject("CNN", lambda: _of("test_families").made("ResNet"), _images),
    "convnext": Subject("CNN", lambda: _of("test_families").made("ConvNext"), _images),
    "mobilenet_v3": _cnn("mobilenet_v3"),
    "shufflenet_v2": _cnn("shufflenet_v2"),
    "unet": Subject("CNN", _unet, _images),
    "bert": _family("Bert"),
    "gpt2": _family("GPT2", use_cache=False),
    "llama": _family("Llama", use_cache=False),
    "mamba": _family("Mamba", use_cache=False),
    "vit": Subject("transformer", lambda: _of("test_families").made("ViT"), _images),
    "gcn": _of_graphs("GCN"),
    "graphsage": _of_graphs("GraphSAGE"),
    "gat": _of_graphs("GAT"),
    "lstm": Subject("recurrent", lambda: Recurrent(nn.LSTM), lambda: _sequences(8, (6, 6, 6))),
    "gru": Subject("recurrent", lambda: Recurrent(nn.GRU), lambda: _sequences(8, (6, 6, 6))),
    "ensemble, fused": _rewritten(
        "fuse_ensembles", lambda: _of("support.small_models").Ensemble(8),
        lambda: [Inputs(torch.randn(rows, 4)) for rows in (2, 3, 5)], "batch",
    ),
    "bert, packed": _rewritten("pack", lambda: _of("test_families").made("Bert"), _texts, "batch, length"),
    "cnn, int8_static": _rewritten("fold_batchnorm,quantize{scheme=int8_static}", _small_cnn, _images, "batch"),
    "resnet, pruned": _rewritten(
        "prune{method=structured,amount=0.5}", lambda: _of("test_families").made("ResNet"), _images, "batch"
    ),
    "experts, fused": _rewritten(
        "fuse_experts", lambda: _of("mixtures").Where(), lambda: _sequences(16, (6, 9, 4)), "batch, length"
    ),
    "bert, delegated": _rewritten(
        "delegate{engine=openvino}", lambda: _of("test_families").made("Bert"), _texts, "batch, length"
    ),
}  # fmt: skip


def built(name: str) -> tuple[nn.Module, list[Inputs]]:
    """Return a model, rewritten, in evaluation mode, and its calls."""
    subject = SUBJECTS[name]
    torch.manual_seed(0)
    model, calls = subject.make().eval(), subject.calls()
    if subject.passes:
        model = fxopt.optimize(model, subject.passes, example_inputs=calls[:2], measure=False)
        if not any(each.status == "applied" for each in fxopt.plan(model).decisions):
            raise RuntimeError(f"{subject.passes} found nothing: {fxopt.report(model)}")
    return model, calls


def examined(name: str, form: str) -> Row:
    """Export a model in one format, in free sizes or, where that is refused, in those of its first call."""
    model, calls = built(name)
    is_graph = SUBJECTS[name].kind == "graph"  # whose first sizes are numbers of nodes, not of rows
    row = _exported(model, form, calls[:2], calls[2], dynamic_batch=not is_graph)
    if "refused" in row:
        row["fixed"] = _exported(model, form, calls[:1], calls[0], dynamic_batch=False)
    return row


def _exported(model: nn.Module, form: str, calls: list[Inputs], unseen: Inputs, *, dynamic_batch: bool) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        path, start = Path(folder, f"model{SUFFIXES[form]}"), time.process_time()
        try:
            error = fxopt.export(model, path, calls, format=form, dynamic_batch=dynamic_batch)
        except fxopt.FxoptError as refusal:
            return {"refused": str(refusal).replace(f"{path} was not written: ", "")[:300]}
        seconds = time.process_time() - start
        size = sum(each.stat().st_size for each in Path(folder).iterdir())
        other = _error_on(model, form, path, unseen)
    return {"error": max(error, other), "seconds": round(seconds, 1), "bytes": size}


def _error_on(model: nn.Module, form: str, path: Path, call: Inputs) -> float:
    """Return how far the file is off in a fresh process, relative to the scale of each result."""
    with torch.no_grad():
        given = flatten(plain(model(*call.args, **call.kwargs)), "output")
    (found,) = results_in_fresh_process(FORMATS[form], path, model, [(call, given)])
    if isinstance(found, str):
        raise RuntimeError(found)
    pairs = [(leaf, found[key]) for key, leaf in given.items() if isinstance(leaf, Tensor)]
    return max((float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for b, a in pairs), default=math.inf)


def table(models: dict[str, Row]) -> Iterator[str]:
    """Yield the lines of the table in Markdown, and the reasons below it."""
    yield f"| model | free sizes | {' | '.join(FORMATS)} |"
    yield "|---" * (len(FORMATS) + 2) + "|"
    reasons: dict[str, int] = {}
    for name, row in models.items():
        cells = [_cell(row["formats"][form], reasons) for form in FORMATS]
        yield f"| {name} | {row['free']} | {' | '.join(cells)} |"
    yield ""
    for reason, number in reasons.items():
        yield f"{number}. {reason}"


def _cell(row: Row, reasons: dict[str, int]) -> str:
    if "error" in row:
        return _error(row)
    number = reasons.setdefault(row["refused"].replace("|", "/").replace("\n", " "), len(reasons) + 1)
    fixed = row["fixed"]
    return f"fixed sizes, {_error(fixed)} ({number})" if "error" in fixed else f"refused ({number})"


def _error(row: Row) -> str:
    return f"{row['error']:.0e}" if row["error"] else "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(SUBJECTS), default=list(SUBJECTS), metavar="MODEL")
    parser.add_argument("--formats", nargs="*", choices=list(FORMATS), default=list(FORMATS))
    of, models, write = begun(parser, table)
    for name in of.only:
        row = models.setdefault(name, {})
        row |= {"kind": SUBJECTS[name].kind, "free": SUBJECTS[name].free}
        for form in of.formats:
            row.setdefault("formats", {})[form] = examined(name, form)
            print(name, form, row["formats"][form], flush=True)
            write()


if __name__ == "__main__":
    main()
