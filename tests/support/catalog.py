"""For each pass that works in one process: how a random number makes a sample that it rewrites."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

import torch
from support.models import attention, ensembles, forwards, graphs, layers
from support.samples import Sample
from torch import nn

from fxopt.compat.quantized import why_no_static_int8

Make = Callable[[Random], Sample]


def network(pipelines: tuple[str, ...], kinds: str, training: bool | None, near: float, random: Random) -> Sample:
    """Return a small network under one of several pipelines."""
    pipeline = random.choice(pipelines)
    name, build, make = layers.network(random, kinds)
    mode = random.random() < 0.5 if training is None else training
    near = near or (0.1 if "bfloat16" in pipeline else 0.0)
    return Sample(
        pipeline,
        name,
        build,
        make,
        training=mode,
        near=near,
        zeros=pipeline.startswith("prune"),
        adds=pipeline == "qat",
        serves=pipeline.endswith("release") or pipeline.startswith("quantize"),
    )


def _of(*pipelines: str, kinds: str, training: bool | None = False, near: float = 0.0) -> Make:
    return partial(network, pipelines, kinds, training, near)


PASSES: dict[str, Make] = {
    "attention": attention.attention,
    "autocast": _of("autocast", kinds="mlp blocks convolutions gated", training=None, near=0.1),
    "channels_last": _of("channels_last", kinds="convolutions", training=True),
    "checkpoint": _of("checkpoint{budget=0}", kinds="blocks convolutions", training=True),
    "delegate": _of(
        "delegate{engine=openvino}", "delegate{engine=onnxruntime}", "flatten_calls,delegate",
        kinds="mlp blocks convolutions gated written tied stopped",
    ),
    "eliminate_common_subexpressions": partial(forwards.forwards, "eliminate_common_subexpressions"),
    "eliminate_dead_code": partial(forwards.forwards, "eliminate_dead_code"),
    "flatten_calls": _of("flatten_calls", kinds="mlp blocks convolutions gated tied stopped", training=False),
    "fold_batchnorm": layers.norms,
    "fold_constants": partial(forwards.forwards, "fold_constants"),
    "fuse_ensembles": ensembles.ensembles,
    "fuse_experts": graphs.experts,
    "graph_pooling": graphs.pooling,
    "pack": _of("pack", "pack", "pack{dtype=bfloat16}", kinds="mlp blocks convolutions gated recurrent written tied"),
    "prune": _of(
        "prune", "prune{method=structured}", "prune{method=nm}", kinds="mlp blocks convolutions gated", training=None
    ),
    "qat": _of("qat", kinds="mlp blocks convolutions gated", training=True, near=0.5),
    "quantize": _of(
        "quantize", "quantize{scheme=int8_weight,aim=size}",
        *(() if why_no_static_int8() else ("quantize{scheme=int8_static,aim=size}",)),
        kinds="mlp blocks gated recurrent", near=0.2,
    ),
    "release": _of("pack,release", kinds="mlp blocks gated convolutions"),
    "sparse_message_passing": graphs.message_passing,
    "swap_kernels": partial(forwards.forwards, "swap_kernels"),
    "sync_batchnorm": _of("sync_batchnorm", kinds="convolutions", training=True),
}  # fmt: skip
"""Passes that need no second process."""

IN_A_GROUP = ("parallel", "sync_batchnorm", "tensor_parallel")
"""Those that run in a group, of one process if there is no other."""

OF_RANKS: dict[str, Make] = {
    "parallel": _of("parallel{tensor=2}", kinds="mlp blocks gated", training=None),
    "tensor_parallel": _of("tensor_parallel", kinds="mlp blocks gated", training=None),
}
"""Passes that are tried in two processes."""


def sample(name: str, seed: int) -> Sample:
    """Return the sample of a pass that a seed stands for."""
    made = (PASSES | OF_RANKS)[name](random.Random(f"{name} {seed}"))
    return replace(made, seed=seed, build=partial(_seeded, made.build, seed, made.training))


def _seeded(build: Callable[[], nn.Module], seed: int, training: bool) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().train(training)
