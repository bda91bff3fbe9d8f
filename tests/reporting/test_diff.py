from __future__ import annotations

from fxopt.reporting.diff import collapse, diff_graphs


def test_nothing_changed():
    assert diff_graphs({"": "a\nb", "child": "c"}, {"": "a\nb", "child": "c"}) == ""


def test_a_small_change_is_a_plain_unified_diff():
    assert diff_graphs({"encoder": "x\nadd\nrelu\nout"}, {"encoder": "x\nadd_relu\nout"}) == (
        "--- encoder\n+++ encoder\n@@ -1,4 +1,3 @@\n x\n-add\n-relu\n+add_relu\n out\n"
    )


def test_heads_are_shortened_to_the_first_and_the_last():
    calls = [f"heads_{i} = self.heads.{i}(x)" for i in range(128)]
    joined = f"cat = torch.cat([{', '.join(f'heads_{i}' for i in range(128))}], dim = 1)"
    text = diff_graphs({"": "\n".join([*calls, joined])}, {"": "fused = self.fused(x)\ncat = fused.flatten(1)"})
    assert text.splitlines() == [
        "--- (root)",
        "+++ (root)",
        "@@ -1,129 +1,2 @@",
        "-heads_0 = self.heads.0(x)",
        "-    ... 126 more lines like these ...",
        "-heads_127 = self.heads.127(x)",
        "-cat = torch.cat([heads_0, heads_1, ..., heads_127], dim = 1)",
        "+fused = self.fused(x)",
        "+cat = fused.flatten(1)",
    ]


def test_repeated_blocks_of_several_lines_are_one_run():
    lines = [f"-{op}_{i}" for i in range(10) for op in ("linear", "tanh", "out")]
    assert collapse(lines) == [*lines[:3], "-    ... 24 more lines like these ...", *lines[-3:]]


def test_what_differs_in_more_than_numbers_is_shown_whole():
    lines = [f"-{op}" for op in ("add", "mul", "relu", "tanh", "add", "gelu")]
    assert collapse(lines) == lines
    assert collapse(["-a1", "-a2", "-a3"]) == ["-a1", "-a2", "-a3"]
    mixed = "f(x, y, z, u, v, w, q)"
    assert mixed in diff_graphs({"": mixed}, {"": "g"})


def test_what_a_region_of_a_whole_model_is_given_is_shortened():
    kinds = ("weight", "mean", "bias")
    names = [f"{kind}_{i}" for i in range(12) for kind in kinds[: 2 + i % 2]]
    reads = [f"    %{name} : [num_users=1] = get_attr[target={name}]" for name in names]
    call = (
        f"    %region : [num_users=1] = call_function[target=region](args = (%x, {', '.join(f'%{n}' for n in names)}))"
    )
    text = diff_graphs({"": "x"}, {"": "\n".join([*reads, call])})
    assert text.splitlines()[4:] == [
        *(f"+{line}" for line in reads[:2]),
        f"+    ... {len(reads) - 3} more lines that read tensors ...",
        f"+{reads[-1]}",
        f"+    %region : [num_users=1] = call_function[target=region](args = (%x, %weight_0, ..., %{names[-1]}))",
    ]


def test_removed_and_added_lines_never_share_a_run():
    assert collapse(["-a1", "-a2", "+a3", "+a4"]) == ["-a1", "-a2", "+a3", "+a4"]


def test_equal_changes_are_shown_once():
    before = {f"layer.{i}": f"add_{i}\nrelu_{i}" for i in range(12)} | {"head": "x"}
    after = {f"layer.{i}": f"add_relu_{i}" for i in range(12)} | {"head": "y"}
    text = diff_graphs(before, after)
    assert text.count("--- ") == 2
    assert "--- layer.0 and 11 more, up to layer.11" in text
    assert "--- head" in text


def test_modules_come_and_go():
    text = diff_graphs({"old": "a"}, {"new": "b"})
    assert "--- old\n+++ old (no longer has its own graph)" in text
    assert "--- new (new)\n+++ new" in text


def test_a_line_that_looks_like_a_header_is_kept():
    assert "--- -x" not in diff_graphs({"": "-- -x"}, {"": "y"}).splitlines()[0]
    assert "--- -x" in diff_graphs({"": "-- -x"}, {"": "y"})
