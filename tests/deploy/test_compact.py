"""Compact checkpoints: pruned models in their real sizes, which plain code loads and runs."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fxopt
from fxopt.deploy.compact_configuration import ShorterLists, configuration_of, padded
from fxopt.deploy.compact_loader import load
from fxopt.errors import ArchiveError, StateError, StateWarning, UnverifiedWarning, UsageError

PRUNE = "prune{method=structured,amount=0.5}"
PLAIN = """
import sys, torch
sys.path.insert(0, sys.argv[1])
{load}
x = torch.load(sys.argv[2])
with torch.no_grad():
    out = model(x)
torch.save(getattr(out, "logits", out), sys.argv[3])
assert not any(name.partition(".")[0] == "fxopt" for name in sys.modules)
"""


class Convolutions(nn.Module):
    """Two convolutions and a layer, in plain sizes; a buffer that no state dict has, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.depthwise, self.second = nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 24, 1)
        self.head, self.other = nn.Linear(24, 8), nn.Linear(24, 8)
        self.other.weight = self.head.weight
        self.register_buffer("scale", torch.linspace(1, 2, 16).view(16, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.depthwise(self.norm(self.first(x)).relu() * self.scale).relu()
        x = self.second(x).relu().mean((2, 3))
        return self.head(x) + self.other(x)


class Written(nn.Module):
    """Has a size in its code that pruning changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu().view(-1, 32) * 2)


def pruned(model: nn.Module, x: Any, passes: str = PRUNE) -> nn.Module:
    return fxopt.optimize(model.eval(), passes, example_inputs=x, measure=False)


def small(name: str, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    settings = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{name}Config")(**{**settings, "intermediate_size": 48, **more})
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def in_another_process(load: str, x: Any, tmp_path: Path, folder: Path) -> Tensor:
    torch.save(x, tmp_path / "x.pt")
    program = PLAIN.format(load=load)
    given = [str(folder), str(tmp_path / "x.pt"), str(tmp_path / "out.pt")]
    subprocess.run([sys.executable, "-c", program, *given], check=True, cwd=tmp_path)
    return torch.load(tmp_path / "out.pt")


@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_what_was_pruned(tmp_path: Path) -> None:
    model, ids = small("Qwen3", head_dim=8, num_key_value_heads=2), torch.randint(3, 99, (2, 7))
    fast = pruned(model, {"input_ids": ids, "use_cache": False})
    fxopt.save_compact(fast, tmp_path / "compact")
    load = "from transformers import Qwen3ForCausalLM; model = Qwen3ForCausalLM.from_pretrained(sys.argv[1])"
    given = in_another_process(load, ids, tmp_path, tmp_path / "compact")
    with torch.no_grad():
        expected = fast(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6)
    sizes = [sum(parameter.numel() for parameter in each.parameters()) for each in (model, fast)]
    plain = type(model).from_pretrained(tmp_path / "compact")
    assert sum(parameter.numel() for parameter in plain.parameters()) - sizes[1] < 0.1 * (sizes[0] - sizes[1])
    assert plain.config.hidden_size < 32 and plain.config.intermediate_size < 48 and plain.config.head_dim == 8


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("Phi3", {"num_key_value_heads": 2, "pad_token_id": 0}),
        ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4}),
    ],
)
def test_tensors_of_several_parts_and_experts(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    model, ids = small(name, **more), torch.randint(3, 99, (2, 7))
    fast = pruned(model, {"input_ids": ids, "use_cache": False}, f"{PRUNE[:-1]},scope=layer,round_to=8}},inference")
    fxopt.save_compact(fast, tmp_path)
    plain = type(model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, fast(input_ids=ids, use_cache=False).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_a_family_that_scales_by_its_width_is_not_given_another(tmp_path: Path) -> None:
    model, ids = small("Gemma2", head_dim=8, num_key_value_heads=2), torch.randint(3, 99, (2, 7))
    fast = pruned(model, {"input_ids": ids, "use_cache": False})
    fxopt.save_compact(fast, tmp_path)
    assert not (tmp_path / "config.json").exists()


BLOCKS = "prune{method=structured,kinds=blocks,criterion=influence,scope=layer}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "more"),
    [("Llama", {}), ("Gemma2", {"head_dim": 8, "num_key_value_heads": 2}), ("Mixtral", {"num_key_value_heads": 2})],
)
def test_families_are_built_with_fewer_blocks(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    model, ids = small(name, **{"num_hidden_layers": 6, **more}), torch.randint(3, 99, (2, 7))
    fast = pruned(model, {"input_ids": ids, "use_cache": False}, BLOCKS)
    fxopt.save_compact(fast, tmp_path)
    plain = type(model).from_pretrained(tmp_path).eval()
    assert 1 < plain.config.num_hidden_layers < 5
    assert len(getattr(plain.config, "layer_types", None) or ()) in (0, plain.config.num_hidden_layers)
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in fast.parameters())
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, fast(input_ids=ids).logits, rtol=1e-5, atol=1e-6)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(plain.generate(ids, **options), fast.generate(ids, **options))


@pytest.mark.filterwarnings("ignore")
def test_blocks_and_then_units_are_gone_from_the_files(tmp_path: Path) -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True) for _ in range(5)
            )

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(2, 4, 16)
    fast = pruned(pruned(model, x, BLOCKS), x, f"{PRUNE[:-1]},kinds=hidden,scope=layer}}")
    fxopt.save_compact(fast, tmp_path)
    assert {name.split(".")[1] for name in load_file(tmp_path / "model.safetensors")} == {"0", "1", "2"}
    plain = load(Blocks(), tmp_path)
    assert len(plain.blocks) == 3 and plain.blocks[2].linear1.out_features == 16
    with torch.no_grad():
        torch.testing.assert_close(plain(x), fast(x), rtol=1e-5, atol=1e-6)


def test_other_models_are_loaded_by_the_function_beside_them(tmp_path: Path) -> None:
    model, x = Convolutions(), torch.randn(2, 3, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast = pruned(model, x, f"{PRUNE},inference")
    fxopt.save_compact(fast, tmp_path / "compact")
    own = Path(__file__).read_text().partition("class Convolutions")[2].partition("class Written")[0]
    (tmp_path / "compact" / "own.py").write_text(f"import torch\nfrom torch import Tensor, nn\nclass Convolutions{own}")
    load = "from own import Convolutions\nfrom compact_loader import load\nmodel = load(Convolutions())"
    given = in_another_process(load, x, tmp_path, tmp_path / "compact")
    with torch.no_grad():
        torch.testing.assert_close(given, fast(x), rtol=1e-5, atol=1e-6)
    written = load_file(tmp_path / "compact" / "model.safetensors")
    assert "other.weight" not in written  # tied
    assert sum(t.numel() for t in written.values()) < sum(p.numel() for p in model.parameters())
    assert (
        written["second.weight"].shape[0] < 24 and written["scale"].shape == written["first.bias"].view(-1, 1, 1).shape
    )


def test_code_that_cannot_run_in_the_sizes_left_is_refused(tmp_path: Path) -> None:
    fast = pruned(Written(), torch.randn(4, 8))
    with pytest.raises(ArchiveError, match=r"does not run with the sizes that are left.*fxopt\.save keeps"):
        fxopt.save_compact(fast, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore")
def test_what_is_not_pruned_or_cannot_be_written_is_refused(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    with pytest.raises(StateError, match="was not optimized"):
        fxopt.save_compact(Convolutions(), tmp_path)
    with pytest.raises(UsageError, match="nothing was cut"):
        fxopt.save_compact(pruned(Convolutions(), x, "fold_batchnorm"), tmp_path)
    layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    quantized = pruned(layers, torch.randn(4, 64), f"{PRUNE},quantize")
    with pytest.raises(UsageError, match="quantized"):
        fxopt.save_compact(quantized, tmp_path)
    fast = pruned(Convolutions(), x)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        fxopt.save_compact(fast, tmp_path / "file")
    with pytest.raises(UsageError, match="folder"):
        fxopt.save_compact(fast, 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArchiveError, match="meta device"):
        fxopt.save_compact(fast.to("meta"), tmp_path)


def test_nothing_is_compared_without_a_form_of_calls(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    plan = fxopt.plan(pruned(Convolutions(), x))
    fast = fxopt.optimize(Convolutions().eval(), plan=plan)
    with pytest.warns(UnverifiedWarning, match="was not compared"):
        fxopt.save_compact(fast, tmp_path)


def test_a_plain_state_dict_says_what_to_call_instead(tmp_path: Path) -> None:
    model, ids = small("Qwen3", head_dim=8, num_key_value_heads=2), torch.randint(3, 99, (2, 7))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fast: Any = pruned(model, {"input_ids": ids, "use_cache": False})
    with pytest.warns(StateWarning, match=r"something else with it; fxopt.save_compact\(model, folder\) writes"):
        fast.save_pretrained(tmp_path)


def test_padding_goes_behind_each_part() -> None:
    tensor = torch.arange(1.0, 5.0)
    assert padded(tensor, torch.Size([6]), 1).tolist() == [1, 2, 3, 4, 0, 0]
    assert padded(tensor, torch.Size([6]), 2).tolist() == [1, 2, 0, 3, 4, 0]


def test_a_configuration_without_fields_for_it_is_none() -> None:
    model = small("Llama")
    wanted = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert configuration_of(type(model), model.config, wanted, ShorterLists({})) is None
    assert configuration_of(type(model), model.config, {"other": torch.Size([1])}, ShorterLists({})) is None
