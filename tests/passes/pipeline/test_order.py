from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

import fxopt
from fxopt.errors import OrderError, UsageError
from fxopt.known_passes import PRESET_OPTIONS, PRESETS, own_names
from fxopt.pass_order import ORDER
from fxopt.passes.contract import Pass
from fxopt.passes.pipeline import check_order, chosen_passes, parse
from fxopt.passes.sites import Phase


def a_pass(name: str, **contract: Any) -> Pass:
    return type(name, (Pass,), {**contract, "__str__": lambda self: self.name})()


def message(*passes: Pass) -> str:
    with pytest.raises(OrderError) as caught:
        check_order(passes)
    return str(caught.value)


def test_no_rules_no_objection():
    a, b = a_pass("A"), a_pass("B")
    check_order([])
    check_order([a, b, a])


def test_a_model_is_finished_once():
    a, last = a_pass("A"), a_pass("Last", finalize=lambda self, model, sites: model)
    check_order([a, a, last])
    assert message(a, last, last) == "'last' is listed twice, and a model is finished once; leave one out"


def test_rules_that_hold():
    check_order(
        [a_pass("A", before=("b",)), a_pass("B", after=("a",), requires=("a",)), a_pass("C", destroys={"a": "gone"})]
    )


@pytest.mark.parametrize(
    ("late", "early", "why"),
    [
        ({}, {"before": ("b",)}, "'a' must run before 'b'"),
        ({"after": ("a",)}, {}, "'b' must run after 'a'"),
        ({"requires": ("a",)}, {}, "'b' needs 'a' to have run before it"),
        (
            {"destroys": {"a": "the layers are shards"}},
            {},
            "once 'b' has run, 'a' no longer can: the layers are shards",
        ),
    ],
)
def test_wrong_order_names_both_says_why_and_what_works(late: Mapping[str, Any], early: Mapping[str, Any], why: str):
    b, a, other = a_pass("B", **late), a_pass("A", **early), a_pass("C")
    assert message(b, other, a) == f"'b' is listed before 'a', but {why}; use c,a,b"
    check_order([other, a, b])


def test_no_order_works():
    a = a_pass("A", destroys={"b": "its layers are shards"})
    b = a_pass("B", after=("a",))
    for order in ((a, b), (b, a)):
        text = message(*order)
        assert "'a'" in text
        assert "'b'" in text
        assert "its layers are shards" in text
        assert "so they cannot be used together" in text


def test_longer_circles_have_no_order_either():
    a, b, c = a_pass("A", before=("b",)), a_pass("B", before=("c",)), a_pass("C", before=("a",))
    assert message(a, b, c).endswith("no other order works either")


def test_a_pass_that_destroys_itself_runs_once():
    once = a_pass("Shard", destroys={"shard": "the parameters are shards already"})
    check_order([once])
    assert "the parameters are shards already" in message(once, once)


def test_required_pass_is_missing():
    assert message(a_pass("Qat", requires=("fold",))) == (
        "'qat' needs 'fold' to have run before it; list it first: fold,qat"
    )


def test_evaluation_and_training_do_not_mix():
    fold, sync = a_pass("FoldBatchnorm", phase=Phase.EVAL), a_pass("SyncBatchnorm", phase=Phase.TRAIN)
    assert message(sync, fold) == (
        "'fold_batchnorm' and 'sync_batchnorm' cannot be used together: "
        "'fold_batchnorm' needs evaluation mode, 'sync_batchnorm' is for training"
    )


def test_a_pass_whose_work_another_includes_runs_behind_it():
    names = [p.name for p in chosen_passes("prune,fold_batchnorm,quantize{scheme=int8_static},autocast")]
    assert names == ["prune", "quantize", "fold_batchnorm", "autocast"]
    assert [str(p) for p in chosen_passes("compress")] == list(PRESETS["compress"])
    a, b, c = a_pass("A"), a_pass("B", includes=("a",)), a_pass("C")
    assert chosen_passes([a, c, b]) == (c, b, a) and chosen_passes([b, a]) == (b, a)


def test_what_runs_behind_need_not_keep_the_rules_of_its_former_place():
    names = [p.name for p in chosen_passes("inference,quantize{scheme=int8_static}")]
    behind = ["fold_batchnorm", *names[names.index("attention") + 3 :]]
    assert names[names.index("attention") + 1 :] == ["quantize", *behind] and "pack" in behind
    a, b = a_pass("A", before=("b",)), a_pass("B")
    assert chosen_passes([a, b, c := a_pass("C", includes=("a",))]) == (b, c, a)
    assert "'a' must run before 'b'" in message(b, a, c)


def test_a_pass_stays_before_what_would_rule_it_out_behind():
    a, b, c = a_pass("A"), a_pass("B", destroys={"a": "gone"}), a_pass("C", includes=("a",))
    assert chosen_passes([a, b, c]) == (a, b, c)
    names = [p.name for p in chosen_passes("fold_batchnorm,compress")]
    assert names == ["fold_batchnorm", "quantize", "quantize"]


def presets() -> Iterator[str]:
    for preset in PRESETS:
        yield preset
        for option, values in PRESET_OPTIONS.get(preset, {}).items():
            yield from (f"{preset}{{{option}={value}}}" for value in list(values)[1:])


@pytest.mark.parametrize("preset", [*presets()])
def test_every_pass_goes_with_every_preset_or_cannot_be_used_with_it(preset: str):
    for name in own_names():
        answers = [order_or_reason(",".join(both)) for both in permutations((preset, name))]
        assert len({type(each) for each in answers}) == 1, "only one order of the two is taken"
        for answer in answers:
            if isinstance(answer, str):
                assert "cannot be used together" in answer or "leave one out" in answer
            else:
                assert sorted(answer) == sorted(map(str, (*parse(preset), *parse(name))))


def order_or_reason(text: str) -> list[str] | str:
    try:
        return [str(p) for p in chosen_passes(text)]
    except OrderError as error:
        return str(error)


@pytest.mark.parametrize(
    ("text", "beside"),
    [
        ("inference,prune", "prune,fold_batchnorm"),
        ("inference,attention", "attention,pack"),
        ("inference,pack{dtype=bfloat16}", "pack{dtype=bfloat16},pack"),
        ("fuse_ensembles{lowering=bmm},inference", "fuse_ensembles{lowering=bmm},fuse_ensembles"),
        (
            "inference{dtype=int8},quantize{scheme=int8_static}",
            "quantize{baseline=bfloat16},quantize{scheme=int8_static}",
        ),
        ("swap_kernels,training", "swap_kernels,eliminate_common_subexpressions"),
        ("compress,inference", "fuse_ensembles,quantize{scheme=int8_weight,aim=size}"),
    ],
)
def test_what_is_listed_beside_a_preset_runs_where_its_rules_let_it(text: str, beside: str):
    assert beside in ",".join(map(str, chosen_passes(text)))


def test_passes_without_a_preset_keep_the_order_that_is_written():
    for text in ("fold_batchnorm,prune", "pack,fold_batchnorm"):
        with pytest.raises(OrderError, match="use "):
            chosen_passes(text)
    with pytest.raises(OrderError):  # those two, too, where a preset stands beside them
        chosen_passes("inference,fuse_ensembles,prune")


def test_the_table_names_own_passes_and_the_page_of_passes_shows_it():
    own, page = set(own_names()), (Path(__file__).parents[3] / "docs/passes/index.md").read_text(encoding="utf-8")
    for name, order in ORDER.items():
        columns = (order.before, order.after, order.destroys, order.includes)
        assert {name, *order.requires}.union(*columns) <= own
        cells = (", ".join(f"`{each}`" for each in column) for column in columns)
        assert f"| `{name}` | {' | '.join(cells)} |" in page


def test_a_pass_that_extends_one_of_the_table_keeps_its_rules() -> None:
    class Packed(fxopt.Pack):
        before = (*fxopt.Pack.before, "other")

    assert fxopt.Pack.destroys and Packed.destroys == fxopt.Pack.destroys and Packed.before == ("other",)
    with pytest.raises(OrderError, match="once 'packed' has run, 'prune' no longer can"):
        check_order([Packed(), fxopt.Prune()])


@pytest.mark.parametrize("rule", ["before", "after", "requires", "includes"])
def test_rules_that_are_no_tuple_are_refused(rule: str) -> None:
    with pytest.raises(UsageError, match=rf"pass 'loose': {rule}='pack'; give a tuple: \('pack',\)"):
        type("Loose", (fxopt.Pass,), {rule: "pack"})
