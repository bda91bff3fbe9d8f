from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.compat.packed import why_no_packing

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
FUSE = "fuse_ensembles{lowering=bmm}"


class Members(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


class Speaking(Members):
    def forward(self, x: Tensor) -> Tensor:
        print("hello")
        return self.a(x) + self.b(x)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"verify": False, "example_inputs": X}, r"a rewrite was not verified \(verify=False\): leave verify out"),
        ({}, r"a rewrite was not verified \(no example inputs\): give example_inputs"),
    ],
)
def test_python_and_the_report_warn_of_what_nothing_was_compared_for(options: dict[str, object], words: str):
    with pytest.warns(fxopt.UnverifiedWarning, match=words) as caught:
        fast = fxopt.optimize(Members().eval(), FUSE, measure=False, **options)
    assert caught[0].filename == __file__
    report = str(fxopt.report(fast))
    assert "NOT VERIFIED" in report.splitlines()[0]
    assert str(caught[0].message) in report


def test_what_was_checked_or_repeated_or_not_there_is_no_reason_to_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxopt.UnverifiedWarning)
        fast = fxopt.optimize(Members().eval(), FUSE, example_inputs=X, measure=False)
        fxopt.optimize(nn.Linear(4, 4))
        again = fxopt.optimize(Members().eval(), FUSE, plan=fxopt.plan(fast))
    assert "checked: float64" in str(fxopt.report(fast))
    assert "; checked: when the plan was made\n" in str(fxopt.report(again))


def test_a_second_call_says_how_what_stands_already_was_checked():
    with pytest.warns(fxopt.UnverifiedWarning):
        blind = fxopt.optimize(Members().eval(), FUSE, measure=False)
    fast = fxopt.optimize(Members().eval(), FUSE, example_inputs=X, measure=False)
    for first, words in ((fast, "checked: float64"), (blind, "NOT VERIFIED: no example inputs")):
        again = fxopt.optimize(first, "eliminate_dead_code", example_inputs=X, measure=False)
        assert str(fxopt.report(again)).startswith(f"1 rewrite applied for inference; {words}\n")


def test_a_warning_that_is_an_error_leaves_the_model_as_it_was():
    model = Members().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxopt.UnverifiedWarning)
        with pytest.raises(fxopt.UnverifiedWarning):
            fxopt.optimize(model, FUSE, inplace=True)
    assert type(model) is Members
    with pytest.raises(fxopt.StateError):
        fxopt.report(model)


def test_passes_for_inference_say_what_to_do_with_a_model_in_training():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    report = str(fxopt.report(fxopt.optimize(model, "fold_batchnorm", example_inputs=X)))
    assert "0 rewrites applied for training" in report
    assert "the model is in training, where weights change at every step; call model.eval() first" in report
    assert "model.eval()" not in str(fxopt.report(fxopt.optimize(model.eval(), "fold_batchnorm", example_inputs=X)))


def test_forwards_that_print_are_named_once(capsys: pytest.CaptureFixture[str]):
    fast = fxopt.optimize(Speaking().eval(), FUSE, example_inputs=X, measure=False)
    assert str(fxopt.report(fast)).count("the forward of Speaking prints or logs") == 1
    assert capsys.readouterr().out
    fast(X)
    assert not capsys.readouterr().out
    assert "prints" not in str(fxopt.report(fxopt.optimize(Members().eval(), FUSE, example_inputs=X, measure=False)))


def test_what_torch_compile_runs_says_so():
    inner = Members().eval()
    model = nn.Sequential(Members(), torch.compile(inner, backend="eager")).eval()
    found = fxopt.report(fxopt.optimize(model, FUSE, example_inputs=X, measure=False)).to_json()["opaque"]
    assert [(each["module"], each["reason"].partition(":")[0]) for each in found] == [
        ("1", "torch.compile runs it from code of its own")
    ]
    whole = str(fxopt.report(fxopt.optimize(torch.compile(inner, backend="eager"), example_inputs=X)))
    assert "not captured (root): torch.compile runs it from code of its own: optimize the model first" in whole


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = x.relu(), x.relu()
        a.add_(1)
        return a + b


def test_a_refusal_names_the_users_line_and_operation():
    report = str(fxopt.report(fxopt.optimize(Writes(), "eliminate_common_subexpressions", example_inputs=X)))
    line = Writes.forward.__code__.co_firstlineno + 2
    assert f"'add_' at test_notes.py:{line} may write in place" in report


def test_passes_for_training_that_stand_in_the_way_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)).train()
    trained = fxopt.optimize(model, "checkpoint{budget=0}", example_inputs=X)
    memory = fxopt.report(trained).to_json()["memory"]
    assert memory["live_after"] < memory["live_before"]
    assert fxopt.report(trained).notes == ()
    served = fxopt.report(fxopt.optimize(trained.eval(), "inference", example_inputs=X))
    assert served.to_json()["memory"] == memory
    (note,) = served.notes
    assert note.startswith("checkpoint had been run for training: ")
    assert note.endswith("begin with fxopt.restore(fast)")


def test_what_two_calls_refuse_is_counted_once() -> None:
    model = nn.BatchNorm1d(4).train()
    once = fxopt.optimize(model, "sync_batchnorm", example_inputs=X)
    twice = fxopt.optimize(once, "sync_batchnorm", example_inputs=X)
    assert str(fxopt.report(twice)).startswith("0 rewrites applied for training, 1 refused\n")


@pytest.mark.parametrize(
    ("status", "cause"), [("undone", fxopt.Cause.NO_FASTER), ("refused", fxopt.Cause.JUDGED_SLOWER)]
)
def test_what_small_numbers_take_and_what_was_left_for_speed(status: str, cause: fxopt.Cause) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval()
    fast = fxopt.optimize(model, "quantize{aim=size,budget=0.5}", example_inputs=torch.randn(4, 64))
    report = fxopt.report(fast)
    assert report.notes == ("parameters and buffers take 9 KiB, 32.5 KiB before (28%)",)
    plan = report.record.plan
    undone = [dataclasses.replace(d, status=status, reason="no faster: 0.9x", cause=cause) for d in plan.decisions]
    fast.__dict__["_fxopt_record"] = dataclasses.replace(
        report.record, plan=dataclasses.replace(plan, decisions=(undone[0], plan.decisions[1]))
    )
    assert (
        fxopt.report(fast)
        .notes[1]
        .startswith("one place was not quantized, since that is no faster there; with aim=size")
    )


def test_what_fewer_units_take_is_said_too():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    fast = fxopt.optimize(
        model, "prune{method=structured,amount=0.5}", example_inputs=torch.randn(4, 64), measure=False
    )
    assert "parameters and buffers take 16.4 KiB, 32.5 KiB before (50%)" in fxopt.report(fast).notes


@pytest.mark.skipif(bool(why_no_packing(torch.bfloat16)), reason=why_no_packing(torch.bfloat16))
def test_the_report_says_where_nothing_is_computed_in_bfloat16() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).eval(), torch.randn(2, 8)
    (note,) = fxopt.report(fxopt.optimize(model, "pack{dtype=bfloat16,budget=1e-9}", example_inputs=x)).notes
    assert note.startswith("nothing is computed in bfloat16: ") and note.endswith("(0, the first of 2)")
    none = fxopt.optimize(nn.Sequential(nn.ReLU()).eval(), "pack{dtype=bfloat16}", example_inputs=x)
    assert fxopt.report(none).notes == ("nothing is computed in bfloat16: no layer was found that can be",)
    both = fxopt.optimize(nn.Sequential(nn.ReLU()).eval(), "quantize,pack{dtype=bfloat16}", example_inputs=x)
    (note,) = fxopt.report(both).notes
    assert note.startswith("nothing is quantized, and nothing is computed in bfloat16: ")
    some = fxopt.optimize(model, "pack{dtype=bfloat16}", example_inputs=x, measure=False)
    assert "bfloat16" not in " ".join(fxopt.report(some).notes)
