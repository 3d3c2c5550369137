"""The page in a real browser, over the lighthouse's own HTTP side: what is seen, what is touched, what a click does."""

import dataclasses
import json
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from lighthouse.job.progress import EVERY_S, Levels, Pace, Samples
from lighthouse.job.records import RunRecord
from lighthouse.job.restarts import RunMachine
from lighthouse.job.status import run_status
from lighthouse_protocol.messages.incident import IncidentKind, IncidentSummary
from lighthouse_protocol.messages.progress import RankState
from lighthouse_protocol.messages.run import RunStopped, SupervisorHeartbeat, SupervisorStatus
from lighthouse_protocol.messages.status import JobStatus, MemberState, TimelineEntry, TimelineKind
from lighthouse_protocol.refusals import Unreachable
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.security import access
from lighthouse_runtime.security.access import Audit, CredentialAccess, LocalOperatorAccess
from lighthouse_runtime.security.credentials import TokenFile, load_or_make
from lighthouse_runtime.web.control import Order
from tests.chromium import Chromium, Page, needs_browser, pictures
from tests.lighthouse.fake_lighthouse import FakeLighthouse
from tests.lighthouse.statuses import healing, job, many, member, place, run_of, status

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


async def hide(page: Page) -> None:
    """As in a tab in the background."""
    await page.run("Object.defineProperty(document, 'hidden', {get: () => true})")
    await page.run("document.dispatchEvent(new Event('visibilitychange')), askedAt = 0")


async def until_title(page: Page, title: str) -> None:
    """Of a hidden page, which asks at once instead of in some seconds."""
    await page.run("askedAt = 0")
    await page.until(f"document.title === '{title} - Lighthouse'")


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
    loss = dataclasses.replace(loss, quorum_s=0.9, quorum_id=42, step_s=1.7, over_s=1.7, back_s=16.0)
    stall = "b/1 behind in <b>validation</b> 3/25"
    made = job(*members, name=MARKUP, verdict="waiting_for_stragglers", explanation="waiting <b>for</b> b", ranks=ranks)
    return dataclasses.replace(made, stall=stall, stall_s=63.0, timeline=timeline, incidents=(stalls, loss))


def evidence(**fields: object) -> dict[str, object]:
    """Of a rank, in JSON."""
    rank: dict[str, object] = {"replica_id": "b", "group_rank": 1, "pid": 4711, "host": "node7"}
    return {**rank, "process": "", "output": [], "missing": [], **fields}


async def test_says_how_far_a_group_has_healed(browser: Chromium, lighthouse: FakeLighthouse):
    healed = TimelineEntry(time.time() - 12, TimelineKind.HEALING, ("b",), 0, "from step 0 to 17")
    of = job(member("a"), healing("b"), timeline=(healed,))
    beside = place("b", 0, RankState.RUNNING, is_inside=False)
    lighthouse.shown = status(dataclasses.replace(of, ranks=(beside,)))
    async with browser.page(lighthouse.url) as page:
        assert "Training with all 2 groups, at step 7. b is healing from a: 1.2" in await shown(page)
        waited_for = dataclasses.replace(beside, phase="heal", done=30, total=100)
        lighthouse.shown = status(dataclasses.replace(of, ranks=(waited_for,)))
        seen = await shown(page, updates=2)
        assert "rank 0 host · pid 4711 running heal 30/100" in seen
        assert (
            "Waiting for b to heal, at step 7. b is healing from a: 1.2 of 4.0 GiB, 98 MiB/s, 29 s left. Step 7" in seen
        )
        assert "3f2b8c1e healing healing from a: 1.2 of 4.0 GiB, 98 MiB/s, 29 s left" in seen
        assert "default Waiting for b " in seen
        assert "1 participant 1 healing" in seen
        assert page.errors == []


async def test_shows_the_quorum_groups_ranks_incidents_and_what_happened(browser: Chromium, lighthouse: FakeLighthouse):
    lighthouse.shown = status(troubled())
    async with browser.page(lighthouse.url) as page:
        seen = await shown(page)
        assert re.search(r"times in [\w/+-]+ · up 1 h 06 m · 0\.1\.0 live", seen)
        assert f"{MARKUP} Stalled Take stacks No progress for" in seen
        assert re.search(
            r"Last loss: c 3\d s ago; training continued after 1\.7 s, back after 16 s\. Behind b/1; b late; c lost\. ",
            seen,
        )
        assert await page.run("document.title") == "(!) group b is behind - Lighthouse"
        assert "No progress for 1 m 03 s: b/1 behind in <b>validation</b> 3/25" in seen
        figures = (
            "Step 9 Participants 2 of 3 Ranks 4 1 behind, 1 waiting Discarded steps – Quorum age 3 m 13 s quorum 42"
        )
        assert f"{figures} Internals" in seen
        await page.run("document.querySelector('.internals').open = true")
        internals = "Verdict waiting for stragglers Phase standing Quorums formed 3 Rounds 1234 Sessions 3 Recalls 5"
        assert f"{internals} Revokes 6" in await page.text()
        assert "b 8 ranks · host:29512 · 3f2b8c1e late" in seen
        assert "1 rank behind −2 7 3.5 s 1 m 03 s 2 DrainKill" in seen
        assert "rank 1 node7 · pid 4711 behind <b>validation</b> 3/25 7 0.4 s 1 m 03 s" in seen
        assert "rank 0 node1 · pid 4711 waiting step in all_reduce 7 0.4 s 1 m 03 s" in seen
        assert "running step waits for vote 7 0.4 s" in seen
        assert re.search(r"lost c its connection <i>has</i> ended \d\d:\d\d:\d\d joined 16 groups", seen)
        assert f"Evidence b/1 behind {MARKUP} Noticed after 1 m 01 s; no progress since." in seen
        assert "c was lost Noticed after 20 ms; training continued after 1.7 s, back after 16 s." in seen
        assert await page.run("document.querySelectorAll('img').length") == 0
        assert page.errors == []
        assert {url.removeprefix(lighthouse.url) for url in page.requests if not url.startswith("data:")} == {
            "", "events", "control",
        }  # fmt: skip


def paced(**fields: object) -> Pace:
    """Two minutes at 2.5 steps/s, with two of three groups."""
    samples, of = Samples(), Levels(0, 2, 3, 0.97)
    for n in range(60):
        samples.add_levels(dataclasses.replace(of, step=5 * n), n * EVERY_S)
    return dataclasses.replace(samples.pace_of(dataclasses.replace(of, step=300), 4, 60 * EVERY_S), **fields)  # pyright: ignore[reportArgumentType]


HEIGHTS = """
[...document.querySelectorAll('.curve .line')]
  .map(path => path.getAttribute('d').split(/(?=[ML])/).map(point => +point.split(' ')[1]))
"""


async def test_its_graphs_show_the_numbers_of_the_status(browser: Chromium, lighthouse: FakeLighthouse):
    """A curve is 54 high at most, and stands on 58."""
    lighthouse.shown, lighthouse.pace = status(job(member("a"), member("b"), name="j")), {"j": paced()}
    async with browser.page(lighthouse.url) as page:
        seen = await shown(page)
        assert "Training at 2.50 steps/s with 2 of 3 groups, at step 7. Goodput 97.0 %." in seen
        assert "Steps per second 2.50 peak 2.50 Groups training 2 of 3 alive peak 3 Goodput 97.0 %" in seen
        speeds, groups, goodput = await page.run(HEIGHTS)
        assert (set(speeds), set(groups), set(goodput)) == ({4.0}, {22.0}, {5.6})
        assert (len(speeds), len(groups)) == (60, 61), "the first sample has no rate"
        await page.run("window.isOld = true, location.reload()")
        await page.until("!window.isOld && document.querySelector('.curve .line')?.getAttribute('d').length > 100")
        assert await page.run(HEIGHTS) == [speeds, groups, goodput]
        halved = paced(steps_per_s=1.25, training=1, goodput=0.5)
        lighthouse.pace = {"j": halved}
        assert "Steps per second 1.25 peak 2.50 Groups training 1 of 3 alive" in await shown(page, updates=2)
        assert [heights[-1] for heights in await page.run(HEIGHTS)] == [31.0, 40.0, 31.0]


async def test_heals_and_stalls_are_bands_of_their_groups(browser: Chromium, lighthouse: FakeLighthouse):
    """Of the two minutes that are shown; what was over before is no band."""
    now = time.time()
    entries = [
        (400, "healing", "a"),
        (390, "healed", "a"),
        (60, "healing", "b"),
        (30, "healed", "b"),
        (10, "healing", "c"),
    ]
    entries += [(5, "healing", f"g{n}") for n in range(20)]
    timeline = tuple(TimelineEntry(now - ago, TimelineKind(kind), (name,), 0, "") for ago, kind, name in entries)
    of_b = IncidentSummary("i", "j", IncidentKind.STALL, "", ("b/1",), now - 80, 10.0, over_s=20.0)
    made = job(member("a"), name="j", timeline=timeline, incidents=(of_b,))
    lighthouse.shown, lighthouse.pace = status(made), {"j": paced()}
    async with browser.page(lighthouse.url) as page:
        assert "and 10 more" in await shown(page)
        bands = await page.run("bandsOf(jobs.get('j').job, jobs.get('j').now_s, 120)")
        spans = {
            name: [(s["kind"], round(now - s["from"]), round(now - s["to"])) for s in spans] for name, spans in bands
        }
        assert (len(bands), spans["b"]) == (22, [("heal", 60, 30), ("stall", 90, 70)])
        assert (spans["c"][0][:2], "a" in spans) == (("heal", 10), False)
        assert await page.run("document.querySelectorAll('.bands li').length") == 12
        assert "Healing c, g0, g1, g2, g3, g4 and 15 more" in await page.text()


async def test_a_page_in_the_background_says_in_its_title_what_is_wrong(browser: Chromium, lighthouse: FakeLighthouse):
    lighthouse.shown = status(job(member("a")))
    async with browser.page(lighthouse.url) as page:
        await page.until("document.title === 'Lighthouse'")
        await hide(page)
        lighthouse.shown = status(job(member("a")), troubled())
        await until_title(page, f"(!) {MARKUP}: group b is behind")
        lost = dataclasses.replace(troubled().incidents[1], suspects=("c", "d"), opened_unix_s=time.time(), over_s=None)
        lighthouse.shown = status(job(member("a"), incidents=(lost,)))
        await until_title(page, "(!) groups c, d are lost")
        back = job(member("a"), member("c"), member("group-d", MemberState.IDLE, is_participant=False))
        lost = dataclasses.replace(lost, suspects=("c", "group-d"))
        lighthouse.shown = status(dataclasses.replace(back, incidents=(lost,)))
        await until_title(page, "(!) group-d is lost")
        lighthouse.shown = status(job(member("a"), verdict="too_few_participants"))
        await until_title(page, "(!) too few participants")
        assert page.requests.count(f"{lighthouse.url}events") == 1


async def test_a_job_that_has_ended_is_no_trouble(browser: Chromium, lighthouse: FakeLighthouse):
    """Whatever was lost shortly before, and whether its groups are still connected or not."""
    lost = dataclasses.replace(troubled().incidents[1], suspects=("c",), opened_unix_s=time.time(), over_s=None)
    leaving = (member("a", MemberState.IDLE, is_participant=False), member("c", MemberState.EXPIRED))
    ended = job(*leaving, verdict="no_joins", explanation="ended at step 60", ended_step=60)
    lighthouse.shown = status(dataclasses.replace(ended, incidents=(lost,)))
    async with browser.page(lighthouse.url) as page:
        assert "default Ended Ended at step 60. " in await shown(page)
        assert await page.run("document.querySelector('.verdict').className") == "verdict pill good"
        assert await page.run("document.querySelector('.lead').className.trim()") == "lead"
        await hide(page)
        lighthouse.shown = status(dataclasses.replace(ended, members=(), incidents=(lost,)))
        await page.run("askedAt = 0")
        await page.until("!document.querySelector('tbody tr') && document.title === 'Lighthouse'")
        assert "default Ended Ended at step 60. " in await page.text()
        assert page.errors == []


async def test_of_the_last_live_group_it_says_that_training_ends(browser: Chromium, lighthouse: FakeLighthouse):
    lighthouse.shown = status(job(member("a"), member("c", MemberState.EXPIRED)))
    async with browser.page(lighthouse.url) as page:
        await page.until("document.querySelector('td.act .kill:not([hidden])')")
        await page.run("document.querySelector('td.act .kill').click()")
        assert "what only it holds is lost. It is the last live group of the job: training ends." in await page.text()


@pytest.mark.parametrize("act", ["drain", "stop", "resume"])
async def test_an_act_is_confirmed_done_and_said(browser: Chromium, lighthouse: FakeLighthouse, act: str):
    stopped = dataclasses.replace(run_of("active"), stop=RunStopped("enough", "operator", 3))
    lighthouse.shown = status(job(member("a")), runs=(stopped if act == "resume" else run_of("active"),))
    order = Order("default", "a") if act == "drain" else Order("default", run="r")
    button = {"drain": ".drain:not([hidden])"}.get(act, ".acts button")
    says = {"drain": "a was asked to drain", "stop": "Run r is stopped.", "resume": "Run r is resumed."}[act]
    async with browser.page(lighthouse.url) as page:
        await page.until(f"document.querySelector('{button}')")
        await page.run(f"document.querySelector('{button}').click()")
        assert await page.run("document.activeElement.textContent") == "Cancel"
        assert lighthouse.acted == []
        await page.run("document.getElementById('actNow').click()")
        await page.until(f"document.getElementById('done').textContent.startsWith('{says}')")
        assert lighthouse.acted == [(f"POST /{act}", order)]
        assert says in await page.text()
        assert page.errors == []


async def test_stacks_are_shown_the_main_thread_first(browser: Chromium, lighthouse: FakeLighthouse):
    recorded = {"seq": 24, "operation": "all_reduce", "input_sizes": [[4096, 1024]], "age_s": 63.1}
    recorder = json.dumps([recorded | {"state": "scheduled", "group": 17}])
    rank = evidence(stacks="Thread 2:\n  agent.py\n\nThread 1:\n  train.py\n", flight_recorder=recorder)
    lighthouse.shown, lighthouse.gathered = status(troubled()), {"evidence": [rank], "missing": ["c gave none"]}
    async with browser.page(lighthouse.url) as page:
        await page.until("document.querySelector('.acts button')")
        await page.run("document.querySelector('.acts button').click()")
        await page.run("document.getElementById('actNow').click()")
        await page.until("document.querySelector('#evidenceRanks pre')")
        seen = await page.text()
        assert lighthouse.acted == [("POST /stacks", Order(MARKUP))]
        first = "Stacks, the main thread first Thread 1: train.py Thread 2: agent.py"
        assert f"Close c gave none b/1 · node7 · pid 4711 {first}" in seen
        assert "24 all_reduce 4096x1024, 1 m 03 s ago: scheduled (group 17)" in seen


async def test_shows_ranks_of_runs_beside_those_of_groups(browser: Chromium, lighthouse: FakeLighthouse):
    ranks = (
        place("r", 1, RankState.BEHIND, is_inside=False, step=6, generation=3),
        place("r", 0, RankState.RUNNING, is_inside=False, generation=3),
        place("r", 2, RankState.SPARE, is_inside=False, step=0, progress_age_s=0.4, pid=4713),
    )
    alone = job(quorum_id=0, verdict="no_joins", phase="none", ranks=ranks)
    lighthouse.shown = status(alone, runs=(run_of("active", "active", "spare"),))
    async with browser.page(lighthouse.url) as page:
        seen = await shown(page)
        assert re.search(
            r"default Training (Take stacks )?(Stop run r )?Training with 2 of 3 ranks, at step 7\. Behind r/1\.", seen
        )
        assert "Generation 3 Active 2 Spares 1 Step 7 Ranks 3 1 behind Restarts 2" in seen
        assert "r 3 ranks training step 1 rank behind 3 7 0.4 s 1 m 03 s" in seen
        assert "slot 1 host · pid 4711 behind step 3 6 0.4 s 1 m 03 s" in seen
        assert "slot 2 host · pid 4713 spare step 0 0.4 s" in seen
        assert "Kill" not in seen
        lighthouse.shown = status(dataclasses.replace(troubled(), job="default"))
        assert " Gen " not in await shown(page, updates=2)
        assert page.errors == []


async def test_what_has_not_changed_is_not_touched(browser: Chromium, lighthouse: FakeLighthouse):
    lighthouse.shown = status(job(*many(30)))
    async with browser.page(lighthouse.url) as page:
        await shown(page)
        watch = "{subtree: true, childList: true, characterData: true, attributeFilter: ['class', 'title']}"
        await page.run(
            "window.touched = []; new MutationObserver(all => touched.push(...all.map(m => m.target.closest?.('tr')"
            f"?.dataset.name ?? ''))).observe(document.querySelector('tbody'), {watch})"
        )
        await shown(page, updates=2)
        assert await page.run("touched") == []
        lighthouse.shown = status(job(*many(29), member("group29", commit_failures=1)))
        await page.until("touched.length > 0")
        assert set(await page.run("touched")) == {"group29"}


async def test_the_silence_of_the_lighthouse_is_said_and_its_return_seen(browser: Chromium, lighthouse: FakeLighthouse):
    lighthouse.shown = status(job(member("a")))
    async with browser.page(lighthouse.url) as page:
        await shown(page)
        await lighthouse.stop()
        await page.until("document.title === '(!) no answer - Lighthouse'")
        seen = await page.text()
        assert re.search(
            r"no answer No answer from the lighthouse since \d\d:\d\d:\d\d \(\d.* This page shows the state of", seen
        )
        assert "default Training" in seen
        lighthouse.shown = status(job(member("a"), member("b")))
        await lighthouse.start()
        await page.until("document.title === 'Lighthouse' && document.querySelectorAll('tbody tr').length === 2")
        assert (await page.text()).count("No answer") == 0


async def test_where_events_are_cut_it_asks(browser: Chromium, lighthouse: FakeLighthouse):
    lighthouse._http._feed.close()
    lighthouse.shown = status(job(member("a")))
    async with browser.page(lighthouse.url) as page:
        await page.until("document.getElementById('live').textContent === 'polling' && lighthouseFigures.updates")
        assert "default Training" in await page.text()


async def test_a_kill_is_confirmed_and_done(browser: Chromium, lighthouse: FakeLighthouse):
    lighthouse.shown = status(job(member("a"), member("b"), member("c", MemberState.EXPIRED)))
    async with browser.page(lighthouse.url) as page:
        await page.until("document.querySelectorAll('td.act .kill:not([hidden])').length === 2")
        await page.run("document.querySelector('[aria-label=\"Kill b\"]').focus()")
        await page.press("Enter", 13, "\r")
        await page.until("document.getElementById('act').open")
        assert "Kill b? Every rank of b in job default ends at once" in await page.text()
        assert await page.run("document.activeElement.textContent") == "Cancel"
        await page.press("Escape", 27)
        await page.until("!document.getElementById('act').open")
        assert lighthouse.acted == []
        await page.run("document.querySelector('[aria-label=\"Kill b\"]').click()")
        await page.run("document.getElementById('actReason').value = 'a try'")
        lighthouse.refusal = Unreachable("its manager does not answer")
        await page.run("document.getElementById('actNow').click()")
        await page.until("document.getElementById('actError').textContent")
        assert "b was not killed: its manager does not answer" in await page.text()
        lighthouse.refusal = None
        assert "It is the last live group" not in await page.text()
        await page.run("document.getElementById('actNow').click()")
        await page.until("!document.getElementById('act').open")
        assert lighthouse.acted == [("POST /kill", Order("default", "b", reason="a try"))]


@pytest.mark.slow
async def test_from_another_host_it_says_why_it_kills_nothing(browser: Chromium, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(access, "is_local", lambda peer: False)
    shows = status(job(member("a")))
    async with FakeLighthouse(shows, LocalOperatorAccess()) as lighthouse, browser.page(lighthouse.url) as page:
        await page.until("document.body.innerText.includes('No actions from here')")
        assert "lighthouse token operate" in await page.text()
        assert await page.run("document.querySelectorAll('td.act button:not([hidden])').length") == 0


@pytest.mark.slow
async def test_it_asks_for_a_token_and_shows_all_that_the_token_is_good_for(browser: Chromium, tmp_path: Path):
    tokens = TokenFile(load_or_make(tmp_path / "made", ()).folder)
    shows = status(job(member("a")))
    async with (
        FakeLighthouse(shows, CredentialAccess(tokens, Audit(None))) as lighthouse,
        browser.page(lighthouse.url) as page,
    ):
        await page.until("document.getElementById('login').open")
        seen = await page.text()
        assert "signed out You are signed out. Sign in to see the jobs" in seen
        assert "No answer" not in seen
        await page.send("Input.insertText", text="lhv_wrong")
        await page.press("Enter", 13, "\r")
        await page.until("document.getElementById('loginError').textContent")
        assert "the token is not one of this lighthouse's" in await page.text()
        await page.press("Escape", 27)
        await page.run("document.getElementById('signInHere').click()")
        for role, kills in ((Role.VIEW, 0), (Role.OPERATE, 1)):
            await page.until("document.getElementById('login').open")
            await page.send("Input.insertText", text=tokens.value.newest(role))
            await page.press("Enter", 13, "\r")
            await page.until("!document.getElementById('login').open")
            await page.until(f"document.querySelectorAll('td.act .kill:not([hidden])').length === {kills}")
            await page.until("document.getElementById('live').textContent === 'live'")
            assert "You are signed out" not in await page.text()
            if role is Role.VIEW:
                assert "No actions from here: POST /kill needs a credential of role operate" in await page.text()
                await page.run("document.getElementById('signIn').click()")


CUT = "[...document.querySelectorAll('tr .pill')].filter(p => p.getBoundingClientRect().right > innerWidth - 20).length"


@pytest.mark.slow
async def test_no_state_is_cut_on_a_phone(browser: Chromium, lighthouse: FakeLighthouse):
    lighthouse.shown = status(troubled())
    async with browser.page(lighthouse.url, width=400, height=800) as page:
        await shown(page)
        tops = "['.incidents', '.groups'].map(name => document.querySelector(name).getBoundingClientRect().top)"
        incidents, groups = await page.run(tops)
        assert incidents < groups
        await page.run("document.querySelector('.all').click()")
        assert await page.run("document.querySelectorAll('tr.rank .pill').length") == 4
        assert await page.run(CUT) == 0


@pytest.mark.slow
async def test_on_a_phone_only_groups_with_a_ratio_show_their_compute_time(
    browser: Chromium, lighthouse: FakeLighthouse
):
    ranks = (place("a", 0), place("b", 0, compute_ratio_1m=3.1, is_slow=True))
    lighthouse.shown = status(job(member("a"), member("b"), ranks=ranks))
    async with browser.page(lighthouse.url, width=400, height=800) as page:
        await shown(page)
        seen = "[...document.querySelectorAll('tbody td.compute')].filter(td => td.checkVisibility())"
        assert await page.run(f"{seen}.map(td => td.textContent)") == ["3.1x"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["constructor", "__proto__"])
async def test_a_job_may_have_the_name_of_a_property_of_every_object(
    browser: Chromium, lighthouse: FakeLighthouse, name: str
):
    """One that has ended has no pace; the jobs after it are shown, too."""
    ended = job(name=name, verdict="no_joins", explanation="ended at step 7", ended_step=7)
    lighthouse.shown, lighthouse.pace = status(ended, job(member("a"), name="j")), {"j": paced()}
    async with browser.page(lighthouse.url) as page:
        assert "Training at 2.50 steps/s with 2 of 3 groups" in await shown(page)
        assert page.errors == []


@pytest.mark.slow
async def test_a_run_of_which_nothing_is_known_is_no_card(browser: Chromium, lighthouse: FakeLighthouse):
    """Supervisors of groups that train by quorums open one."""
    lighthouse.shown = status(job(member("a")), runs=(run_status(("default", "r"), RunMachine(), 0.0),))
    async with browser.page(lighthouse.url) as page:
        assert "Runs" not in await shown(page)


@pytest.mark.slow
async def test_evidence_opens_from_its_incident(browser: Chromium, lighthouse: FakeLighthouse):
    lighthouse.shown = status(troubled())
    rank = evidence(stacks=f"File loader.py {MARKUP}", flight_recorder='[{"op": "all_reduce"}]', missing=["x"])
    rank |= {"process": "State: S", "output": ["epoch 1"]}
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
        assert await page.run("document.querySelectorAll('.incidents a')[1].hidden"), "of a loss there is no evidence"
        lighthouse.incidents.clear()
        await page.run("document.querySelector('.incidents a').click()")
        await page.until("document.getElementById('evidenceError').textContent.includes('no incident')")


def mass_loss() -> JobStatus:
    """131 of 200 groups were lost and are back; 31 others are lost."""
    lost = tuple(f"g{n}" for n in range(131))
    groups = [member(f"g{n}", MemberState.EXPIRED if n >= 169 else MemberState.PARTICIPANT) for n in range(200)]
    now = time.time()
    entry = TimelineEntry(now - 60, TimelineKind.LOST, lost[:99], 32, "its connection was lost")
    formed = TimelineEntry(now - 59, TimelineKind.QUORUM, ("a",), 0, "quorum 1795781509013: 69 participants at step 7")
    text = f"{', '.join(lost)} were lost: its connection was lost"
    loss = IncidentSummary("i", "j", IncidentKind.LOSS, text, lost, now - 60, 0.02, step_s=0.87, back_s=8.0)
    return job(*groups, name="j", quorum_id=1795781509013, incidents=(loss,), timeline=(entry, formed))


async def test_a_mass_loss_is_a_line_and_only_groups_that_need_a_look_are_listed(
    browser: Chromium, lighthouse: FakeLighthouse, tmp_path: Path
):
    lighthouse.shown = status(mass_loss())
    async with browser.page(lighthouse.url) as page:
        seen = await shown(page)
        assert "Training with 169 of 200 groups (31 lost), at step 7." in seen
        assert "131 groups lost Noticed after 20 ms; training continued after 870 ms, all back after 8.0 s." in seen
        assert re.search(r"Last loss: 131 of 200 groups 1 m 0\d s ago; training continued after 870 ms, all back", seen)
        assert "lost 131 groups its connection was lost" in seen
        assert "quorum …9013: 69 participants at step 7" in seen
        assert "1795781509013" not in seen
        assert "169 healthy groups: show" in seen
        assert await page.run("document.querySelectorAll('tbody tr.expired').length") == 31
        assert await page.run("document.querySelectorAll('tbody tr').length") == 31
        assert await page.run("document.querySelectorAll('.heat i').length") == 200
        print(await page.picture(pictures(tmp_path) / "dashboard-200.png"))
        await page.run("document.querySelector('.groups .more').click()")
        assert await page.run("document.querySelectorAll('tbody tr').length") == 100
        assert "100 more replica groups: show more" in await page.text()
        assert page.errors == []


async def test_an_empty_page_says_how_to_start_the_first_group(browser: Chromium, lighthouse: FakeLighthouse):
    lighthouse.shown = status()
    async with browser.page(lighthouse.url) as page:
        told = "lighthouse-manager run --lighthouse localhost:29510 --replica-id a -- train.py"
        assert told in await shown(page)


@pytest.mark.slow
async def test_a_crowd_is_shown_in_part_the_worst_first_and_can_be_filtered_and_sorted(
    browser: Chromium, lighthouse: FakeLighthouse
):
    lighthouse.shown = status(job(*many(300), member("troubled", MemberState.EXPIRED)))
    async with browser.page(lighthouse.url) as page:
        assert "300 healthy groups: show" in await shown(page)
        names = "[...document.querySelectorAll('td.replica button')].map(b => b.textContent)"
        assert await page.run(names) == ["troubled"]
        await page.run("document.querySelector('.groups .more').click()")
        seen = await page.text()
        assert await page.run("document.querySelectorAll('tbody tr').length") == 100
        assert "201 more replica groups: show more" in seen
        assert seen.index("troubled") < seen.index("group0")
        await page.press("/", 191, "/")
        assert await page.run("document.activeElement.type") == "search"
        await page.send("Input.insertText", text="group29")
        await page.until("document.querySelectorAll('tbody tr').length === 11")
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
        await page.run("document.querySelector('#runs button').click()")
        await page.run("document.getElementById('actNow').click()")
        await page.until("document.getElementById('done').textContent === 'Run r<1> is resumed.'")
        assert lighthouse.acted == [("POST /resume", Order("default", run="r<1>"))]
    told = "default/r<1>: no generation yet, 0 ranks, 0 spares, 0 restarts, stopped, stopped: <b>enough</b>"
    assert f"Runs {told}" in seen


@pytest.mark.slow
async def test_shows_the_restarts_of_supervised_groups_and_no_green_word_in_a_stall(
    browser: Chromium, lighthouse: FakeLighthouse
):
    a = SupervisorStatus("a", "n0", (0, 1), True, SupervisorHeartbeat(0.25, 1, 3, 2))
    b = SupervisorStatus("b", "n1", (0, 1), False)
    run = dataclasses.replace(run_status(("default", "default"), RunMachine(), 0.0), supervisors=(a, b))
    stalled = job(member("a"), stall="a/1 behind in step 6", stall_s=63.0)
    lighthouse.shown = status(stalled, runs=(run,))
    async with browser.page(lighthouse.url) as page:
        seen = await shown(page)
        assert (
            "default/default: 2 supervisors, 2 of 4 ranks running, 1 restart "
            "(a: 2 of 2 ranks running, 1 restart, 3 left; b is not connected)"
        ) in seen
        pills = "[...document.querySelectorAll('.name .pill:not([hidden])')].map(pill => pill.textContent)"
        assert await page.run(pills) == ["Stalled"]
        assert "Restarts 1 3 left" in seen


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
    return job(*groups, ranks=ranks)


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
        assert await page.run("document.querySelectorAll('.heat i').length") == 1000
        await page.run("document.querySelector('.groups .more').click()")
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
    lighthouse.shown, lighthouse.pace = status(troubled()), {MARKUP: paced()}
    async with browser.page(lighthouse.url, width=width, height=height, dark=dark) as page:
        assert "Steps per second" in await shown(page)
        assert await page.run("document.documentElement.scrollWidth") <= width
        back = await page.run("getComputedStyle(document.body).backgroundColor")
        assert back == ("rgb(14, 17, 23)" if dark else "rgb(244, 245, 247)")
        assert await page.run(POOR_CONTRASTS) == []
        assert await page.run(NAMELESS_BUTTONS) == 0
        assert page.errors == []
        name = f"dashboard-{width}-{'dark' if dark else 'light'}.png"
        print(await page.picture(pictures(tmp_path) / name))
