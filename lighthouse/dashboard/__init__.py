"""The page that a browser shows of a lighthouse: one file, nothing from elsewhere, text only from /status."""

import base64
import functools
import hashlib
import re
from importlib import resources


@functools.cache
def page() -> bytes:
    """The page, UTF-8; it asks for `status` beside itself every second."""
    return resources.files(__name__).joinpath("page.html").read_bytes()


def _hashes(tag: str) -> str:
    """The sources that allow exactly the page's own inline `tag` elements."""
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
