"""fxopt's operators beside eager torch, torch.compile and liger-kernel: time, and the bytes moved over those of a copy.

    PYTHONPATH=.venv-kernels python benchmarks/kernels.py --json benchmarks/results/kernels.json

On a GPU all columns are timed there, in bfloat16; without one on a CPU, in float32, one thread, where references
compute. Each column is timed beside fxopt's, interleaved, and so is a copy of the first operand: `bandwidth` is what
an operator moves in a second over what that copy does. A row misses a target only where the whole 95% interval of
its ratio does. With Triton the report says, GPU or not, what kernels take of one (registers, shared memory, spills on
sm_80 and sm_90), and how far Triton's interpreter is from the references.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from kernel_subjects import SUBJECTS, Subject, compile_reports, head_row, interpreter_differences
from machine import described
from torch import Tensor

from fxopt.passes.timing import Interval, Timings, time_candidates

SHAPES = {"cuda": (8192, 4096), "cpu": (1024, 1024)}
"""Rows and features: 64 MiB in bfloat16, 4 MiB in float32."""
CALLS = {"cuda": 20, "cpu": 1}
"""Before a GPU is waited for, so that the waiting is not what is timed."""
CLASSES = (32_768, 131_072)
HEAD_FEATURES = {"cuda": 2048, "cpu": 32}
ROUNDS = 12
BANDWIDTH, MEMORY, STEP_TIME, MEMBERS = 0.8, 0.2, 1 / 1.1, 3.0
"""Targets: of a copy's bandwidth; of the plain head's memory, and of its speed; ensemble_mlp over batched products."""


def outputs(result: Any) -> list[Tensor]:
    return [each for each in ((result,) if isinstance(result, Tensor) else result) if each.requires_grad]


def steps(subject: Subject, given: tuple[Any, ...], device: str, *, training: bool, compiled: bool) -> dict[str, Any]:
    """Return what is timed, by column: forwards without gradients, or forwards with those of all operands."""
    leaves = [each for each in given if each.requires_grad]

    def forward(call: Callable[..., Any]) -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad():
                for _ in range(CALLS[device]):
                    call(*given)
            wait(device)

        return run

    def train(call: Callable[..., Any]) -> Callable[[], None]:
        upstream = [torch.randn_like(each) for each in outputs(call(*given))]

        def run() -> None:
            for _ in range(CALLS[device]):
                torch.autograd.grad(outputs(call(*given)), leaves, upstream, allow_unused=True)
            wait(device)

        return run

    made = train if training else forward
    found = {name: made(call) for name, call in subject.columns(device, compiled=compiled).items()}
    if subject.moved is not None:
        target = torch.empty_like(given[0])
        found["copy"] = forward(lambda x, *_: target.copy_(x))
    return found


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(name: str, device: str, *, training: bool, compiled: bool, seconds: float) -> dict[str, Any]:
    """Return one row: how many times as fast as each other column fxopt is, and its bandwidth over that of a copy."""
    torch.manual_seed(0)
    subject = SUBJECTS[name]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    given = subject.inputs(*SHAPES[device], device, dtype)
    columns = steps(subject, given, device, training=training, compiled=compiled)
    check(subject, given)
    races = {
        other: time_candidates({"fxopt": columns["fxopt"], other: column}, seconds=seconds, least_rounds=ROUNDS)
        for other, column in columns.items()
        if other != "fxopt"
    }
    row: dict[str, Any] = {
        "operator": name,
        "phase": "step" if training else "forward",
        "us": round(races["eager"].microseconds("fxopt") / CALLS[device], 2),
        "speedup_over": {o: shown(race.ratio(o, "fxopt")) for o, race in races.items() if o != "copy"},
    }
    if subject.moved is not None:
        row["bandwidth"] = bandwidth(races["copy"], subject.moved[training])
    return row


def bandwidth(timings: Timings, moved: float) -> list[float]:
    """Return the bytes that must move over those that a copy, which reads and writes, moves in the same time."""
    return [round(value * moved / 2, 3) for value in shown(timings.ratio("copy", "fxopt"))]


def shown(interval: Interval) -> list[float]:
    return [round(value, 3) for value in (interval.low, interval.mid, interval.high)]


def check(subject: Subject, given: tuple[Any, ...]) -> None:
    """Make sure that fxopt's first result is that of torch, but for rounding."""
    with torch.no_grad():
        found = [call(*given) for call in (subject.ours, subject.eager)]
    ours, theirs = (each[0] if isinstance(each, tuple) else each for each in found)
    error = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
    assert error < 2e-2, f"off by {error:.3f}"


def line(row: Mapping[str, Any]) -> str:
    ratios = "  ".join(
        f"{name} {mid:.2f} [{low:.2f}, {high:.2f}]" for name, (low, mid, high) in row["speedup_over"].items()
    )
    moved = f"  {row['bandwidth'][1]:.0%} of a copy" if "bandwidth" in row else ""
    return f"{row['operator']:24s} {row['phase']:8s} {row['us']:9.1f} us  over {ratios}{moved}"


def missed(rows: list[dict[str, Any]], heads: list[dict[str, Any]], device: str) -> dict[str, list[str]]:
    """Return what is shown to miss a target, by target; those of kernels hold on a GPU."""
    named = {f"{row['operator']}, {row['phase']}": row for row in rows if device == "cuda"}
    members = {name: row for name, row in named.items() if name.startswith("ensemble_mlp")}
    return {
        "80% of a copy's bandwidth": [n for n, row in named.items() if row.get("bandwidth", [1] * 3)[2] < BANDWIDTH],
        "as fast as torch.compile": [
            name for name, row in named.items() if row["speedup_over"].get("torch.compile", [1] * 3)[2] < 1
        ],
        "3x over batched products": [n for n, row in members.items() if row["speedup_over"]["eager"][2] < MEMBERS],
        "a fifth of the plain head's memory": [str(h["classes"]) for h in heads if h["memory_of_plain"] > MEMORY],
        "the plain head's time and 10%": [str(head["classes"]) for head in heads if head["speedup"][2] < STEP_TIME],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", nargs="*", default=list(SUBJECTS))
    parser.add_argument("--classes", nargs="*", type=int, default=CLASSES, help="of the heads")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--seconds", type=float, default=1.0, help="timing budget of a row")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    before, rows, heads = os.getloadavg()[0], list[dict[str, Any]](), list[dict[str, Any]]()
    for name in arguments.operators:
        for training in (False, True):
            compiled = not arguments.no_compile
            rows.append(measure(name, device, training=training, compiled=compiled, seconds=arguments.seconds))
            print(line(rows[-1]), flush=True)
        torch.compiler.reset()
    for classes in arguments.classes:
        heads.append(head_row(classes, HEAD_FEATURES[device], device, seconds=arguments.seconds))
        print(json.dumps(heads[-1]), flush=True)
    report = {
        "schema_version": 1,
        "machine": {**described(), "device": torch.cuda.get_device_name() if device == "cuda" else "cpu"},
        "load_average": [round(before, 1), round(os.getloadavg()[0], 1)],
        "missed": missed(rows, heads, device),
        "rows": rows,
        "heads": heads,
        **kernels(),
    }
    print(json.dumps(report["missed"], indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def kernels() -> dict[str, Any]:
    """Return what compilers and the interpreter say of Triton's kernels, or why they say nothing."""
    if find_spec("triton") is None:
        return {"compiled": "triton is not installed"}
    reports = compile_reports()
    for each in reports:
        print("  ".join(f"{key} {value}" for key, value in each.items()))
    return {"compiled": reports, "interpreter_differences": interpreter_differences()}


if __name__ == "__main__":
    main()
