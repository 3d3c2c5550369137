"""Pages of the site that stand elsewhere in the repository, and source files that pages link to.

Pages are written for the repository, where `../examples/train_ddp.py` is a file. On the site each such link leads to a
page of the site, which shows that file: nothing depends on where the repository is hosted.
"""

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = "docs"

# Pages outside docs/, by their path in the repository, and their path on the site.
PAGES = {
    "README.md": "overview.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "deploy/README.md": "deploy.md",
    "examples/freeze/README.md": "examples/freeze.md",
}
SOURCES = "source"  # the folder of the site for files that are no pages
_REPOSITORY_PATHS = {uri: path for path, uri in PAGES.items()}
_LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".toml": "toml", ".json": "json"}

_LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)\s#]+)(?=[#)])")
_FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`[^`\n]+`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and the sources that stand outside docs/."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(REPOSITORY / path)))
    for path in sorted(_linked_sources(files)):
        files.append(File.generated(config, uri_of(path), content=source_page(REPOSITORY / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links of the repository into links of the site."""
    uri = page.file.src_uri
    if uri.startswith(SOURCES):
        return markdown

    def of_site(match: re.Match[str]) -> str:
        return posixpath.relpath(uri_of(target(path_of(uri), match[0])), posixpath.dirname(uri) or ".")

    return _outside_code(_without_escapes(markdown), lambda text: _LINK.sub(of_site, text))


def path_of(uri: str) -> str:
    """Where a page of the site stands in the repository."""
    return _REPOSITORY_PATHS.get(uri, f"{DOCS}/{uri}")


def uri_of(path: str) -> str:
    """Where a file or folder of the repository stands on the site."""
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix(f"{DOCS}/") if path.startswith(f"{DOCS}/") else f"{SOURCES}/{path}.md"


def target(path: str, link: str) -> str:
    """The path in the repository that `link` means on the page at `path`."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def source_page(path: Path) -> str:
    """A page that shows a file, or all files of a folder."""
    name = path.relative_to(REPOSITORY).as_posix()
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else []
    parts = [f"## {file.name}\n\n{_block(file)}" for file in files] or [_block(path)]
    return "\n\n".join([f"# {name}", *parts]) + "\n"


def _block(file: Path) -> str:
    text = file.read_text()
    fence = "`" * max(3, 1 + max((len(ticks) for ticks in re.findall(r"`{3,}", text)), default=2))
    return f"{fence}{_LANGUAGES.get(file.suffix, 'text')}\n{text.rstrip()}\n{fence}"


def _linked_sources(files: Files) -> Iterator[str]:
    """Files and folders outside docs/ that a page links to, and that are no pages themselves."""
    found: set[str] = set()
    for file in files.documentation_pages():
        path = path_of(file.src_uri)
        _outside_code(file.content_string, lambda text, path=path: found.update(_targets(path, text)) or text)
    return (path for path in found if uri_of(path).startswith(SOURCES) and (REPOSITORY / path).exists())


def _targets(path: str, text: str) -> set[str]:
    return {target(path, link) for link in _LINK.findall(text)}


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """`markdown`, changed where it is neither a fenced block nor a code span."""
    for code in (_FENCE, _SPAN):
        if code.search(markdown):
            parts: list[str] = []
            end = 0
            for match in code.finditer(markdown):
                parts += [_outside_code(markdown[end : match.start()], change), match[0]]
                end = match.end()
            return "".join([*parts, _outside_code(markdown[end:], change)])
    return change(markdown)


def _without_escapes(markdown: str) -> str:
    """Without the backslash that GitHub wants before a | in a code span of a table, and Python-Markdown shows."""
    return re.sub(r"(?m)^\|.*", lambda row: _SPAN.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), markdown)
