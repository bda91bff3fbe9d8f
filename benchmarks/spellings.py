"""Which kernels swap_kernels finds in families of transformers: `spellings.py [dtype] [family ...]`."""

from __future__ import annotations

import os
import sys
from collections import Counter

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from model_zoo.families import build, family_of

import fxopt

FAMILIES = (
    "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text phi3 olmo olmo2 cohere glm gpt_neox starcoder2 t5 bert gpt2 "
    "modernbert mixtral"
)


def row(name: str, dtype: torch.dtype) -> str:
    """Return what is swapped in one family, and why the rest is not."""
    member = build(family_of(name))
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in member.inputs(2, 12).items()}
    model = member.model.to(dtype)
    fast = fxopt.optimize(model, "swap_kernels", example_inputs=inputs, measure=False, time_budget=600)
    found, reasons = Counter[str](), list[str]()
    for each in fxopt.plan(fast).decisions:
        kernel = each.site["data"]["kernel"] if each.site else "refused"
        found[kernel if each.status == "applied" else f"{kernel} {each.status}"] += 1
        reasons += [] if each.status == "applied" else [f"  {kernel}: {each.reason}"]
    counts = ", ".join(f"{kernel} {count}" for kernel, count in sorted(found.items()))
    return "\n".join([f"{name}: {counts}", *dict.fromkeys(reasons)])


if __name__ == "__main__":
    torch.set_num_threads(1)
    for family in sys.argv[2:] or FAMILIES.split():
        print(row(family, getattr(torch, sys.argv[1] if sys.argv[1:] else "float32")), flush=True)
