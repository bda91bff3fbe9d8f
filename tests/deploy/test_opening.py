from __future__ import annotations

import io
import pickle
import sys
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxopt
from fxopt.deploy.opening import FileKind, kind_of_file
from fxopt.errors import ArchiveError, InputError

SOURCE = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 2))
"""


pytestmark = pytest.mark.usefixtures("zoo")


class Bomb:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_the_content_tells_the_kind_whatever_the_name(zoo: Any, tmp_path: Path):
    model = fxopt.optimize(zoo.Net(), [], example_inputs=(torch.randn(2, 3),))
    fxopt.save(model, tmp_path / "a.pt2")
    with pytest.warns(UserWarning, match=r"'b\.pkl' is written in the format of \.pt2 files, .*name it 'b\.pt2'"):
        fxopt.export(model, tmp_path / "b.pkl", (torch.randn(2, 3),))
    torch.save(zoo.Net(), tmp_path / "c.fxopt")
    (tmp_path / "d").write_bytes(pickle.dumps(zoo.Net()))
    torch.save(zoo.Net(), tmp_path / "e", _use_new_zipfile_serialization=False)
    kinds = [kind_of_file(tmp_path / name) for name in ("a.pt2", "b.pkl", "c.fxopt", "d", "e")]
    assert kinds == [FileKind.RECIPE, FileKind.EXPORTED, FileKind.PICKLE, FileKind.PICKLE, FileKind.PICKLE]


def test_what_is_no_model_is_refused(tmp_path: Path):
    files = {"text": b"hello", "empty": b"", "zip": b"PK", "dir.zip": zipped({"readme": b""})}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ArchiveError, match=r"is not (a readable|an) fxopt archive"):
            fxopt.load(tmp_path / name)
    with pytest.raises(ArchiveError, match="No such file"):
        fxopt.load(tmp_path / "absent")
    with pytest.raises(ArchiveError, match="is not a readable fxopt archive"):
        fxopt.load(tmp_path)


def zipped(entries: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return buffer.getvalue()


@pytest.mark.parametrize("trust", [(), "zoo", ["zoo", "torch"], False])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_runs_only_when_the_file_is_trusted(trust: Any, legacy: bool, tmp_path: Path):
    torch.save(Bomb(tmp_path / "ran"), tmp_path / "m.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(ArchiveError, match=r"is a pickle, which can run any code .* pass trust=True \(--trust all"):
        fxopt.load(tmp_path / "m.pt", trust=trust)
    assert not (tmp_path / "ran").exists()


def test_a_trusted_pickle_gives_the_model(zoo: Any, tmp_path: Path):
    model = zoo.Net()
    torch.save(model, tmp_path / "m.pt")
    loaded = fxopt.load(tmp_path / "m.pt", trust=True)
    assert type(loaded) is zoo.Net
    x = torch.randn(2, 3)
    assert torch.equal(loaded(x), model(x))


def test_a_trusted_pickle_of_something_else(zoo: Any, tmp_path: Path):
    torch.save(zoo.Net().state_dict(), tmp_path / "weights.pt")
    with pytest.raises(InputError, match=r"holds a OrderedDict, expected a torch\.nn\.Module"):
        fxopt.load(tmp_path / "weights.pt", trust=True)
    torch.save(zoo.Net(), tmp_path / "m.pt")
    sys.modules.pop("zoo")
    (tmp_path / "zoo.py").unlink()
    with pytest.raises(ArchiveError, match="cannot be unpickled: ModuleNotFoundError"):
        fxopt.load(tmp_path / "m.pt", trust=True)
    (tmp_path / "cut.pt").write_bytes((tmp_path / "weights.pt").read_bytes()[:100])
    with pytest.raises(ArchiveError):
        fxopt.load(tmp_path / "cut.pt", trust=True)


def test_trusting_a_file_altogether_trusts_its_factory(zoo: Any, tmp_path: Path):
    fxopt.save(fxopt.optimize(zoo.Net(), [], example_inputs=(torch.randn(2, 3),)), tmp_path / "m", factory="zoo:Net")
    with pytest.raises(ArchiveError, match="would import and call 'zoo:Net'"):
        fxopt.load(tmp_path / "m", trust=False)
    assert isinstance(fxopt.load(tmp_path / "m", trust=True), zoo.Net)


def test_torchscript_is_told_apart(tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "m.pt")
    with pytest.raises(ArchiveError, match="is a TorchScript file"):
        fxopt.load(tmp_path / "m.pt", trust=True)
