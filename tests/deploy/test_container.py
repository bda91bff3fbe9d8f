from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxopt.deploy.container import FORMAT, SCHEMA_VERSION, read_container, read_json, write_container
from fxopt.errors import ArchiveError

MEMBERS = {"plan.json": b"{}", "weights": bytes(range(256))}


def sums(members: Mapping[str, bytes]) -> dict[str, Any]:
    return {name: {"size": len(d), "sha256": hashlib.sha256(d).hexdigest()} for name, d in members.items()}


def by_hand(
    path: Path, entries: list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED, **manifest: Any
) -> Path:
    """Write a container as someone else might."""
    head = {"format": FORMAT, "schema_version": SCHEMA_VERSION, "files": sums(dict(entries)), **manifest}
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("manifest.json", json.dumps(head))
        for name, data in entries:
            archive.writestr(name, data)
    return path


def problem(path: Path) -> str:
    with pytest.raises(ArchiveError) as caught:
        read_container(path, tuple(MEMBERS))
    assert str(path) in str(caught.value)
    assert caught.value.exit_code == 3
    return str(caught.value)


def test_what_is_written_is_read(tmp_path: Path):
    write_container(tmp_path / "a", {"kind": "recipe"}, MEMBERS)
    manifest, members = read_container(tmp_path / "a", tuple(MEMBERS))
    assert members == MEMBERS
    assert manifest["kind"] == "recipe"


def test_equal_content_makes_equal_files(tmp_path: Path):
    write_container(tmp_path / "a", {}, MEMBERS)
    write_container(tmp_path / "b", {}, MEMBERS)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_hand_written_one_is_read(tmp_path: Path):
    read_container(by_hand(tmp_path / "a", [*MEMBERS.items()]), tuple(MEMBERS))


def test_absent_empty_and_foreign_files(tmp_path: Path):
    assert "No such file" in problem(tmp_path / "absent")
    (tmp_path / "empty").touch()
    assert "not a readable fxopt archive" in problem(tmp_path / "empty")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("data.pkl", b"")
    assert "it has no manifest.json" in problem(tmp_path / "other.zip")


def test_a_newer_one_is_refused_by_name_whatever_it_holds(tmp_path: Path):
    by_hand(tmp_path / "a", [("novel", b"")], schema_version=SCHEMA_VERSION + 1, fxopt="9.0")
    assert f"has format {SCHEMA_VERSION + 1}, written by fxopt 9.0" in problem(tmp_path / "a")


@pytest.mark.parametrize("version", [None, "1", 1.0, True, 0, -1])
def test_a_version_that_is_none(tmp_path: Path, version: object):
    by_hand(tmp_path / "a", [*MEMBERS.items()], schema_version=version)
    assert "says neither format nor version" in problem(tmp_path / "a")


@pytest.mark.parametrize("name", ["/etc/passwd", "../up", "a/../../up", "C:\\up", "extra", "folder/"])
def test_any_other_name_is_refused(tmp_path: Path, name: str):
    by_hand(tmp_path / "a", [*MEMBERS.items(), (name, b"")])
    assert "unexpected member" in problem(tmp_path / "a")


def test_a_missing_member(tmp_path: Path):
    by_hand(tmp_path / "a", [("weights", b"")])
    assert "it has no plan.json" in problem(tmp_path / "a")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_doubled_name(tmp_path: Path):
    by_hand(tmp_path / "a", [*MEMBERS.items(), ("weights", b"others")])
    assert "two members of one name" in problem(tmp_path / "a")


def test_a_compressed_bomb_is_never_opened(tmp_path: Path):
    by_hand(tmp_path / "a", [("plan.json", b"{}"), ("weights", bytes(10**7))], zipfile.ZIP_DEFLATED)
    assert "is compressed or encrypted" in problem(tmp_path / "a")


def test_overlapping_members_cannot_claim_more_than_the_file_has(tmp_path: Path):
    write_container(tmp_path / "a", {}, MEMBERS)
    with zipfile.ZipFile(tmp_path / "a", "a") as archive:
        for info in archive.infolist():
            if info.filename == "weights":
                info.file_size = info.compress_size = 10**6
        archive.comment = b"rewrites the directory"
    assert "claim more bytes than the file has" in problem(tmp_path / "a")


def test_a_wrong_checksum(tmp_path: Path):
    by_hand(tmp_path / "a", [*MEMBERS.items()], files=sums({**MEMBERS, "weights": b"others"}))
    assert "the checksum of weights does not match" in problem(tmp_path / "a")
    by_hand(tmp_path / "a", [*MEMBERS.items()], files=[])
    assert "the checksum of plan.json does not match" in problem(tmp_path / "a")


@pytest.mark.parametrize("data", [b"", b"[1]", b"{", b"\xff", b"[" * 200_000])
def test_json_that_is_none(tmp_path: Path, data: bytes):
    with pytest.raises(ArchiveError, match="is not"):
        read_json(tmp_path, "plan.json", data)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("container") / "intact"
    write_container(path, {"kind": "recipe"}, MEMBERS)
    return path


@given(data=st.data())
def test_no_damage_passes_unnoticed_in_a_member(intact: Path, data: st.DataObject):
    content = bytearray(intact.read_bytes())
    at = content.index(MEMBERS["weights"]) + data.draw(st.integers(0, 255))
    content[at] ^= data.draw(st.integers(1, 255))
    damaged = intact.with_name("damaged")
    damaged.write_bytes(content)
    problem(damaged)


@given(at=st.integers(0, 5000), bits=st.integers(1, 255))
def test_damage_anywhere_is_an_archive_error_or_harmless(intact: Path, at: int, bits: int):
    content = bytearray(intact.read_bytes())
    content[at % len(content)] ^= bits
    damaged = intact.with_name("flipped")
    damaged.write_bytes(content)
    try:
        members = read_container(damaged, tuple(MEMBERS))[1]
    except ArchiveError:
        return
    assert members == MEMBERS


@given(length=st.integers(0, 5000))
def test_a_cut_file_is_refused(intact: Path, length: int):
    content = intact.read_bytes()
    cut = intact.with_name("cut")
    cut.write_bytes(content[: length % len(content)])
    problem(cut)
