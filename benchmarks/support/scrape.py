"""Scraping of a daemon's metrics."""

import ssl
import urllib.request

from benchmarks.support.daemons import HERE, Daemon
from lighthouse_protocol.rules.access import Role
from lighthouse_runtime.security.credentials import Tokens

TIMEOUT_S = 5.0


def scrape(daemon: Daemon) -> dict[str, float]:
    """Return the values by name and labels. Raises OSError if the daemon does not answer."""
    with urllib.request.urlopen(_asked(daemon), timeout=TIMEOUT_S, context=_context(daemon)) as answer:
        lines = answer.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def _asked(daemon: Daemon) -> urllib.request.Request:
    where = f"{HERE}:{daemon.http_port}/metrics"
    if daemon.credentials is None:
        return urllib.request.Request(f"http://{where}")
    token = Tokens.read(daemon.credentials).newest(Role.VIEW)
    return urllib.request.Request(f"https://{where}", headers={"Authorization": f"Bearer {token}"})


def _context(daemon: Daemon) -> ssl.SSLContext | None:
    return None if daemon.credentials is None else ssl.create_default_context(cafile=daemon.credentials / "ca.pem")


def is_standing(lighthouse: Daemon) -> bool:
    """Check whether the default job has a standing quorum."""
    try:
        return scrape(lighthouse).get('lighthouse_quorum_phase{job="default",phase="standing"}') == 1.0
    except OSError:
        return False
