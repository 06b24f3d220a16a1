"""How a page of the documentation is read and run."""

from pathlib import Path

import pytest

from support.pages import Session, blocks, missing_lines, printed_ids, with_ids

PAGE = """# A page

<!-- not run: needs a cluster -->
```sh
kubectl apply
```

1. A step:

   <!-- exit: 3 -->
   ```console
   $ false \\
     or else
   no
   ```

<!-- setup
true
-->
"""


def test_blocks_have_their_comment_and_their_indentation_is_removed(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    cluster, step, setup = blocks(tmp_path / "page.md")
    assert (cluster.key, cluster.value, cluster.is_run) == ("not run", "needs a cluster", False)
    assert (step.key, step.value, step.is_run) == ("exit", "3", True)
    assert list(step.commands()) == [("false \\\n  or else", ["no"])]
    assert (setup.language, setup.text, setup.is_run) == ("setup", "true\n", True)


@pytest.mark.parametrize(
    ("expected", "printed"),
    [
        ("took 3.5 s", "took 14 s"),
        ("run 0a1b2c3d", "run ffff0000"),
        ("a ... z", "a b z"),
        ("a  b", " a b"),
        ("(8 pairs)", "(8 pairs; the machine was uneven: a fixed kernel took 1.41 times as long at times)"),
    ],
)
def test_numbers_ids_spaces_and_a_busy_machine_are_not_compared(expected: str, printed: str) -> None:
    assert missing_lines([expected], f"first\n{printed}\n") == []


def test_a_line_that_was_not_printed_is_missing() -> None:
    assert missing_lines(["a", "b c"], "a\nb d\n") == ["b c"]


def test_an_id_of_the_page_stands_for_the_one_that_was_printed() -> None:
    page = ["waits: `approve 999b923a-3914-422e-8725-955ff897b04c`", " 82d0d4f1a2b3   native  ..."]
    printed = "x\nwaits: `approve 12ab923a-3914-422e-8725-955ff897b04c`\n 0f0f0f0f0f0f   native   3\n"
    ids = printed_ids(page, printed)
    assert with_ids("approve 999b923a-3914-422e-8725-955ff897b04c", ids).endswith(
        "12ab923a-3914-422e-8725-955ff897b04c"
    )
    assert with_ids("approve 999b923a --why 2026", ids) == "approve 12ab923a --why 2026"
    assert with_ids("records show 82d0d4", ids) == "records show 0f0f0f"


@pytest.mark.parametrize("is_isolated", [False, True])
def test_a_session_keeps_its_variables_and_says_how_a_command_ended(tmp_path: Path, is_isolated: bool) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    session = Session(folder, {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}, is_isolated=is_isolated)
    try:
        assert session.run("x=3; cd /tmp") == (0, "\n")
        assert session.run("echo $x $PWD; (exit $x)") == (3, "3 /tmp\n\n")
        session.start("X=1 sh -c 'trap \"exit 5\" TERM; echo ready; while :; do sleep 0.1; done'", "ready")
        assert session.run("kill %1; wait %1")[0] == 5
    finally:
        session.close()
