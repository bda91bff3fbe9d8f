"""`torch.compile(model, backend="fxopt")`, and optimized models under `torch.compile`."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt import dynamo_backend
from fxopt.dynamo_backend import compile_graph
from fxopt.errors import NothingDoneWarning

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FXOPT_MEASURE", "0")  # what is kept hangs on no busy machine
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = torch.relu(self.norm(self.conv(x)))
        return {"logits": self.head(y.view(x.shape[0], 8, -1).mean(-1)), "maps": y}


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """Note each graph that the backend rewrites."""
    found: list[nn.Module] = []
    optimize = fxopt.api.optimize

    def noted(*args: object, **options: object) -> nn.Module:
        found.append(optimize(*args, **options))
        return found[-1]

    monkeypatch.setattr(dynamo_backend.api, "optimize", noted)
    return found


def applied(model: nn.Module) -> list[str]:
    return [each.pass_name for each in fxopt.plan(model).decisions if each.status == "applied"]


def test_graphs_are_rewritten_and_parameters_stay_the_users(optimized: list[nn.Module]) -> None:
    model, x = Small().eval(), torch.randn(2, 3, 6, 6)
    compiled = torch.compile(model, backend=compile_graph)
    with torch.no_grad():
        for rows in (2, 3, 5):  # the second is captured with a free size
            torch.testing.assert_close(compiled(x.repeat(3, 1, 1, 1)[:rows]), model(x.repeat(3, 1, 1, 1)[:rows]))
        assert ["fold_batchnorm" in applied(each) for each in optimized] == [True, True]
        model.conv.weight.mul_(2)
        model.norm.running_mean.add_(1)
        torch.testing.assert_close(compiled(x), model(x))
        model.load_state_dict(Small().state_dict())
        torch.testing.assert_close(compiled(x), model(x))
        model.conv.weight = nn.Parameter(torch.randn_like(model.conv.weight))
        torch.testing.assert_close(compiled(x), model(x))


def test_models_of_one_class_are_told_apart(optimized: list[nn.Module]) -> None:
    x = torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        for number in range(6):
            model = Small().eval()
            torch.testing.assert_close(torch.compile(model, backend=compile_graph)(x), model(x))
            assert len(optimized) == min(number + 1, 4)


def test_where_gradients_may_be_asked_for_the_graph_runs_as_it_is(optimized: list[nn.Module]) -> None:
    model, other, x = Small(), Small(), torch.randn(2, 3, 6, 6)
    other.load_state_dict(model.state_dict())
    with pytest.warns(NothingDoneWarning, match=r"call the model under torch\.no_grad\(\)"):
        torch.compile(model, backend=compile_graph)(x)["logits"].sum().backward()
    other(x)["logits"].sum().backward()
    assert not optimized
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_what_cannot_be_is_refused_in_one_line() -> None:
    model = nn.ModuleList(nn.Linear(4, 2) for _ in range(8)).eval()
    ensemble = lambda x: torch.stack([each(x) for each in model])  # noqa: E731
    for wrong, reason in (
        ({"options": {"passes": "fuse_ensembles{lowering=bmm}"}}, "takes no passes that move parameters"),
        ({"options": {"fast": True}}, "has no option 'fast'; there is 'passes'"),
        ({"mode": "max-autotune"}, "has no mode 'max-autotune'"),
    ):
        with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=reason):
            torch.compile(ensemble, backend=compile_graph, **wrong)(torch.randn(3, 4))  # type: ignore[call-overload]
        torch.compiler.reset()


def test_a_failing_run_of_passes_leaves_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> nn.Module:
        raise fxopt.FxoptError("no")

    monkeypatch.setattr(dynamo_backend.api, "optimize", failing)
    model, x = Small().eval(), torch.randn(2, 3, 6, 6)
    with torch.no_grad(), pytest.warns(NothingDoneWarning, match="the graph runs as it is: no"):
        torch.testing.assert_close(torch.compile(model, backend=compile_graph)(x), model(x))


def test_torch_finds_it_by_its_name(tmp_path: Path) -> None:
    """As an installed distribution is found: by the entry points that pyproject.toml lists."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installed = tmp_path / "backend_of_fxopt-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: backend-of-fxopt\nVersion: 1\n")
    lines = [f"{name} = {value}" for name, value in project["entry-points"]["torch_dynamo_backends"].items()]
    (installed / "entry_points.txt").write_text("\n".join(["[torch_dynamo_backends]", *lines]) + "\n")
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "import torch\nmodel, x = torch.nn.Linear(3, 2), torch.ones(2, 3)\n"
        "with torch.no_grad():\n"
        "    torch.testing.assert_close(torch.compile(model, backend='fxopt')(x), model(x))\n"
        "assert 'fxopt.dynamo_backend' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_optimized_models_are_compiled_whole() -> None:
    model, x = Small().eval(), torch.randn(2, 3, 6, 6)
    fast = fxopt.optimize(model, "inference", example_inputs=x, measure=False)
    compiled = torch.compile(fast, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for rows in (2, 1):
            torch.testing.assert_close(compiled(x[:rows]), model(x[:rows]))
