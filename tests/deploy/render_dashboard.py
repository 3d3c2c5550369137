"""The dashboard's panels as a picture, from a live Prometheus: a rough look where no Grafana runs.

    python -m tests.deploy.render_dashboard http://127.0.0.1:9090 [MINUTES [END]] > dashboard.png

It draws what the panels' own queries return, at their places and with their titles, units and legends; END is a moment
in seconds since 1970.
"""

import json
import re
import sys
import time
import urllib.parse
import urllib.request
from typing import Any

import matplotlib as mpl

mpl.use("agg")

from matplotlib import pyplot as plt  # noqa: E402

from tests.deploy.test_prometheus import dashboard  # noqa: E402

POINTS = 240


def ask(url: str, path: str, **values: object) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(values)}", timeout=60) as answer:
        return json.load(answer)["data"]["result"]


def legend(text: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{ *(\w+) *\}\}", lambda found: labels.get(found[1], ""), text)


def with_unit(value: float, unit: str, decimals: int | None) -> str:
    match unit:
        case "percentunit":
            return f"{value:.1%}"
        case "s":
            return f"{value:.3g} s"
        case _:
            return f"{value:g}" if decimals is None and value < 1e6 else f"{value:.{decimals or 0}f}"


def draw(panel: dict[str, Any], axes: Any, url: str, begin: float, end: float) -> None:
    unit, decimals = panel["fieldConfig"]["defaults"]["unit"], panel["fieldConfig"]["defaults"].get("decimals")
    axes.set_title(panel["title"], fontsize=9, loc="left")
    found: list[tuple[str, list[float], list[float]]] = []
    for target in panel["targets"]:
        expression = target["expr"].replace("$job", ".*")
        if panel["type"] == "stat":
            rows = ask(url, "query", query=expression, time=end)
            found += [(legend(target["legendFormat"], r["metric"]), [], [float(r["value"][1])]) for r in rows]
            continue
        rows = ask(url, "query_range", query=expression, start=begin, end=end, step=max(1, (end - begin) / POINTS))
        for series in rows:
            times, values = zip(*((at, float(value)) for at, value in series["values"]), strict=True)
            found.append((legend(target["legendFormat"], series["metric"]), list(times), list(values)))
    if panel["type"] == "stat":
        axes.axis("off")
        shows_name = panel["options"]["textMode"] == "name"
        text = "\n".join(name if shows_name else with_unit(values[0], unit, decimals) for name, _, values in found)
        axes.text(0.5, 0.4, text or "no data", ha="center", va="center", fontsize=12)
        return
    bars = panel["fieldConfig"]["defaults"]["custom"]["drawStyle"] == "bars"
    for name, times, values in found:
        minutes = [(at - end) / 60 for at in times]
        axes.plot(minutes, values, label=name, linewidth=1, drawstyle="steps-post" if bars else "default")
    axes.set_xlim((begin - end) / 60, 0)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
    axes.set_ylabel(unit, fontsize=7)
    if found:
        axes.legend(fontsize=6, loc="upper left")
    else:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center")


def main(url: str, minutes: float, end: float) -> None:
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = plt.figure(figsize=(18, height * 0.42))
    for panel in panels:
        at = panel["gridPos"]
        left, bottom = at["x"] / 24 + 0.025, 1 - (at["y"] + at["h"]) / height + 0.014
        axes = figure.add_axes((left, bottom, at["w"] / 24 - 0.035, at["h"] / height - 0.03))
        draw(panel, axes, url, end - 60 * minutes, end)
    figure.savefig(sys.stdout.buffer, dpi=75)


if __name__ == "__main__":
    main(
        sys.argv[1],
        float(sys.argv[2]) if len(sys.argv) > 2 else 60.0,
        float(sys.argv[3]) if len(sys.argv) > 3 else time.time(),
    )
