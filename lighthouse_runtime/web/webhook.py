"""Sends a JSON document to a URL that the user has configured. The receiver may be down, slow or broken."""

from collections.abc import Mapping
from urllib.parse import urlsplit

import aiohttp

ANSWERED_WITHIN_S = 5.0


def shown_url(url: str) -> str:
    """Return only the scheme and the host of the URL, because its other parts may contain a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}"


async def post_json(url: str, document: Mapping[str, object]) -> str:
    """POST `document` as JSON. Return an empty string on success, or else the error, without secrets in the URL."""
    try:
        timeout = aiohttp.ClientTimeout(total=ANSWERED_WITHIN_S)
        async with (
            aiohttp.ClientSession() as http,
            http.post(url, json=document, timeout=timeout, allow_redirects=False) as response,
        ):
            return "" if response.status < 300 else f"it answered with status {response.status}"
    except TimeoutError:
        return f"it did not answer within {ANSWERED_WITHIN_S:g} s"
    except aiohttp.ClientResponseError as e:  # its text contains the URL
        return "its answer is not HTTP: " + e.message.partition("\n")[0]
    except (aiohttp.ClientError, OSError) as e:
        return f"{type(e).__name__}: {e}".replace(url, shown_url(url))
