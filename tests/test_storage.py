from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from fxopt.storage import atomic_file, write_atomically


def test_writes_text_and_bytes(tmp_path: Path):
    write_atomically(tmp_path / "a", "grün")
    write_atomically(str(tmp_path / "b"), b"\x00")
    assert (tmp_path / "a").read_bytes() == "grün".encode()
    assert (tmp_path / "b").read_bytes() == b"\x00"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    target = tmp_path / "a"
    target.write_text("old")

    def interrupted() -> None:
        with atomic_file(target) as file:
            file.write(b"half of the ne")
            file.flush()
            assert target.read_text() == "old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_link_is_followed(tmp_path: Path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_atomically(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_new_files_have_the_usual_rights(tmp_path: Path):
    (tmp_path / "plain").touch()
    write_atomically(tmp_path / "a", "")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_replaced_files_keep_their_rights(tmp_path: Path):
    (tmp_path / "a").write_text("old")
    for rights in (0o600, 0o640, 0o666):
        (tmp_path / "a").chmod(rights)
        with atomic_file(tmp_path / "a") as file:
            assert stat.S_IMODE(Path(file.name).stat().st_mode) == rights
        assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == rights


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_what_is_no_file_is_not_replaced(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        write_atomically(tmp_path / "pipe", "new")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="loop"):
        write_atomically(tmp_path / "loop", "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loop", "pipe"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path):
    (tmp_path / "a").write_text("old")

    def full() -> None:
        with atomic_file(tmp_path / "a") as file:
            file.write(b"new")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        full()
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_errors_name_the_file_that_was_asked_for(tmp_path: Path):
    with pytest.raises(FileNotFoundError) as caught:
        write_atomically(tmp_path / "absent" / "a", "")
    assert caught.value.filename == str(tmp_path / "absent" / "a")


def test_a_name_of_greatest_length(tmp_path: Path):
    write_atomically(tmp_path / ("x" * 255), "new")
    assert (tmp_path / ("x" * 255)).read_text() == "new"
    write_atomically(tmp_path / ("\u20ac" * 85), "new")
    assert (tmp_path / ("\u20ac" * 85)).read_text() == "new"


def test_no_such_folder_and_a_folder_in_the_way(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "absent" / "a", "")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_atomically(tmp_path / "folder", "")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
