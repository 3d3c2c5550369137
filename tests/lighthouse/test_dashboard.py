import dataclasses
import html
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lighthouse import dashboard
from lighthouse.run_machine import RunMachine
from lighthouse.run_record import RunRecord
from lighthouse.run_status import run_status
from lighthouse.verdict import Verdict
from protos.generation import Stop
from protos.run_status import RunStatus
from protos.session import Phase
from protos.status import JobStatus, LighthouseStatus, MemberState, MemberStatus, RankState
from tests.lighthouse.statuses import job, many, member, place, status

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --virtual-time-budget=1500 --dump-dom"
)
PAGE = dashboard.page().decode()


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str]] = []
        self.feed(PAGE)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]


def test_asks_nobody_else():
    outside = re.sub(r"http://www\.w3\.org/2000/svg", "", PAGE)
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", outside)


def test_puts_text_on_the_page_as_text():
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", PAGE)


def test_has_no_inline_attributes_that_the_policy_would_block():
    names = [name for name, _ in _Tags().attributes]
    assert not [name for name in names if name == "style" or name.startswith("on")]


def test_the_policy_allows_the_pages_own_script_and_style_and_nothing_else():
    policy = dict(part.split(" ", 1) for part in dashboard.CONTENT_SECURITY_POLICY.split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy[f"{tag}-src"])
        assert PAGE.count(f"<{tag}") == 1


def test_knows_every_state_verdict_and_field():
    for word in (*MemberState, *Verdict, *Phase):
        assert re.search(rf"\b{word.value}\b", PAGE), word
    for cls in (LighthouseStatus, JobStatus, MemberStatus):
        unknown = [f.name for f in dataclasses.fields(cls) if not re.search(rf"\.{f.name}\b", PAGE)]
        assert unknown == []


class _Site(BaseHTTPRequestHandler):
    """The page beside a /status that shows `shown`; None: 503."""

    shown: LighthouseStatus | None = None
    runs: tuple[RunStatus, ...] = ()

    def do_GET(self) -> None:
        if self.path == "/":
            self._answer(200, "text/html; charset=utf-8", dashboard.page())
        elif self.path == "/status" and self.shown is not None:
            runs = [dataclasses.asdict(run) for run in self.runs]
            shown = dataclasses.asdict(self.shown) | {"runs": runs}
            self._answer(200, "application/json", json.dumps(shown).encode())
        else:
            self._answer(503, "text/plain", b"")

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", dashboard.CONTENT_SECURITY_POLICY)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return None


@pytest.fixture
def browse(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """What the document of a real browser has become, a while after it was opened."""

    class Site(_Site):
        pass

    def browse(shown: LighthouseStatus | None, *runs: RunStatus) -> str:
        assert CHROMIUM is not None
        Site.shown, Site.runs = shown, runs
        command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={tmp_path}", f"http://127.0.0.1:{server.server_port}/"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield browse
        server.shutdown()
        thread.join()


def text(dom: str) -> str:
    visible = re.sub(r"<(script|style|template|noscript)\b.*?</\1>", "", dom, flags=re.DOTALL)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", visible)))


needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@needs_browser
def test_a_browser_shows_the_status(browse):
    members = member("a", step=9), member("late", MemberState.STRAGGLER, heartbeat_age_s=3.5, commit_failures=2)
    stragglers = "waiting_for_stragglers"
    dom = browse(status(job(*members, name="<img src=x>", verdict=stragglers, explanation="waiting <b>for</b> late")))
    seen = text(dom)
    assert "0.1.0 · up 1 h 06 m" in seen
    assert "<img src=x> waiting for stragglers standing waiting <b>for</b> late" in seen
    assert (
        "Quorum 42 Age 3 m 13 s Participants 2 of 2 Step 9 Quorums formed 3 Rounds 1234 Sessions 2 Recalls 5 Revokes 6"
        in seen
    )
    assert "late 3f2b8c1e · in the quorum straggler −2 7 8 3.5 s 2 host:29512" in seen
    assert 'class="beat number warn"' in dom
    assert "<img" not in dom


@needs_browser
def test_a_browser_shows_who_is_behind_and_where_every_rank_is(browse):
    places = (
        place("b", 1, RankState.BEHIND, is_inside=False, phase="<b>validation</b>", done=3, total=25),
        place("a", 0),
        place("b", 0, RankState.RUNNING, is_inside=False, waits_for="vote"),
        place("a", 1, RankState.RUNNING, is_inside=False, host="", pid=0),
    )
    behind = "b/1 behind in <b>validation</b> 3/25"
    shown = dataclasses.replace(job(member("a")), ranks=places, stall=behind, stall_s=63.0)
    seen = text(browse(status(shown)))
    assert f"nothing moves for 1 m 03 s: {behind}" in seen
    assert "4 ranks: 1 behind, 1 waiting, 2 running" in seen
    assert "b/1 behind, step 7, in <b>validation</b> 3/25 still 1 m 03 s, beat 0.4 s · host · pid 4711" in seen
    assert "a/0 waiting, step 7, in all_reduce still" in seen
    assert "b/0 running, step 7, waits for vote still" in seen
    assert "a/1 running, step 7 still 1 m 03 s, beat 0.4 s " in seen


@needs_browser
def test_a_browser_shows_the_runs_in_a_line_each(browse):
    run = run_status(("default", "r<1>"), RunMachine(record=RunRecord(stop=Stop("<b>enough</b>", "g", 3))), 0.0)
    seen = text(browse(status(), run))
    assert (
        "Runs default/r<1>: no generation yet, 0 ranks, 0 spares, 0 restarts, stopped, stopped: <b>enough</b>" in seen
    )


@needs_browser
def test_a_browser_shows_that_the_lighthouse_does_not_answer(browse):
    seen = text(browse(None))
    assert "No answer from the lighthouse since" in seen
    assert "HTTP 503" in seen


@needs_browser
def test_a_browser_shows_a_part_of_a_crowd_and_says_so(browse):
    dom = browse(status(job(*many(3000), member("troubled", MemberState.LAPSED))))
    assert dom.count("<tr") == 1 + 200 + 1  # the template's and the table's titles
    assert "2801 more replica groups: show more" in text(dom)
    assert text(dom).index("troubled") < text(dom).index("group0")
