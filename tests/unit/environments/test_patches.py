"""Patches as models write them: parsed, applied and refused."""

from __future__ import annotations

import pytest

from rollout.environments.patches import BadPatch, Edit, apply_patch, parse_patch

FILES = {"pkg/a.py": "one\ntwo\nthree\ntwo\nfive\n", "b.txt": "x\n"}
BLOCK = "pkg/a.py\n<<<<<<< SEARCH\nthree\n=======\n3\n3.5\n>>>>>>> REPLACE"
DIFF = """Here:
```diff
diff --git a/pkg/a.py b/pkg/a.py
index 1..2 100644
--- a/pkg/a.py
+++ b/pkg/a.py
@@ -1,3 +1,4 @@ def f():
 one
+one and a half
 two
 three
@@ -4,2 +5,1 @@
-two
 five
--- /dev/null
+++ b/new/c.py
@@ -0,0 +1,2 @@
+import a
+
\\ No newline at end of file
```
That should do.
"""


def patched(text: str) -> dict[str, str]:
    return apply_patch(FILES, parse_patch(text))


def test_blocks_replace_lines_that_occur_once() -> None:
    assert parse_patch(BLOCK) == [Edit(path="pkg/a.py", old=("three",), new=("3", "3.5"))]
    assert patched(f"I change it.\n\n{BLOCK}\n")["pkg/a.py"] == "one\ntwo\n3\n3.5\ntwo\nfive\n"
    emptied = "b.txt\n```\n<<<<<<< SEARCH\nx\n=======\n>>>>>>> REPLACE\n```\n"
    assert patched(f"<think>{BLOCK}</think>\n{emptied}") == {**FILES, "b.txt": ""}
    new = "d.py\n<<<<<<< SEARCH\n=======\npass\n>>>>>>> REPLACE"
    assert patched(f"{BLOCK}\n\n{new}")["d.py"] == "pass\n"


def test_a_block_without_a_path_is_not_left_out() -> None:
    for path in ("", "**b.txt**\n"):
        second = f"{path}<<<<<<< SEARCH\nx\n=======\ny\n>>>>>>> REPLACE"
        with pytest.raises(BadPatch, match="write the path of its file alone in the line above"):
            parse_patch(f"{BLOCK}\n{second}")


def test_only_diffs_have_prefixes_before_their_paths() -> None:
    block = parse_patch("a/core.py\n<<<<<<< SEARCH\n=======\npass\n>>>>>>> REPLACE")
    assert [edit.path for edit in block] == ["a/core.py"]
    diff = parse_patch('--- /dev/null\n+++ "b/a/core.py"\n@@ -0,0 +1 @@\n+pass\n')
    assert [edit.path for edit in diff] == ["a/core.py"]


def test_files_keep_their_line_ends_and_form_feeds() -> None:
    files = {"a.py": "one\r\ntwo\r\n", "b.py": "\x0cone\ntwo\x0b\nthree\n"}
    first = parse_patch("a.py\n<<<<<<< SEARCH\ntwo\n=======\n2\n3\n>>>>>>> REPLACE")
    assert apply_patch(files, first)["a.py"] == "one\r\n2\r\n3\r\n"
    second = parse_patch("b.py\n<<<<<<< SEARCH\nthree\n=======\n3\n>>>>>>> REPLACE")
    assert apply_patch(files, second)["b.py"] == "\x0cone\ntwo\x0b\n3\n"
    diff = parse_patch("--- a/a.py\r\n+++ b/a.py\r\n@@ -1 +1 @@\r\n-one\r\n+1\r\n")
    assert apply_patch(files, diff)["a.py"] == "1\r\ntwo\r\n"


def test_a_unified_diff_is_applied_hunk_by_hunk() -> None:
    files = patched(DIFF)
    assert files["pkg/a.py"] == "one\none and a half\ntwo\nthree\nfive\n"
    assert files["new/c.py"] == "import a\n\n"
    assert files["b.txt"] == FILES["b.txt"]


def test_a_hunk_with_a_wrong_line_number_replaces_lines_that_occur_once() -> None:
    moved = "--- a/pkg/a.py\n+++ b/pkg/a.py\n@@ -90,9 +1,1 @@\n three\n-two\n"
    assert patched(moved)["pkg/a.py"] == "one\ntwo\nthree\nfive\n"
    insert = "--- a/b.txt\n+++ b/b.txt\n@@ -1,0 +2 @@\n+y\n"
    assert patched(insert)["b.txt"] == "x\ny\n"
    gone = "--- a/b.txt\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
    assert patched(gone)["b.txt"] == ""


def test_lines_are_inserted_at_the_beginning_of_a_file() -> None:
    # as `git diff -U0` writes it
    insert = "--- a/b.txt\n+++ b/b.txt\n@@ -0,0 +1 @@\n+w\n"
    assert patched(insert)["b.txt"] == "w\nx\n"
    two_hunks = "--- a/pkg/a.py\n+++ b/pkg/a.py\n@@ -0,0 +1 @@\n+zero\n@@ -3 +4 @@\n-three\n+3\n"
    assert patched(two_hunks)["pkg/a.py"] == "zero\none\ntwo\n3\ntwo\nfive\n"


def test_hunks_further_down_do_not_move_lines_that_are_inserted_after_them() -> None:
    head = "--- a/pkg/a.py\n+++ b/pkg/a.py\n"
    downwards = f"{head}@@ -1,0 +2 @@\n+new\n@@ -4,2 +5,0 @@\n-two\n-five\n"
    upwards = f"{head}@@ -4,2 +5,0 @@\n-two\n-five\n@@ -1,0 +2 @@\n+new\n"
    assert patched(downwards)["pkg/a.py"] == "one\nnew\ntwo\nthree\n"
    assert patched(upwards)["pkg/a.py"] == "one\nnew\ntwo\nthree\n"


def test_changed_lines_that_look_like_names_of_files_are_part_of_a_hunk() -> None:
    files = {"q.sql": "-- old\nselect 1\n"}
    comment = (
        "--- a/q.sql\n+++ b/q.sql\n@@ -1,2 +1,3 @@\n--- old\n+-- new\n select 1\n+++ 2\n"
        "--- /dev/null\n+++ b/new.sql\n@@ -0,0 +1 @@\n+-- only\n"
    )
    changed = apply_patch(files, parse_patch(comment))
    assert changed == {"q.sql": "-- new\nselect 1\n++ 2\n", "new.sql": "-- only\n"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no idea", "There is no patch"),
        (BLOCK.replace("REPLACE", ""), "There is no patch"),
        (
            BLOCK.replace("three", "four"),
            r"pkg/a\.py: the lines to replace, from 'four' on, are not there",
        ),
        (BLOCK.replace("three", "two"), "stand there 2 times"),
        (BLOCK.replace("pkg/a.py", "pkg/z.py"), r"There is no file pkg/z\.py"),
        (BLOCK.replace("pkg/a.py", "../a.py"), r"\.\./a\.py is no path within the repository"),
        (BLOCK.replace("pkg/a.py", "/etc/passwd"), "/etc/passwd is no path"),
        (BLOCK.replace("three\n", ""), r"pkg/a\.py is not empty"),
        ("@@ -1 +1 @@\n-one\n+1\n", "comes before the line"),
        (
            "--- a/b.txt\n+++ b/b.txt\n@@ -1 +1 @@\n-x\n+y\n@@ ... @@\n-c\n+d\n",
            r"The hunk header '@@ \.\.\. @@' has no line numbers",
        ),
    ],
)
def test_a_patch_that_does_not_fit_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(BadPatch, match=message):
        patched(text)
