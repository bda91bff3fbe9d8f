from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxopt.errors import PipelineError, UsageError, did_you_mean
from fxopt.known_passes import PRESETS
from fxopt.passes.contract import Pass
from fxopt.passes.pipeline import chosen_passes, parse


class Lowering(enum.Enum):
    AUTO = "auto"
    GROUPED_CONVOLUTION = "grouped_convolution"
    BMM = "bmm"


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


@dataclass(frozen=True)
class FuseEnsembles(Pass):
    """Stand in for a real pass."""

    lowering: Lowering = Lowering.AUTO
    minimum: int = 2
    ratio: float = 1.0
    strict: bool = False
    label: str = ""


@dataclass(frozen=True)
class Autocast(Pass):
    dtype: torch.dtype = torch.bfloat16
    only: tuple[str, ...] = ()
    window: tuple[int, float] | None = None
    mode: Literal["safe", "fast", 8] = "safe"
    level: Level = Level.LOW
    tag: str | int | None = None
    keep: frozenset[str] = frozenset()
    nested: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Prune(Pass):
    amount: float
    seed: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not 0 < self.amount < 1:
            raise UsageError(f"amount={self.amount} is not between 0 and 1")


@dataclass(frozen=True)
class Odd(Pass):
    thing: complex = 1j


KNOWN: dict[str, type[Pass]] = {"fuse_ensembles": FuseEnsembles, "autocast": Autocast, "prune": Prune, "odd": Odd}


def find(name: str) -> type[Pass]:
    if name not in KNOWN:
        raise UsageError(f"unknown pass {name!r}{did_you_mean(name, KNOWN)}")
    return KNOWN[name]


def error_of(text: str) -> PipelineError:
    with pytest.raises(PipelineError) as caught:
        parse(text, find)
    return caught.value


def spanned(error: PipelineError) -> str:
    return error.text[error.start : error.end]


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("", ()),
        ("  ", ()),
        ("fuse_ensembles", (FuseEnsembles(),)),
        ("fuse_ensembles{}", (FuseEnsembles(),)),
        (" fuse_ensembles { lowering = bmm , minimum=3 } ", (FuseEnsembles(Lowering.BMM, 3),)),
        ("fuse_ensembles,fuse_ensembles", (FuseEnsembles(), FuseEnsembles())),
        (
            "fuse_ensembles{\n  strict=true,\n  ratio=1e-3\n},\nautocast",
            (FuseEnsembles(strict=True, ratio=1e-3), Autocast()),
        ),
        ("fuse_ensembles{ratio=2}", (FuseEnsembles(ratio=2.0),)),
        ("fuse_ensembles{ratio=inf}", (FuseEnsembles(ratio=math.inf),)),
        ("fuse_ensembles{label=none}", (FuseEnsembles(label="none"),)),
        ("fuse_ensembles{label='a, {b} = \\'c\\''}", (FuseEnsembles(label="a, {b} = 'c'"),)),
        ("autocast{dtype=float16}", (Autocast(torch.float16),)),
        ("autocast{dtype=torch.float16}", (Autocast(torch.float16),)),
        ("autocast{only=[]}", (Autocast(),)),
        ("autocast{only=[a, 'b c']}", (Autocast(only=("a", "b c")),)),
        ("autocast{only=a}", (Autocast(only=("a",)),)),
        ("autocast{window=[1,2]}", (Autocast(window=(1, 2.0)),)),
        ("autocast{mode=8}", (Autocast(mode=8),)),
        ("autocast{level=high}", (Autocast(level=Level.HIGH),)),
        ("autocast{tag=5}", (Autocast(tag=5),)),
        ("autocast{tag='5'}", (Autocast(tag="5"),)),
        ("autocast{tag=five}", (Autocast(tag="five"),)),
        ("autocast{keep=[b,a]}", (Autocast(keep=frozenset("ab")),)),
        ("autocast{nested=[[1,2],[]]}", (Autocast(nested=((1, 2), ())),)),
    ],
)
def test_reads(text: str, passes: tuple[Pass, ...]):
    assert parse(text, find) == passes


@pytest.mark.parametrize(
    ("text", "span", "message"),
    [
        ("fuse_ensemble", "fuse_ensemble", "unknown pass 'fuse_ensemble'; did you mean 'fuse_ensembles'?"),
        ("autocast,fuse-ensembles", "fuse-ensembles", "did you mean 'fuse_ensembles'?"),
        ("autocast,", "", "expected the name of a pass, got the end"),
        (",autocast", ",", "expected the name of a pass, got ','"),
        ("autocast autocast", "autocast", "expected ',' or the end, got 'autocast'"),
        ("autocast{", "", "expected the name of an option, got the end"),
        ("autocast{dtype}", "}", "expected '=' and a value for 'dtype', got '}'"),
        ("autocast{dtype=}", "}", "expected a value, got '}'"),
        ("fuse_ensembles{label=2 GB}", "2 GB", "a value has no spaces in it; write 2GB, or quote it"),
        ("autocast{dtype=float16", "", "expected ',' or '}', got the end"),
        ("autocast{dtypes=float16}", "dtypes", "'autocast' has no option 'dtypes'; did you mean 'dtype'?"),
        ("autocast{fast}", "fast", "'autocast' has no option 'fast'; write mode=fast"),
        ("autocast{dtype=bfloat61}", "bfloat61", "expected a dtype, got bfloat61; did you mean 'bfloat16'?"),
        ("autocast{dtype=float16,dtype=float16}", "dtype", "option 'dtype' is given twice"),
        ("autocast{window=1}", "1", "expected a list like [a,b] or none, got 1"),
        ("autocast{only=[a}", "}", "expected ',' or ']', got '}'"),
        ("autocast{window=[1]}", "[1]", "expected a list like [a,b] or none, got [1]"),
        ("autocast{mode=slow}", "slow", "expected safe, fast or 8, got slow"),
        ("fuse_ensembles{minimum=2.5}", "2.5", "option 'minimum': expected a whole number, got 2.5"),
        ("fuse_ensembles{minimum='2'}", "'2'", "expected a whole number, got '2'"),
        ("fuse_ensembles{ratio=nan}", "nan", "expected a number, got nan"),
        ("fuse_ensembles{strict=maybe}", "maybe", "expected true or false, got maybe"),
        ("fuse_ensembles{strict=[true]}", "[true]", "expected true or false, got [true]"),
        ("fuse_ensembles{lowering=bnm}", "bnm", "expected auto, grouped_convolution or bmm, got bnm"),
        ("fuse_ensembles{label='open}", "'", "a quote that is not closed"),
        ("fuse_ensembles{label='\\x4'}", "'\\x4'", "valid escapes"),
        ("fuse_ensembles{label=<a>}", "<", "'<' has no meaning here"),
        ("prune", "prune", "'prune' needs the option 'amount'"),
        ("autocast, prune{amount=2}", "prune{amount=2}", "'prune' refuses these options: amount=2.0 is not between"),
        ("prune{amount=0.5,seed=1}", "seed", "'prune' has no option 'seed'"),
        ("odd{thing=1}", "1", "expected a complex, which text cannot express (pass an instance), got 1"),
    ],
)
def test_error_shows_the_span_and_what_was_meant(text: str, span: str, message: str):
    error = error_of(text)
    assert message in str(error)
    assert spanned(error) == span
    line, caret = str(error).splitlines()[-2:]
    assert line == f"  {text}"
    assert caret == "  " + " " * error.start + "^" * max(1, len(span))


def test_a_preset_stands_for_its_passes():
    found: list[str] = []

    def remember(name: str) -> type[Pass]:
        found.append(name)
        return FuseEnsembles

    training = list(PRESETS["training"])
    assert parse("autocast,training", remember) == (FuseEnsembles(),) * (1 + len(training))
    assert found == ["autocast", *training]


def test_an_option_of_a_preset_puts_other_passes_in_the_place_of_some():
    exact, narrow, small = (
        list(map(str, parse(f"inference{each}"))) for each in ("", "{dtype=bfloat16}", "{dtype=int8}")
    )
    at = exact.index("pack")
    assert narrow == [*exact[:at], "pack{dtype=bfloat16}", *exact[at:]]
    assert small == [*exact[:at], "quantize{baseline=bfloat16}", "pack{dtype=bfloat16}", *exact[at:]]
    assert list(map(str, parse("inference{}"))) == list(map(str, parse("inference{dtype=float32}"))) == exact
    behind = list(map(str, parse("fuse_ensembles, inference{ dtype = int8 }, eliminate_dead_code")))
    assert behind == ["fuse_ensembles", *small, "eliminate_dead_code"]
    arranged = [str(p) for p in chosen_passes("inference{dtype=int8}")]  # what stands for the rest runs behind
    assert sorted(arranged) == sorted(small)
    assert (
        arranged.index("quantize{baseline=bfloat16}") < arranged.index("pack{dtype=bfloat16}") < arranged.index("pack")
    )


@pytest.mark.parametrize(
    ("text", "span", "message"),
    [
        ("inference{dtype=fp8}", "fp8", "option 'dtype': expected float32, bfloat16 or int8, got fp8"),
        ("inference{dtype=bfloat}", "bfloat", "got bfloat; did you mean 'bfloat16'?"),
        ("inference{dtyp=int8}", "dtyp", "'inference' has no option 'dtyp'; did you mean 'dtype'?"),
        ("inference{dtype=int8,dtype=int8}", "dtype", "option 'dtype' is given twice"),
        ("inference{dtype=int8", "", "expected ',' or '}', got the end"),
        ("training{dtype=int8}", "dtype", "'training' has no option 'dtype'; it has none"),
    ],
)
def test_a_wrong_option_of_a_preset_is_shown_and_named(text: str, span: str, message: str):
    error = error_of(text)
    assert message in str(error)
    assert spanned(error) == span


def test_prints_only_what_differs_from_the_default():
    assert str(FuseEnsembles()) == "fuse_ensembles"
    assert str(FuseEnsembles(Lowering.BMM, minimum=2)) == "fuse_ensembles{lowering=bmm}"
    assert str(FuseEnsembles(label="a b", strict=True)) == "fuse_ensembles{strict=true,label='a b'}"
    assert str(Prune(0.5)) == "prune{amount=0.5}"
    assert str(Autocast(torch.float16, ("x",), (1, 2.5))) == "autocast{dtype=float16,only=[x],window=[1,2.5]}"
    assert str(Odd(2j)) == "odd{thing=<complex>}"


numbers = st.floats(allow_nan=False)
fusions = st.builds(FuseEnsembles, st.sampled_from(Lowering), st.integers(), numbers, st.booleans(), st.text())
casts = st.builds(
    Autocast,
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.complex64]),
    only=st.lists(st.text()).map(tuple),
    window=st.none() | st.tuples(st.integers(), numbers),
    mode=st.sampled_from(["safe", "fast", 8]),
    level=st.sampled_from(Level),
    tag=st.none() | st.integers() | st.text() | st.sampled_from(["none", "5", "inf"]),
    keep=st.frozensets(st.text()),
    nested=st.lists(st.lists(st.integers()).map(tuple)).map(tuple),
)


@given(st.lists(fusions | casts))
def test_what_is_printed_parses_back(passes: list[Pass]):
    text = ", ".join(map(str, passes))
    assert parse(text, find) == tuple(passes)
    assert "\n" not in text


@given(st.text(alphabet="autocsdype=,{}[]'\" 1\n"))
def test_any_text_is_read_or_refused(text: str):
    try:
        outcome: object = parse(text, find)
    except PipelineError as error:
        outcome = error
    if isinstance(outcome, PipelineError):
        assert 0 <= outcome.start <= outcome.end <= len(text)
