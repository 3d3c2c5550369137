"""The page of a real lighthouse in a real browser: three groups are seen, drained, killed, and asked for stacks."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from lighthouse_runtime.client.clients import ManagerClient
from tests.chromium import Chromium, needs_browser, pictures
from tests.processes import Lighthouse, Manager, together

pytestmark = [needs_browser, pytest.mark.slow]


def join(manager: Manager) -> None:
    """Without a watch: what is killed is the manager alone, not the process that tests."""
    with ManagerClient(manager.address) as rank:
        rank.quorum(0, 0, timeout_s=60)


async def test_groups_are_drained_and_killed_through_their_buttons(tmp_path):
    with Lighthouse("--min-replicas", "3") as lighthouse, ThreadPoolExecutor() as threads:
        managers = [Manager(lighthouse.address, name) for name in "abc"]
        with together(*managers):
            list(threads.map(join, managers))
            async with Chromium(tmp_path) as browser, browser.page(f"{lighthouse.http}/") as page:
                await page.until("document.querySelectorAll('td.act .kill:not([hidden])').length === 3")
                assert "with all 3 groups" in await page.text()
                await page.run("document.querySelector('[aria-label=\"Kill b\"]').click()")
                await page.run("document.getElementById('actReason').value = 'seen enough'")
                await page.run("document.getElementById('actNow').click()")
                await page.until("!document.getElementById('act').open")
                await page.until("document.querySelector('tr.expired')?.innerText.startsWith('b')")
                seen = await page.text()
                print(await page.picture(pictures(tmp_path) / "dashboard-after-a-kill.png"))
                outside = [url for url in page.requests if not url.startswith((f"{lighthouse.http}/", "data:"))]
                assert (page.errors, outside) == ([], [])
                await page.run("document.querySelector('[aria-label=\"Drain c\"]').click()")
                await page.run("document.getElementById('actNow').click()")
                await page.until("document.getElementById('done').textContent.startsWith('c was asked to drain')")
                await page.until("document.querySelector('.timeline').innerText.includes('drained')")
            assert "killed b seen enough" in seen
            assert "lost b" in seen
            managers[1].wait_for_log("seen enough")
