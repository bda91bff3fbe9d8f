"""Files damaged at random, whole and inside, are read rightly or refused in one line, with little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.shares import later

WORKER = '''
"""Damage files over and over, load each, and print how it went."""

import contextlib
import copy
import hashlib
import io
import json
import random
import resource
import sys
import warnings
import zipfile
from collections import Counter
from pathlib import Path

import torch
from torch import nn

import fxopt

warnings.simplefilter("ignore")
kind, seed, rounds, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
STRANGE = [
    None, True, False, -1, 0, 2**63, 10**30, 1e308, "", "x.y", "self", "__class__", "training",
    "a\\nb", [], {}, [[]], {"node": 0}, {"tuple": [1]}, {"as_int": -1}, {"as_int": 2**62}, "Pow(s0, s0)", ["x"] * 50,
]


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)) for _ in range(2))
        self.heads[1][0].weight = self.heads[0][0].weight
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x):
        return sum(head(x) for head in self.heads) * self.scale + x.shape[0]


def written():
    torch.manual_seed(0)
    model, path = Small().eval(), folder / f"intact-{kind}-{seed}.pt2"
    if kind == "pt2":
        fxopt.export(model, path, (X,))
    else:
        fxopt.save(fxopt.optimize(model, "inference", example_inputs=(X,), measure=False), path)
    return path


def loaded(path):
    return fxopt.load(path, **({"model": Small().eval()} if kind == "recipe" else {}))


def flipped(content, draw):
    damaged = bytearray(content)
    for _ in range(draw.choice((1, 1, 4, 40))):
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
    return bytes(damaged)


def moved(content, draw):
    """Cut a piece out, double it, or overwrite it with another."""
    a, b, c = sorted(draw.randrange(len(content)) for _ in range(3))
    return draw.choice((content[:a] + content[b:], content[:b] + content[a:], content[:a] + content[b:c] + content[c:]))


def spoiled(value, draw):
    """Replace or remove something somewhere inside a JSON value."""
    while isinstance(value, (dict, list)) and value:
        key = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if isinstance(value[key], (dict, list)) and value[key] and draw.random() < 0.9:
            value = value[key]
        elif draw.random() < 0.2:
            value.pop(key)
            return
        else:
            value[key] = copy.deepcopy(draw.choice(STRANGE))
            return


def edited(content, draw):
    """Spoil what a member says, and make the checksums right again."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = draw.choice([name for name in members if not name.endswith("id")])
    if name.endswith(".json"):
        value = json.loads(members[name])
        for _ in range(draw.choice((1, 1, 3))):
            spoiled(value, draw)
        members[name] = json.dumps(value).encode()
    else:
        members[name] = flipped(members[name], draw)
    with contextlib.suppress(KeyError, TypeError, AttributeError, ValueError):
        manifest = json.loads(members["manifest.json"])
        for entry, data in members.items():
            if entry in manifest["files"]:
                manifest["files"][entry] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        members["manifest.json"] = json.dumps(manifest).encode()
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for entry, data in members.items():
            archive.writestr(entry, data)
    return target.getvalue()


def outcome(path, damage, expected):
    try:
        model = loaded(path)
    except fxopt.FxoptError as error:
        lines = str(error).splitlines()
        return "refused" if error.exit_code == 3 and len(lines) == 1 else f"{type(error).__name__}: {error!r}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]!r}"
    if damage is edited or kind == "pt2":  # no checksum tells that it is another model
        return "read"
    return "read" if torch.equal(model(X), expected) else "wrong"


def main():
    content, draw = written().read_bytes(), random.Random(seed)
    expected, counts = loaded(folder / f"intact-{kind}-{seed}.pt2")(X), Counter()
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path = folder / f"damaged-{kind}-{seed}.pt2"
    with open("/proc/self/statm") as statm:
        address_space = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (address_space + 2**30,) * 2)
    for number in range(rounds):
        damage = (flipped, moved, edited, edited)[number % 4]
        path.write_bytes(damage(content, draw))
        found = outcome(path, damage, expected)
        if found not in ("read", "refused"):
            (folder / f"bad-{kind}-{seed}-{number}.pt2").write_bytes(path.read_bytes())
        counts[found] += 1
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used
    print(json.dumps({"counts": counts, "grown": grown * 1024}))


main()
'''


@pytest.mark.slow
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="limits of memory are told and set otherwise elsewhere"
)
@pytest.mark.parametrize(("kind", "rounds"), [("recipe", 20), ("pt2", 20), later(("recipe", 80)), later(("pt2", 80))])
def test_damaged_files_are_read_rightly_or_refused(kind: str, rounds: int, tmp_path: Path):
    command = [sys.executable, "-c", WORKER, kind, "0", str(rounds), str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0, finished.stderr[-2000:]
    result = json.loads(finished.stdout.splitlines()[-1])
    assert set(result["counts"]) == {"read", "refused"}, result
    assert result["counts"]["refused"] > rounds / 2
    assert result["grown"] < 200 * 2**20
