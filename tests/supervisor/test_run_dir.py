from __future__ import annotations

import os
from pathlib import Path

from tidemill.supervisor.run_dir import MIN_AGE_S, run_dir


def make_old(path: Path) -> None:
    long_ago = path.stat().st_mtime - 2 * MIN_AGE_S
    os.utime(path, (long_ago, long_ago))


def test_it_is_private_and_removed_with_all_that_is_in_it(tmp_path: Path) -> None:
    with run_dir(str(tmp_path)) as path:
        assert os.stat(path).st_mode & 0o777 == 0o700
        Path(path, "socket").touch()
    assert list(tmp_path.iterdir()) == []


def test_only_directories_without_an_owner_are_removed(tmp_path: Path) -> None:
    orphan, fresh, other = (tmp_path / n for n in ("tidemill-old", "tidemill-new", "else"))
    for each in (orphan, fresh, other):
        each.mkdir()
        (each / "ring").touch()
    make_old(orphan)
    make_old(other)
    with run_dir(str(tmp_path)) as owned:
        make_old(Path(owned))
        with run_dir(str(tmp_path)):
            left = {each.name for each in tmp_path.iterdir()}
    assert {Path(owned).name, "tidemill-new", "else"} <= left
    assert not orphan.exists()
