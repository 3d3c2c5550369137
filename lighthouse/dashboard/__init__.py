"""The dashboard: one HTML document with inline style and scripts.

It loads nothing from other hosts, and its content security policy allows only its own inline style and scripts. The
scripts insert strings from a status as text, never as HTML.
"""

import base64
import functools
import hashlib
import re
from importlib import resources

_SCRIPTS = (
    "words.js",
    "groups.js",
    "happenings.js",
    "graphs.js",
    "lead.js",
    "jobs.js",
    "dialogs.js",
    "live.js",
)


@functools.cache
def page() -> bytes:
    """Return the page as UTF-8, with style and scripts inlined.

    The scripts request only `events`, `status`, `control`, `incidents` and the routes of the operator's actions.
    """
    scripts = b"".join(_read(name) for name in _SCRIPTS)
    page = _read("page.html").replace(b"<style></style>", b"<style>\n" + _read("page.css") + b"</style>")
    return page.replace(b"<script></script>", b"<script>\n'use strict';\n" + scripts + b"</script>")


def _read(name: str) -> bytes:
    return resources.files(__name__).joinpath(name).read_bytes()


def _hashes(tag: str) -> str:
    """Return the CSP hashes that allow only the page's own inline elements with this tag."""
    bodies = re.findall(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), page(), re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(body).digest()).decode()}'" for body in bodies)


CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        f"script-src {_hashes('script')}",
        f"style-src {_hashes('style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
