"""A reader who types the commands of a tutorial sees what the tutorial shows."""

import difflib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.docs.console import isolated, steps
from tests.docs.pages import REPOSITORY
from tests.docs.tables import PROGRAMS
from tests.docs.test_commands import command_of
from tests.processes import ROOT, clean_environment

TUTORIALS = sorted((REPOSITORY / "docs/tutorials").glob("*.md"))
YOUR_SCRIPT = REPOSITORY / "examples/your_script"
MOST_WORDS = 1200
MOST_S = 900.0
STEP_S = 300.0
FEWER_STEPS = {"first-run": ("1500", "1000"), "two-machines": ("1500", "500"), "your-own-script": ("5000", "1500")}
"""Steps of a page, which leave a person time to type, and of this test, which leave a rank time to restart."""
SHOWN = """
```console title="first"
$ echo "group b took 12.5 s, id 0a1b2c3d4e5f; 2 groups at 2026-11-28 01:02:03" | sed s/12.5/7/
group b took 12.5 s, id aaaa2c3d4e5f; 2 groups at 2027-01-01 02:03:04
$ for n in 10 11 12 13; do echo line $n; done
line 10
...
line 13
$ echo line 10; sleep 0.5; echo rank b/1; sleep 100
line 33
...
```

```console title="first"
...
rank b/1
```

```console
$ echo 0a1b2c3d4e5f, $(hostname)
aaaa2c3d4e5f, node-1
$ test aaaa2c3d4e5f = 0a1b2c3d4e5f && ls
examples
```
"""


def has_namespaces() -> bool:
    tools = os.geteuid() == 0 and shutil.which("unshare") and shutil.which("ip")
    return bool(tools) and subprocess.run(isolated("true"), capture_output=True, check=False).returncode == 0


needs_namespaces = pytest.mark.skipif(
    not has_namespaces(), reason="needs root that may unshare, unshare (util-linux) and ip (iproute2)"
)


def names(page: Path) -> str:
    return page.stem


def follow(page: Path, step_s: float) -> str:
    """Return the first difference between `page` and the output of its commands, or an empty string."""
    command = isolated(sys.executable, "-m", "tests.docs.console", str(page), str(step_s))
    env = clean_environment()
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=MOST_S)
    assert done.returncode == bool(done.stderr), done
    return done.stderr


@pytest.mark.slow
@pytest.mark.timeout(MOST_S + 60)
@needs_namespaces
@pytest.mark.parametrize("page", TUTORIALS, ids=names)
def test_the_output_is_that_of_the_page(page: Path, tmp_path: Path) -> None:
    if "REWRITE_DOCS" not in os.environ:
        shorter = page.read_text().replace(*FEWER_STEPS.get(page.stem, ("", "")))
        page = tmp_path / page.name
        page.write_text(shorter)
    assert follow(page, STEP_S) == ""


@needs_namespaces
@pytest.mark.parametrize(
    ("shown", "instead"),
    [
        ("", ""),
        ("; 2 groups at 2027", "; 3 groups at 2027"),
        ("rank b/1\n`", "rank b/0\n`"),
        ("line 13", "line"),
        ("line 13", "line 12"),
        ("f, node", "f,  x"),
    ],
)
def test_a_page_that_shows_something_else_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str, instead: str
) -> None:
    monkeypatch.delenv("REWRITE_DOCS", raising=False)
    page = tmp_path / "page.md"
    page.write_text(SHOWN.replace(shown, instead) if shown else SHOWN)
    report = follow(page, 3.0 if shown else 60.0)
    assert bool(report) == ("--- first\n" in report) == bool(shown), report


@pytest.mark.parametrize("page", TUTORIALS, ids=names)
def test_a_tutorial_is_short(page: Path) -> None:
    assert len(page.read_text().split()) <= MOST_WORDS


@pytest.mark.parametrize("page", TUTORIALS, ids=names)
def test_every_command_is_accepted(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTHOUSE_ADDRESS", "node-1:29510")
    typed = [re.sub(r"\$\(.*\)", "ID", step.command.replace("\\\n", " ")) for step in steps(page.read_text())]
    commands = [shlex.split(line) for line in typed if line]
    ours = [words for words in commands if words[0] in PROGRAMS]
    assert ours
    for words in ours:
        command, rest = command_of(words)
        command.make_context(" ".join(words[:2]), rest, **next(iter(PROGRAMS.values())).context_settings)


def test_the_page_explains_every_line_that_differs() -> None:
    before, after = ((YOUR_SCRIPT / name).read_text().splitlines() for name in ("before.py", "after.py"))
    differ = difflib.unified_diff(before, after, n=0, lineterm="")
    page = (REPOSITORY / "docs/tutorials/your-own-script.md").read_text()
    shown = [line for part in page.split("```diff\n")[1:] for line in part.partition("```")[0].splitlines()]
    assert Counter(shown) == Counter(line for line in differ if line[0] in "+-" and line[1:4] not in ("", "-- ", "++ "))
