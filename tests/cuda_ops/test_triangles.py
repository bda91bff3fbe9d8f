"""Triangles in CUDA C++: what a thread does, run on the CPU; compiled for GPUs that are not there; and on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fxopt.cuda_ops import compiled, gpu
from fxopt.cuda_ops.triples import CLOSED, COMMON, cuda_kernel, near_pairs, oriented_edges, sums_by_type, triangles
from fxopt.cuda_ops.triples.listing import listed_triangles
from fxopt.cuda_ops.triples.products import triple_products_reference
from fxopt.cuda_ops.triples.triangles import OrientedGraph, simple_edges
from fxopt.errors import UsageError

HERE = Path(__file__).parent
SOURCE = next(source for source in compiled.SOURCES if source.stem == "triangles")
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no c++")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")


class OnHost:
    """Has the place of the compiled operators; threads are run one after the other."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)

    def count(self, source: Tensor, target: Tensor, starts: Tensor, counts: Tensor) -> None:
        self.library.count(_pointers(source, target, starts), _number(len(source)), _pointer(counts))

    def fill(self, source: Tensor, target: Tensor, starts: Tensor, places: Tensor, found: Tensor) -> None:
        total = _number(found.shape[1])
        graph = _pointers(source, target, starts)
        self.library.fill(graph, _number(len(source)), _pointer(places), total, _pointer(found))

    def products(self, source: Tensor, target: Tensor, starts: Tensor, *tables: Tensor) -> None:
        assert all(table.is_contiguous() for table in tables)
        given = _pointers(*tables, last=tables[2].shape[1])
        self.library.products(_pointers(source, target, starts), _number(len(source)), given)


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr() if tensor.numel() else None)


def _number(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


def _pointers(*tensors: Tensor, last: int = 0) -> Any:
    """Return a structure of pointers, and a number behind them."""
    values = [tensor.data_ptr() if tensor.numel() else 0 for tensor in tensors]
    return (ctypes.c_int64 * (len(values) + 1))(*values, last)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> OnHost:
    library = tmp_path_factory.mktemp("host") / "triangles.so"
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", f"-I{SOURCE.parent}"]
    subprocess.run(["c++", *flags, str(HERE / "triangles_on_host.cpp"), "-o", str(library)], check=True)
    return OnHost(library)


def random_graph(seed: int, num_nodes: int = 40, share: float = 0.25) -> tuple[Tensor, Tensor]:
    """Return edges inside of two graphs, and the graph of each node."""
    generator = torch.Generator().manual_seed(seed)
    batch = (torch.arange(num_nodes) % 2)[torch.randperm(num_nodes, generator=generator)]
    pairs = torch.combinations(torch.arange(num_nodes)).t()
    pairs = pairs[:, batch[pairs[0]] == batch[pairs[1]]]
    return pairs[:, torch.rand(pairs.shape[1], generator=generator) < share], batch


GRAPHS = {
    "sparse": random_graph(0),
    "complete": random_graph(1, 12, 1.0),
    "no edges": random_graph(2, 5, 0.0),
    "no nodes": (torch.empty(2, 0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)),
    "star": (torch.tensor([[0] * 9, list(range(1, 10))]), torch.zeros(10, dtype=torch.int64)),
}
each_graph = pytest.mark.parametrize("graph", GRAPHS)


@needs_compiler
@each_graph
def test_threads_list_the_triangles_of_the_reference_in_its_order(
    host: OnHost, graph: str, monkeypatch: pytest.MonkeyPatch
):
    edges, batch = GRAPHS[graph]
    oriented = OrientedGraph(simple_edges(edges, len(batch)), len(batch))
    monkeypatch.setattr(cuda_kernel, "native", lambda _: host)
    found = cuda_kernel.triangles(oriented.source, oriented.target, len(batch), 1)
    expected = listed_triangles(oriented.source, oriented.target, len(batch), 2**20)
    assert torch.equal(found, expected)
    assert expected.shape[1] > 0 or graph not in ("sparse", "complete")


@needs_compiler
@each_graph
@pytest.mark.parametrize("wanted", [[True] * 4, [False, False, False, True], [True, False, True, False]])
def test_threads_add_up_what_the_reference_does(
    host: OnHost, graph: str, wanted: list[bool], monkeypatch: pytest.MonkeyPatch
):
    edges, batch = GRAPHS[graph]
    edges = oriented_edges(edges, batch, 2)[0]
    torch.manual_seed(0)
    tables = [torch.randn(rows, 33) for rows in (edges.shape[1],) * 3 + (2,)]
    monkeypatch.setattr(cuda_kernel, "native", lambda _: host)
    settings = (edges, batch, CLOSED, 0, 2**20, wanted)
    found = cuda_kernel.triple_products(*tables, *settings)
    expected = triple_products_reference(*(table.double() for table in tables), *settings)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-4)
    assert expected[3].count_nonzero() or not wanted[3] or graph not in ("sparse", "complete")


@needs_compiler
def test_other_triples_and_deterministic_sums_are_left_to_the_reference(host: OnHost, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_kernel, "native", lambda _: pytest.fail("the kernel is asked"))
    edges, batch = GRAPHS["complete"]
    tables = [torch.randn(len(batch), 2) for _ in range(3)]
    settings = (near_pairs(edges, batch, 0, "codegree"), batch, COMMON, 0, 2**20, [True] * 4)
    for one in cuda_kernel.triple_products(*tables, torch.randn(2, 2), *settings):
        assert one.shape[1] == 2
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    rows = torch.randn(edges.shape[1], 2)
    settings = (edges, batch, CLOSED, 0, 2**20, [True] * 4)
    found = cuda_kernel.triple_products(rows, rows, rows, torch.randn(2, 2), *settings)
    assert found[0].shape == rows.shape


@needs_compiler
def test_edges_out_of_order_are_refused_before_a_kernel_reads_them(host: OnHost, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_kernel, "native", lambda _: host)
    with pytest.raises(UsageError, match="edge 1, from 0 to 1, is out of order"):
        cuda_kernel.triangles(torch.tensor([0, 0]), torch.tensor([2, 1]), 3, 1)
    with pytest.raises(UsageError, match=r"edge 0, from 0 to 9, is out of order; give edges .* of 3 nodes"):
        cuda_kernel.triangles(torch.tensor([0]), torch.tensor([9]), 3, 1)


# -- compiling -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_nvcc
@needs_compiler
def test_sources_compile_for_gpus_that_are_not_there(host: OnHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """And torch takes what they register: `host` has the one name that a torch without CUDA lacks."""
    monkeypatch.setenv("FXOPT_KERNEL_CACHE", str(tmp_path))
    flags = ["-std=c++20", "-DUSE_CUDA", f"-I{Path(torch.__file__).parent / 'include'}", str(SOURCE)]
    subprocess.run(["nvcc", "-cubin", "-arch=sm_80", *flags, "-o", str(tmp_path / "sm_80")], check=True)
    kept = compiled.compiled(SOURCE, "sm_90")
    assert kept.name.startswith("triangles-sm_90-")
    torch.ops.load_library(kept)
    for name, count in (("count", 4), ("fill", 5), ("products", 13)):
        schema = getattr(torch.ops.fxopt_triangles, name).default._schema
        assert len(schema.arguments) == count and schema.is_mutable
        assert torch._C._dispatch_has_kernel_for_dispatch_key(schema.name, "CUDA")


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a script in the place of nvcc, which writes its last argument and notes that it was called."""
    script = tmp_path / "bin" / "nvcc"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\nfor last; do :; done\necho "$@" >> "$0.calls"\necho library > "$last"\n')
    script.chmod(0o755)
    monkeypatch.setenv("FXOPT_KERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "_nvcc", lambda: str(script))
    return script


def calls(nvcc: Path) -> int:
    return len(Path(f"{nvcc}.calls").read_text().splitlines())


def test_what_is_compiled_is_kept(nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = tmp_path / "own.cu"
    source.write_text('#include "own.h"')
    (tmp_path / "own.h").write_text("int x;")
    first = compiled.compiled(source, "sm_80")
    assert compiled.compiled(source, "sm_80") == first and calls(nvcc) == 1
    assert first.read_text() == "library\n"
    assert [each.name for each in first.parent.iterdir()] == [first.name]
    others = [compiled.compiled(source, "sm_90")]
    (tmp_path / "own.h").write_text("int y;")
    others.append(compiled.compiled(source, "sm_80"))
    monkeypatch.setattr(torch, "__version__", "9.9")
    others.append(compiled.compiled(source, "sm_80"))
    assert len({first, *others}) == calls(nvcc) == 4


def test_the_doctor_says_what_is_compiled(nvcc: Path, monkeypatch: pytest.MonkeyPatch):
    assert compiled.compiled_kernels() == f"none compiled; nvcc is {nvcc}"
    assert len(compiled.compile_all("sm_90", "sm_80")) == 2 * len(compiled.SOURCES)
    assert "triangles-sm_80, triangles-sm_90" in compiled.compiled_kernels()
    monkeypatch.setattr(compiled, "_nvcc", lambda: None)
    assert compiled.compiled_kernels().endswith("; nvcc not found (optional: kernels in CUDA C++)")


def no_compiler(nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_nvcc", lambda: None)


def broken_compiler(nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc.write_text("#!/bin/sh\necho 'a note' >&2\necho 'triangles.cu(3): error: no' >&2\nexit 2\n")


def no_program(nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc.write_text("")


def unwritable_cache(nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOPT_KERNEL_CACHE", str(nvcc / "below a file"))


def wrong_library(nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the script as it is: what it writes is no library."""


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (no_compiler, "nvcc is not on the path; install the CUDA toolkit, or run `make kernels` where it is"),
        (broken_compiler, r"nvcc does not compile triangles.cu: triangles.cu\(3\): error: no"),
        (no_program, "Exec format error"),
        (unwritable_cache, "Not a directory"),
        (wrong_library, "Could not load this library"),
    ],
)
def test_what_cannot_be_had_is_computed_by_the_reference_after_one_warning(
    nvcc: Path, fault: Any, message: str, monkeypatch: pytest.MonkeyPatch
):
    fault(nvcc, monkeypatch)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(gpu, "_broken", {})
    compiled._native.cache_clear()
    edges = OrientedGraph(torch.tensor([[0, 0, 1], [1, 2, 2]]), 3)
    compute = gpu.on_gpu("triples.cuda_kernel:triangles", "triangles", lambda *_: "reference")
    with pytest.warns(UserWarning, match=message) as noted:
        assert [compute(edges.source, edges.target, 3, 1) for _ in range(2)] == ["reference"] * 2
    assert len(noted) == 1


# -- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_nvcc
@each_graph
def test_a_gpu_lists_the_same_triangles(graph: str):
    edges, batch = GRAPHS[graph]
    found = triangles(edges.cuda(), len(batch))
    assert torch.equal(found.cpu(), triangles(edges, len(batch)))


@pytest.mark.gpu
@needs_nvcc
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_graph
def test_a_gpu_adds_up_the_same_with_gradients(graph: str, dtype: torch.dtype):
    edges, batch = GRAPHS[graph]
    edges = oriented_edges(edges, batch, 2)[0]
    torch.manual_seed(0)
    tables = [torch.randn(edges.shape[1], 33).to(dtype) for _ in range(3)]
    found = []
    for device, kind in (("cuda", dtype), ("cpu", torch.float64)):
        given = [table.to(device, kind).requires_grad_() for table in tables]
        total = sums_by_type(*given, (edges.to(device), batch.to(device), 2), CLOSED, 0, 2**20)
        found.append([total, *torch.autograd.grad(total.square().sum(), given)])
    for one, other in zip(*found, strict=True):
        scale = float(other.abs().max()) if other.numel() else 0.0
        rounding = 0.05 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(one.cpu().double(), other, rtol=0, atol=rounding * scale)
