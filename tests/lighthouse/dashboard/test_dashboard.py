"""The page as a document: what it may load, what it knows. In a browser: test_dashboard_browser.py."""

import dataclasses
import re
from html.parser import HTMLParser

from lighthouse import dashboard
from lighthouse.job.records import Verdict
from lighthouse_protocol.messages.incident import IncidentKind, IncidentSummary
from lighthouse_protocol.messages.progress import RankPlace, RankState
from lighthouse_protocol.messages.session import QuorumPhase
from lighthouse_protocol.messages.status import (
    JobStatus,
    LighthouseStatus,
    MemberState,
    MemberStatus,
    TimelineEntry,
    TimelineKind,
)
from tests.lighthouse.dashboard_picture import MOST_BYTES
from tests.processes import ROOT

PAGE = dashboard.page().decode()
PICTURE = ROOT / "docs" / "dashboard.png"


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(PAGE)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]


def test_asks_nobody_else():
    outside = re.sub(r"http://www\.w3\.org/2000/svg", "", PAGE).replace("^https?:", "")
    assert not re.search(r"https?://|//[a-z]+\.|@import|url\(", outside)


def test_puts_text_on_the_page_as_text():
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", PAGE)


def test_has_no_inline_attributes_that_the_policy_would_block():
    assert not [name for _, name, _ in _Tags().attributes if name == "style" or name.startswith("on")]


def test_the_policy_allows_the_pages_own_script_and_style_and_nothing_else():
    policy = dict(part.split(" ", 1) for part in dashboard.CONTENT_SECURITY_POLICY.split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert "unsafe" not in dashboard.CONTENT_SECURITY_POLICY
    for tag in ("script", "style"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy[f"{tag}-src"])
        assert PAGE.count(f"<{tag}") == 1


def test_every_control_has_a_name():
    """Of those in the document; what scripts add is looked at in the browser."""
    inputs = re.findall(r"<(?:input|select)\b[^>]*>", re.sub(r"<label\b.*?</label>", "", PAGE, flags=re.DOTALL))
    assert inputs == [tag for tag in inputs if "aria-label" in tag]
    labelled = [value for _, name, value in _Tags().attributes if name == "aria-labelledby"]
    ids = [value for _, name, value in _Tags().attributes if name == "id"]
    assert set(labelled) <= set(ids)
    assert len(set(ids)) == len(ids)


def test_knows_every_state_verdict_and_field():
    for word in (*MemberState, *RankState, *Verdict, *QuorumPhase, *TimelineKind, *IncidentKind):
        assert re.search(rf"\b{word.value}\b", PAGE), word
    for cls in (LighthouseStatus, JobStatus, MemberStatus, RankPlace, TimelineEntry, IncidentSummary):
        unknown = [f.name for f in dataclasses.fields(cls) if not re.search(rf"\b{f.name}\b", PAGE)]
        unknown = [name for name in unknown if name != "http_port"]  # the browser has come by it
        assert unknown == []


def test_its_picture_is_in_the_readme():
    assert "(docs/dashboard.png)" in (ROOT / "README.md").read_text()
    assert PICTURE.read_bytes()[:4] == b"\x89PNG"
    assert PICTURE.stat().st_size < MOST_BYTES
