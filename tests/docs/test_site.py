"""The documentation site: it builds, its links lead somewhere, and no page loads anything from another host."""

import functools
import posixpath
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

import agent_client
from tests.chromium import Chromium, needs_browser, pictures
from tests.docs.pages import REPOSITORY
from tests.processes import LOCALHOST

# What a browser fetches by itself, in contrast to what an <a> names.
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "object": "data"}
LOADED_RELATIONS = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "prefetch", "modulepreload"}
IN_STYLE = re.compile(r"url\(\s*['\"]?([^'\")]+)|@import\s+['\"]([^'\"]+)")
# For a host that serves it: its addresses begin at the root.
NOT_FOUND = "404.html"


class Document(HTMLParser):
    """`links` and `loads`: addresses as they stand in the page; `anchors`: what a # may name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and LOADED[tag] in values:
            self.loads.append(values[LOADED[tag]])
        if tag == "link" and LOADED_RELATIONS & set(values.get("rel", "").split()):
            self.loads.append(values["href"])
        self.loads += in_style(values.get("style", ""))


def in_style(text: str) -> list[str]:
    return [address or imported for address, imported in IN_STYLE.findall(text)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="the dependency group docs is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def documents(site: Path) -> dict[str, Document]:
    """Every page by its path below the site."""
    found = {file.relative_to(site).as_posix(): Document(file.read_text()) for file in site.rglob("*.html")}
    assert found.pop(NOT_FOUND)
    return found


def own(page: str, address: str) -> str:
    """The file of the site that `address` means on `page`."""
    path = unquote(urlsplit(address).path)
    if not path:
        return page
    there = posixpath.normpath(posixpath.join("/", posixpath.dirname(page), path)).lstrip("/")
    is_folder = path.endswith("/") or posixpath.basename(path) in (".", "..")
    return posixpath.join(there, "index.html") if is_folder else there


@pytest.mark.slow
def test_every_link_leads_to_a_page_and_to_a_place_on_it(site: Path, documents: dict[str, Document]) -> None:
    missing: set[str] = set()
    links = [(page, link) for page, document in documents.items() for link in document.links]
    inside = [(page, link) for page, link in links if not (urlsplit(link).scheme or urlsplit(link).netloc)]
    for page, link in inside:
        to, anchor = own(page, link), unquote(urlsplit(link).fragment)
        if not (site / to).is_file() or (anchor and anchor not in documents[to].anchors):
            missing.add(f"{page}: {link}")
    assert missing == set()
    assert len(inside) > 1000


@pytest.mark.slow
def test_every_picture_style_and_script_is_one_of_the_site(site: Path, documents: dict[str, Document]) -> None:
    loads = [(page, address) for page, document in documents.items() for address in document.loads]
    for sheet in site.rglob("*.css"):
        loads += [(sheet.relative_to(site).as_posix(), address) for address in in_style(sheet.read_text())]
    files = [(page, address) for page, address in loads if not address.startswith(("data:", "#"))]
    assert [(page, address) for page, address in files if urlsplit(address).netloc] == []
    assert [(page, address) for page, address in files if not (site / own(page, address)).is_file()] == []
    assert {posixpath.basename(address) for _, address in files} >= {"parts.svg", "phases.svg", "lease.svg"}


@pytest.mark.slow
def test_pages_and_sources_of_the_repository_are_there(documents: dict[str, Document]) -> None:
    pages = {
        "overview",
        "changelog",
        "contributing",
        "security",
        "benchmarks",
        "deploy",
        "source/examples/train_ddp.py",
    }
    assert documents.keys() >= {f"{page}/index.html" for page in pages}


@pytest.mark.slow
def test_the_api_shows_every_name(documents: dict[str, Document]) -> None:
    wanted = {f"agent_client.{name}" for name in agent_client.__all__}
    assert wanted - documents["reference/api/index.html"].anchors == set()


def test_the_api_page_names_what_is_exported_and_nothing_else() -> None:
    text = (REPOSITORY / "docs/reference/api.md").read_text()
    named = re.findall(r"^::: agent_client\.(\w+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(agent_client.__all__)


# One page of each kind.
SHOWN = (
    "",
    "overview/",
    "tutorials/first-run/",
    "reference/timeouts/",
    "concepts/overview/",
    "reference/failures/",
    "reference/options/",
    "reference/api/",
    "contributing/protocol/",
)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer((LOCALHOST, 0), functools.partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://{LOCALHOST}:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("width", [400, 900, 1440])
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
async def test_a_browser_asks_no_other_host_and_needs_no_sideways_scrolling(
    address: str, width: int, is_dark: bool, tmp_path: Path
) -> None:
    async with Chromium(tmp_path) as browser:
        for name in SHOWN:
            async with browser.page(address + name, width=width, dark=is_dark) as page:
                await page.until(f"document.body.dataset.mdColorScheme === '{'slate' if is_dark else 'default'}'")
                shot = f"site-{name.strip('/').replace('/', '-') or 'index'}-{width}-{'dark' if is_dark else 'light'}"
                await page.picture(pictures(tmp_path) / f"{shot}.png")
                assert page.errors == []
                assert [each for each in page.requests if not each.startswith((address, "data:"))] == []
                assert await page.run("document.documentElement.scrollWidth - innerWidth") <= 0, name


@pytest.mark.slow
@needs_browser
async def test_the_search_finds_an_option(address: str, tmp_path: Path) -> None:
    async with Chromium(tmp_path) as browser, browser.page(address) as page:
        await page.run("document.querySelector('[data-md-toggle=search]').click()")
        await page.run("document.querySelector('.md-search__input').focus()")
        await page.send("Input.insertText", text="heartbeat-timeout")
        await page.until("document.querySelectorAll('.md-search-result__item').length > 0")
        assert "timeout" in await page.run("document.querySelector('.md-search-result').innerText")
        assert [each for each in page.requests if not each.startswith((address, "data:", "blob:"))] == []
