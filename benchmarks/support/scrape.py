"""A daemon's metrics, as a scraper reads them."""

import urllib.request

from benchmarks.support.daemons import HERE, Daemon

TIMEOUT_S = 5.0


def scrape(daemon: Daemon) -> dict[str, float]:
    """Values by name and labels. Raises OSError if it does not answer."""
    with urllib.request.urlopen(f"http://{HERE}:{daemon.http_port}/metrics", timeout=TIMEOUT_S) as answer:
        lines = answer.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def is_standing(lighthouse: Daemon) -> bool:
    """The default job's quorum."""
    try:
        return scrape(lighthouse).get('lighthouse_quorum_phase{job="default",phase="standing"}') == 1.0
    except OSError:
        return False
