"""The models that mutants are tried on: every pass fires on some of them, and refuses others for good reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import clean, members
from .members import Heads, Separate, sequential

Shape = tuple[int, ...]

LOWERINGS = ("bmm", "wide", "grouped_conv", "vmap")
TYPES = (torch.float64, torch.float32, torch.float64, torch.bfloat16)


@dataclass(frozen=True)
class Entry:
    """One model, in one mode and type, with the passes to run over it.

    Attributes:
        shape: of an input; dimension `batch` may have another size.
        vocabulary: inputs are integers below it, if not 0.
        draws: the model draws random numbers in training, so that only distributions can be compared.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: Shape
    passes: str
    training: bool
    dtype: torch.dtype
    vocabulary: int = 0
    batch: int | None = 0
    draws: bool = False

    def model(self) -> nn.Module:
        torch.manual_seed(7)
        return self.build().to(self.dtype).train(self.training)

    def inputs(self, seed: int, more: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        shape = list(self.shape)
        if self.batch is not None:
            shape[self.batch] += more
        if self.vocabulary:
            return torch.randint(0, self.vocabulary, shape, generator=generator)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)


@dataclass(frozen=True)
class Kind:
    """A model and what it takes; entries are made of it for both modes and several types."""

    build: Callable[[], nn.Module]
    shape: Shape
    vocabulary: int = 0
    batch: int | None = 0
    draws: bool = False


MLP = sequential(lambda: nn.Linear(4, 5), nn.Tanh, lambda: nn.Linear(5, 2))
NORMED = sequential(
    lambda: nn.Linear(4, 5), lambda: nn.BatchNorm1d(5), lambda: nn.ReLU(inplace=True), lambda: nn.Linear(5, 2)
)
CNN = sequential(
    lambda: nn.Conv2d(3, 4, 3), lambda: nn.BatchNorm2d(4), nn.ReLU, lambda: nn.MaxPool2d(2), nn.Flatten,
    lambda: nn.Linear(16, 6), lambda: nn.LayerNorm(6, eps=1e-3),
)  # fmt: skip
CONV1D = sequential(
    lambda: nn.Conv1d(4, 6, 3, groups=2, padding="same"), lambda: nn.GroupNorm(2, 6),
    lambda: nn.ConvTranspose1d(6, 4, 3, stride=2), lambda: nn.AdaptiveAvgPool1d(3),
)  # fmt: skip
CONV3D = sequential(lambda: nn.Conv3d(2, 3, 2), lambda: nn.BatchNorm3d(3, affine=False), nn.GELU)
TRANSPOSED = sequential(lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, output_padding=1, stride=2), nn.Tanh)
RMS = sequential(lambda: nn.Linear(4, 8), lambda: nn.RMSNorm(8, eps=1e-3), lambda: nn.Softmax(1), lambda: nn.GLU(-1))
INSTANCE = sequential(lambda: nn.Conv2d(3, 4, 3), lambda: nn.InstanceNorm2d(4, affine=True))
PRELU = sequential(lambda: nn.Linear(4, 8, bias=False), lambda: nn.PReLU(8))
WORDS = sequential(lambda: nn.Embedding(10, 8, padding_idx=2), lambda: nn.LayerNorm(8), lambda: nn.Linear(8, 3))
DROPOUT = sequential(lambda: nn.Linear(4, 4), lambda: nn.Dropout(0.4), lambda: nn.Linear(4, 2))

ENSEMBLES: dict[str, Kind] = {
    "mlp stacked": Kind(lambda: Heads(MLP), (6, 4)),
    "mlp wide": Kind(lambda: Heads(MLP, "cat"), (6, 4)),
    "mlp in groups": Kind(lambda: Heads(MLP, "sum"), (2, 3, 4)),
    "mlp concatenated": Kind(lambda: Heads(MLP, "cat"), (2, 3, 4)),
    "mlp summed": Kind(lambda: Heads(MLP, "sum"), (6, 4)),
    "mlp listed": Kind(lambda: Heads(MLP, "list"), (6, 4)),
    "mlp in a dictionary": Kind(lambda: Heads(MLP, "dict"), (6, 4)),
    "mlp on slices": Kind(lambda: Separate(MLP), (6, 3, 4)),
    "weighted": Kind(members.Weighted, (6, 4)),
    "dropout": Kind(lambda: Heads(DROPOUT), (6, 4), draws=True),
    "batch norm": Kind(lambda: Heads(NORMED), (6, 4)),
    "batch norm on slices": Kind(lambda: Separate(NORMED), (6, 3, 4)),
    "cnn": Kind(lambda: Heads(CNN), (4, 3, 6, 6)),
    "conv 1d": Kind(lambda: Heads(CONV1D), (3, 4, 8)),
    "conv 1d on slices": Kind(lambda: Separate(CONV1D), (3, 3, 4, 8)),
    "conv 3d": Kind(lambda: Heads(CONV3D), (4, 2, 3, 3, 3)),
    "transposed": Kind(lambda: Heads(TRANSPOSED), (3, 4, 3, 3)),
    "rms norm": Kind(lambda: Heads(RMS), (5, 4)),
    "instance norm": Kind(lambda: Heads(INSTANCE), (3, 3, 6, 6)),
    "prelu": Kind(lambda: Heads(PRELU, "cat"), (5, 4)),
    "words": Kind(lambda: Heads(WORDS), (3, 5), vocabulary=10),
    "attention": Kind(lambda: Heads(members.Attention), (2, 5, 8)),
    "multihead": Kind(lambda: Heads(lambda: members.First(nn.MultiheadAttention(8, 2))), (5, 2, 8), batch=1),
    "encoder layer": Kind(
        lambda: Heads(lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)), (2, 4, 8)
    ),
    "lstm": Kind(lambda: Heads(lambda: members.First(nn.LSTM(4, 5, 2, bidirectional=True))), (4, 2, 4), batch=1),
    "gru": Kind(lambda: Heads(lambda: members.First(nn.GRU(4, 5, batch_first=True, bias=False))), (2, 4, 4)),
    "rnn on slices": Kind(lambda: Separate(lambda: members.First(nn.RNN(4, 5, batch_first=True))), (2, 3, 4, 4)),
    "pooled": Kind(lambda: Heads(members.Pooled), (3, 3, 6, 6)),
    "pieces": Kind(lambda: Heads(members.Pieces), (5, 4)),
    "unequal": Kind(members.Unequal, (5, 4)),
    "two heads": Kind(members.TwoHeads, (5, 4)),
    "branches": Kind(members.Branches, (3, 3, 5, 5)),
    "projections": Kind(lambda: nn.Sequential(members.Projections(), nn.Flatten()), (2, 5, 8)),
    "called twice": Kind(members.Twice, (6, 4)),
    "places": Kind(members.Places, (3, 4)),
    "written between": Kind(members.Written, (3, 4)),
    "written result": Kind(members.WrittenResult, (3, 4)),
    "one frozen": Kind(lambda: members.Frozen(tied=False), (3, 4)),
    "tied": Kind(lambda: members.Frozen(tied=True), (3, 4)),
    "partly read": Kind(members.PartlyRead, (3, 4)),
}


def folded(*pairs: tuple[Callable[[], nn.Module], Callable[[], nn.Module]]) -> Callable[[], nn.Module]:
    return lambda: clean.Normed(*((layer(), norm()) for layer, norm in pairs))


FOLDS: dict[str, Kind] = {
    "conv 1d and norm": Kind(folded((lambda: nn.Conv1d(3, 4, 3, stride=2), lambda: nn.BatchNorm1d(4))), (3, 3, 8)),
    "conv 2d and norm, twice": Kind(
        folded(
            (lambda: nn.Conv2d(3, 4, 3, bias=False), lambda: nn.BatchNorm2d(4, eps=1e-2)),
            (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), lambda: nn.BatchNorm2d(6)),
        ),
        (3, 3, 6, 6),
    ),
    "conv 3d and norm": Kind(
        folded((lambda: nn.Conv3d(2, 3, 2), lambda: nn.BatchNorm3d(3, affine=False))), (3, 2, 3, 3, 3)
    ),
    "transposed and norm": Kind(
        folded(
            (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), lambda: nn.BatchNorm2d(6)),
            (lambda: nn.ConvTranspose2d(6, 4, 2, stride=2, bias=False), lambda: nn.BatchNorm2d(4)),
        ),
        (3, 4, 3, 3),
    ),
    "transposed 1d and norm": Kind(
        folded((lambda: nn.ConvTranspose1d(4, 6, 3, groups=2), lambda: nn.BatchNorm1d(6))), (3, 4, 5)
    ),
    "linear and norm": Kind(
        folded(
            (lambda: nn.Linear(4, 5), lambda: nn.BatchNorm1d(5)),
            (lambda: nn.Linear(5, 3, bias=False), lambda: nn.BatchNorm1d(3, eps=1e-1)),
        ),
        (4, 4),
    ),
    "residual": Kind(clean.Residual, (3, 3, 5, 5)),
}
CLEANED: dict[str, Kind] = {
    "dead": Kind(clean.Dead, (5, 4)),
    "dead draws": Kind(clean.DeadDraws, (5, 4), draws=True),
    "repeated": Kind(clean.Repeated, (5, 4)),
    "repeated writes": Kind(clean.RepeatedWrites, (5, 4)),
    "two draws": Kind(clean.TwoDraws, (5, 4), draws=True),
    "constants": Kind(clean.Constants, (5, 8)),
    "causal": Kind(clean.Causal, (2, 5, 8)),
}
CLEANING = "eliminate_common_subexpressions,fold_constants,eliminate_dead_code"


def zoo() -> list[Entry]:
    """Return all entries, in a fixed order."""
    entries: list[Entry] = []
    for number, (name, kind) in enumerate(ENSEMBLES.items()):
        for mode in (True, False):
            dtype = TYPES[(number + mode) % len(TYPES)]
            lowering = "bmm" if mode else LOWERINGS[number % 4]
            entries.append(_entry(name, kind, f"fuse_ensembles{{lowering={lowering}}}", mode, dtype))
    for number, (name, kind) in enumerate(FOLDS.items()):
        entries.append(_entry(name, kind, "fold_batchnorm", False, TYPES[number % len(TYPES)]))
    for number, (name, kind) in enumerate(CLEANED.items()):
        entries += [_entry(name, kind, CLEANING, mode, TYPES[(number + mode) % len(TYPES)]) for mode in (True, False)]
    both = {**ENSEMBLES, **FOLDS}
    names = ("linear and norm", "residual", "mlp stacked", "branches", "cnn", "weighted")
    entries += [_entry(name, both[name], "inference", False, torch.float64) for name in names]
    return entries


def _entry(name: str, kind: Kind, passes: str, training: bool, dtype: torch.dtype) -> Entry:
    label = f"{name} | {passes} | {'train' if training else 'eval'} | {str(dtype).removeprefix('torch.')}"
    return Entry(
        label, kind.build, kind.shape, passes, training, dtype,
        kind.vocabulary, kind.batch, kind.draws,
    )  # fmt: skip
