"""The page in a real browser, over the lighthouse's own HTTP side: what is seen, what is touched, what a click does."""

import dataclasses
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from lighthouse.runs.rules.machine import RunMachine
from lighthouse.runs.rules.record import RunRecord
from lighthouse.runs.rules.status import run_status
from lighthouse_protocol.messages.incident import IncidentKind, IncidentSummary
from lighthouse_protocol.messages.run import RunStopped
from lighthouse_protocol.messages.status import JobStatus, MemberState, RankState, TimelineEntry, TimelineKind
from lighthouse_protocol.refusals import Unreachable
from lighthouse_runtime.server import rpc_handler
from lighthouse_runtime.server.control_policy import ControlPolicy
from lighthouse_runtime.web.control import KillOrder
from tests.chromium import Chromium, Page, needs_browser, pictures
from tests.lighthouse.fake_lighthouse import FakeLighthouse
from tests.lighthouse.statuses import job, many, member, place, run_of, status

pytestmark = [needs_browser, pytest.mark.asyncio(loop_scope="module")]

MARKUP = "<img src=x>"

NAMELESS_BUTTONS = """
[...document.querySelectorAll('button')].filter(b => b.checkVisibility() && !b.textContent && !b.ariaLabel).length
"""

# WCAG 2.2, 1.4.3: text has a contrast of at least 4.5 with what is behind it.
POOR_CONTRASTS = """
(() => {
  const channels = text => text.match(/[0-9.]+/g).map(Number);
  const linear = c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map(c => linear(c / 255))
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const found = channels(getComputedStyle(node).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const poor = new Set();
  for (const node of document.querySelectorAll('body *')) {
    const text = [...node.childNodes].filter(n => n.nodeType === 3).map(n => n.data.trim()).join('');
    if (!text || !node.checkVisibility() || node.closest('script, style, template, noscript, .skip')) continue;
    const [a, b] = [light(channels(getComputedStyle(node).color)), light(behind(node))].sort((a, b) => b - a);
    if ((a + .05) / (b + .05) < 4.5) poor.add(`${text}: ${((a + .05) / (b + .05)).toFixed(2)}`);
  }
  return [...poor];
})()
"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Chromium]:
    async with Chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="module")
async def lighthouse() -> AsyncIterator[FakeLighthouse]:
    async with FakeLighthouse() as lighthouse:
        yield lighthouse


async def shown(page: Page, updates: int = 1) -> str:
    """The text, once so many more updates are on the page."""
    await page.until("control.csrf")
    await page.until(f"(window.upto ??= lighthouseFigures.updates + {updates}) <= lighthouseFigures.updates")
    await page.run("delete window.upto")
    return await page.text()


def troubled() -> JobStatus:
    """Rank b/1 is behind; c is lost."""
    members = (
        member("a", step=9),
        member("b", MemberState.STRAGGLER, heartbeat_age_s=3.5, commit_failures=2),
        member("c", MemberState.EXPIRED, step=3, heartbeat_age_s=33.0, is_participant=False),
    )
    ranks = (
        place("b", 1, RankState.BEHIND, is_inside=False, phase="<b>validation</b>", done=3, total=25, host="node7"),
        place("a", 0, host="node1"),
        place("b", 0, RankState.RUNNING, is_inside=False, waits_for="vote", progress_age_s=1.0),
        place("a", 1, RankState.RUNNING, is_inside=False, host="", pid=0, progress_age_s=1.0),
    )
    now = time.time()
    timeline = (
        TimelineEntry(now - 50, TimelineKind.JOINED, ("a", "b"), 14, ""),
        TimelineEntry(now - 30, TimelineKind.LOST, ("c",), 0, "its connection <i>has</i> ended"),
    )
    stalls = IncidentSummary(
        "20261122-101501", "default", IncidentKind.STALL, f"b/1 behind {MARKUP}", ("b/1",), now, 61.0, 61.5
    )
    loss = IncidentSummary("20261122-100312", "default", IncidentKind.LOSS, "c was lost", ("c",), now - 30, 0.02)
    loss = dataclasses.replace(loss, quorum_s=0.9, quorum_id=42, step_s=1.7, over_s=1.7)
    made = job(*members, name=MARKUP, verdict="waiting_for_stragglers", explanation="waiting <b>for</b> b")
    stall = "b/1 behind in <b>validation</b> 3/25"
    return dataclasses.replace(
        made, ranks=ranks, stall=stall, stall_s=63.0, timeline=timeline, incidents=(stalls, loss)
    )


async def test_shows_the_quorum_groups_ranks_incidents_and_what_happened(browser: Chromium, lighthouse: FakeLighthouse):
    lighthouse.shown = status(troubled())
    async with browser.page(lighthouse.url) as page:
        seen = await shown(page)
        assert "0.1.0 · up 1 h 06 m live" in seen
        assert f"{MARKUP} waiting for stragglers standing waiting <b>for</b> b" in seen
        assert "Nothing moves for 1 m 03 s: b/1 behind in <b>validation</b> 3/25" in seen
        figures = "Quorum 42 Age 3 m 13 s Participants 2 of 3 Step 9 Ranks 4 1 behind, 1 waiting"
        assert f"{figures} Quorums formed 3 Rounds 1234 Sessions 3 Recalls 5 Revokes 6" in seen
        assert "b 8 ranks · host:29512 · 3f2b8c1e straggler" in seen
        assert "1 rank behind −2 7 3.5 s 1 m 03 s 2 Kill" in seen
        assert "rank 1 node7 · pid 4711 behind <b>validation</b> 3/25 7 0.4 s 1 m 03 s" in seen
        assert "rank 0 node1 · pid 4711 waiting step in all_reduce 7 0.4 s 1 m 03 s" in seen
        assert "running step waits for vote 7 0.4 s 1.0 s" in seen
        assert re.search(r"lost c its connection <i>has</i> ended \d\d:\d\d:\d\d joined a, b and 14 more", seen)
        assert f"Evidence b/1 behind {MARKUP} after the fault: noticed 1 m 01 s evidence 1 m 01 s" in seen
        assert "c was lost after the fault: noticed 20 ms quorum (42) 900 ms first step 1.7 s over 1.7 s" in seen
        assert await page.run("document.querySelectorAll('img').length") == 0
        assert page.errors == []
        assert {url.removeprefix(lighthouse.url) for url in page.requests if not url.startswith("data:")} == {
            "", "events", "control",
        }  # fmt: skip


async def test_shows_ranks_of_runs_beside_those_of_groups(browser: Chromium, lighthouse: FakeLighthouse):
    ranks = (
        place("r", 1, RankState.BEHIND, is_inside=False, step=6, generation=3),
        place("r", 0, RankState.RUNNING, is_inside=False, generation=3),
        place("r", 2, RankState.SPARE, is_inside=False, step=0, progress_age_s=0.4, pid=4713),
    )
    alone = job(quorum_id=0, verdict="no_joins", phase="none")
    run = run_of("active", "active", "spare")
    lighthouse.shown = status(dataclasses.replace(alone, ranks=ranks), runs=(run,))
    async with browser.page(lighthouse.url) as page:
        seen = await shown(page)
        assert "default stands its generation trains" in seen
        assert "Generation 3 Active 2 Spares 1 Step 7 Ranks 3 1 behind Restarts 2" in seen
        assert "r 3 ranks stands step 1 rank behind 3 7 0.4 s 1 m 03 s" in seen
        assert "slot 1 host · pid 4711 behind step 3 6 0.4 s 1 m 03 s" in seen
        assert "slot 2 host · pid 4713 spare step 0 0.4 s 0.4 s" in seen
        assert "Kill" not in seen
        lighthouse.shown = status(dataclasses.replace(troubled(), job="default"))
        assert " Gen " not in await shown(page, updates=2)
        assert page.errors == []


async def test_what_has_not_changed_is_not_touched(browser: Chromium, lighthouse: FakeLighthouse):
    lighthouse.shown = status(job(*many(50)))
    async with browser.page(lighthouse.url) as page:
        await shown(page)
        watch = "{subtree: true, childList: true, characterData: true, attributeFilter: ['class', 'title']}"
        await page.run(
            "window.touched = []; new MutationObserver(all => touched.push(...all.map(m => m.target.closest?.('tr')"
            f"?.dataset.name ?? ''))).observe(document.querySelector('tbody'), {watch})"
        )
        await shown(page, updates=2)
        assert await page.run("touched") == []
        lighthouse.shown = status(job(*many(49), member("group49", commit_failures=1)))
        await page.until("touched.length > 0")
        assert set(await page.run("touched")) == {"group49"}


async def test_the_silence_of_the_lighthouse_is_said_and_its_return_seen(browser: Chromium, lighthouse: FakeLighthouse):
    lighthouse.shown = status(job(member("a")))
    async with browser.page(lighthouse.url) as page:
        await shown(page)
        await lighthouse.stop()
        await page.until("document.title === '✖ lighthouse'")
        seen = await page.text()
        assert re.search(
            r"no answer No answer from the lighthouse since \d\d:\d\d:\d\d \(\d.* What you see is of", seen
        )
        assert "default formed" in seen
        lighthouse.shown = status(job(member("a"), member("b")))
        await lighthouse.start()
        await page.until("document.title === 'lighthouse' && document.querySelectorAll('tbody tr').length === 2")
        assert (await page.text()).count("No answer") == 0


async def test_where_events_are_cut_it_asks(browser: Chromium, lighthouse: FakeLighthouse):
    lighthouse._http._feed.close()
    lighthouse.shown = status(job(member("a")))
    async with browser.page(lighthouse.url) as page:
        await page.until("document.getElementById('live').textContent === 'polling'")
        assert "default formed" in await page.text()


async def test_a_kill_is_confirmed_and_done(browser: Chromium, lighthouse: FakeLighthouse):
    lighthouse.shown = status(job(member("a"), member("b"), member("c", MemberState.EXPIRED)))
    async with browser.page(lighthouse.url) as page:
        await page.until("document.querySelectorAll('td.act button:not([hidden])').length === 2")
        await page.run("document.querySelector('[aria-label=\"Kill b\"]').focus()")
        await page.press("Enter", 13, "\r")
        await page.until("document.getElementById('kill').open")
        assert "Kill b? Every rank of b in job default ends at once" in await page.text()
        assert await page.run("document.activeElement.textContent") == "Cancel"
        await page.press("Escape", 27)
        await page.until("!document.getElementById('kill').open")
        assert lighthouse.killed == []
        await page.run("document.querySelector('[aria-label=\"Kill b\"]').click()")
        await page.run("document.getElementById('killReason').value = 'a try'")
        lighthouse.refusal = Unreachable("its manager does not answer")
        await page.run("document.getElementById('killNow').click()")
        await page.until("document.getElementById('killError').textContent")
        assert "b was not killed: its manager does not answer" in await page.text()
        lighthouse.refusal = None
        await page.run("document.getElementById('killNow').click()")
        await page.until("!document.getElementById('kill').open")
        assert lighthouse.killed == [KillOrder("default", "b", "a try")]


@pytest.mark.slow
async def test_from_another_host_it_says_why_it_kills_nothing_or_asks_for_the_token(
    browser: Chromium, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rpc_handler.Call, "is_local", property(lambda call: False))
    shows = status(job(member("a")))
    async with FakeLighthouse(shows) as lighthouse, browser.page(lighthouse.url) as page:
        await page.until("document.body.innerText.includes('No kills from here')")
        assert "--allow-remote-control" in await page.text()
        assert await page.run("document.querySelectorAll('td.act button:not([hidden])').length") == 0
    async with (
        FakeLighthouse(shows, policy=ControlPolicy("secret")) as lighthouse,
        browser.page(lighthouse.url) as page,
    ):
        await page.until("document.querySelector('td.act button:not([hidden])')")
        for token, is_open in (("wrong", True), ("secret", False)):
            await page.run("kill.open || document.querySelector('td.act button').click()")
            await page.run(f"document.getElementById('killToken').value = '{token}'")
            await page.run("document.getElementById('killNow').click()")
            await page.until("!document.getElementById('killNow').disabled")
            assert await page.run("document.getElementById('kill').open") is is_open
        assert [order.replica_id for order in lighthouse.killed] == ["a"]


@pytest.mark.slow
async def test_evidence_opens_from_its_incident(browser: Chromium, lighthouse: FakeLighthouse):
    lighthouse.shown = status(troubled())
    rank = {"replica_id": "b", "group_rank": 1, "pid": 4711, "host": "node7", "stacks": f"File loader.py {MARKUP}"}
    rank |= {
        "flight_recorder": '[{"op": "all_reduce"}]',
        "process": "State: S",
        "output": ["epoch 1"],
        "missing": ["x"],
    }
    incident = {"text": "b/1 behind", "missing": ["c gave none"], "evidence": [rank]}
    lighthouse.incidents["20261122-101501"] = incident
    async with browser.page(lighthouse.url) as page:
        await page.until("document.querySelectorAll('.incidents a').length === 2")
        await page.run("document.querySelector('.incidents a').click()")
        await page.until("document.querySelector('#evidenceRanks pre')")
        seen = await page.text()
        assert "Incident 20261122-101501 JSON Close b/1 behind; c gave none b/1 · node7 · pid 4711 missing: x" in seen
        assert f"File loader.py {MARKUP} Collectives, the newest last" in seen
        await page.run("document.getElementById('evidenceClose').click()")
        await page.run("document.querySelectorAll('.incidents a')[1].click()")
        await page.until("document.getElementById('evidenceError').textContent.includes('there is no incident')")


@pytest.mark.slow
async def test_a_crowd_is_shown_in_part_the_worst_first_and_can_be_filtered_and_sorted(
    browser: Chromium, lighthouse: FakeLighthouse
):
    lighthouse.shown = status(job(*many(300), member("troubled", MemberState.EXPIRED)))
    async with browser.page(lighthouse.url) as page:
        seen = await shown(page)
        assert await page.run("document.querySelectorAll('tbody tr').length") == 100
        assert "201 more replica groups: show more" in seen
        assert seen.index("troubled") < seen.index("group0")
        await page.press("/", 191, "/")
        assert await page.run("document.activeElement.type") == "search"
        await page.send("Input.insertText", text="group29")
        await page.until("document.querySelectorAll('tbody tr').length === 11")
        names = "[...document.querySelectorAll('td.replica button')].map(b => b.textContent)"
        assert (await page.run(names))[:3] == ["group29", "group290", "group291"]
        for _ in range(2):
            await page.run("document.querySelector('th button').click()")
        assert (await page.run(names))[:2] == ["group299", "group298"]
        assert await page.run("document.querySelector('th').getAttribute('aria-sort')") == "descending"


@pytest.mark.slow
async def test_shows_the_runs_in_a_line_each(browser: Chromium, lighthouse: FakeLighthouse):
    run = run_status(("default", "r<1>"), RunMachine(record=RunRecord(stop=RunStopped("<b>enough</b>", "g", 3))), 0.0)
    lighthouse.shown = status(runs=(run,))
    async with browser.page(lighthouse.url) as page:
        seen = await shown(page)
    told = "default/r<1>: no generation yet, 0 ranks, 0 spares, 0 restarts, stopped, stopped: <b>enough</b>"
    assert f"Runs {told}" in seen


def crowd(count: int, moved: int = 0) -> JobStatus:
    """`moved`: snapshots differ in every age, and in the step of each seventh group."""
    groups = [
        member(f"group{n}", step=7 + moved * (n % 7 == 0), heartbeat_age_s=0.1 + n % 9 / 10 + moved / 10)
        for n in range(count)
    ]
    ranks = tuple(
        place(f"group{n}", r, RankState.RUNNING, progress_age_s=0.1 + n % 9 / 10 + moved / 10, host=f"node{n}")
        for n in range(count)
        for r in range(2)
    )
    return dataclasses.replace(job(*groups), ranks=ranks)


@pytest.mark.slow
async def test_a_thousand_groups_are_updated_in_little_time(
    browser: Chromium, lighthouse: FakeLighthouse, tmp_path: Path
):
    lighthouse.shown = status(crowd(1000))
    async with browser.page(lighthouse.url) as page:
        await shown(page)
        took: list[float] = []
        for moved in range(1, 6):
            lighthouse.shown = status(crowd(1000, moved))
            await shown(page, updates=2)
            took.append(await page.run("lighthouseFigures.took_ms + lighthouseFigures.parse_ms"))
        assert await page.run("document.querySelectorAll('tbody tr').length") == 100
        assert sorted(took)[2] < 500, f"ms of script for an update: {took}"
        assert await page.run("lighthouseFigures.bytes") < 2_000_000
        await page.run("document.querySelector('.all').click()")
        assert await page.run("document.querySelectorAll('tbody tr.rank').length") == 200
        print(await page.picture(pictures(tmp_path) / "dashboard-1000.png"), took)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [(1440, 900), (1000, 700), (390, 844), (320, 568)])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_it_fits_every_window_in_light_and_dark(
    browser: Chromium, lighthouse: FakeLighthouse, tmp_path: Path, width: int, height: int, dark: bool
):
    lighthouse.shown = status(troubled())
    async with browser.page(lighthouse.url, width=width, height=height, dark=dark) as page:
        await shown(page)
        assert await page.run("document.documentElement.scrollWidth") <= width
        back = await page.run("getComputedStyle(document.body).backgroundColor")
        assert back == ("rgb(14, 17, 23)" if dark else "rgb(244, 245, 247)")
        assert await page.run(POOR_CONTRASTS) == []
        assert await page.run(NAMELESS_BUTTONS) == 0
        assert page.errors == []
        name = f"dashboard-{width}-{'dark' if dark else 'light'}.png"
        print(await page.picture(pictures(tmp_path) / name))
