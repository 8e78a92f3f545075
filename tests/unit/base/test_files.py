"""One owner per folder; files complete or absent."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rollout.base.files import read_yaml, writable, write_text
from rollout.base.ownership import FolderError


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: 1\nb: 2\na: 3\n", "key 'a' is there twice.*line 3, column 1"),
        ("runs:\n- {a: 1, b: 2}\n- {a: 1, a: 1}\n", "key 'a' is there twice.*line 3, column 10"),
        ("{1: a, '1': b, 1.0: c}", None),  # an integer, a text, a number
        ("one: {x: &a {<<: {k: 0, j: 1}, k: 1}}\ntwo: {<<: *a, k: 3}\n", None),
    ],
)
def test_a_key_has_one_value(tmp_path: Path, text: str, place: str | None) -> None:
    (tmp_path / "a.yaml").write_text(text)
    if place is None:
        assert read_yaml(tmp_path / "a.yaml") == yaml.safe_load(text)
        return
    with pytest.raises(yaml.YAMLError, match=place):
        read_yaml(tmp_path / "a.yaml")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match=r"file/results: cannot write here \(Not a directory\)"):
        writable(tmp_path / "file" / "results")


def test_a_new_folder_is_this_users_alone_and_one_that_is_there_stays_as_it_is(
    tmp_path: Path,
) -> None:
    (tmp_path / "shared").mkdir(mode=0o755)
    assert [writable(tmp_path / name).stat().st_mode & 0o777 for name in ("new", "shared")] == [
        0o700,
        0o755,
    ]


def test_a_write_leaves_nothing_beside_it(tmp_path: Path) -> None:
    write_text(tmp_path / "new" / "file", "text")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["file"]
    assert (tmp_path / "new" / "file").read_text() == "text"


WITHOUT_ROOM = """
import resource, sys
from pathlib import Path
from rollout.base.files import write_text
from rollout.base.ownership import owned
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
folder = Path(sys.argv[1])
for work in (lambda: owned(folder).__enter__(), lambda: write_text(folder / "file", "text")):
    try:
        work()
    except Exception as error:
        print(error)
"""


def test_what_cannot_be_written_for_want_of_room_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ROOM, tmp_path],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == [
        f"{tmp_path}/lock.json: cannot be written (File too large); make room, and run it again",
        f"[Errno 27] File too large: '{tmp_path}/file'",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock.json"]
