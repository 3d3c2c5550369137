"""The report as one HTML file with inline style and SVG. It contains no scripts and loads no other files."""

from collections.abc import Iterable, Iterator, Mapping
from html import escape
from importlib import resources

from lighthouse.cli.incidents import clock
from lighthouse.job.costs import LOST, Report, Seconds
from lighthouse.job.ledger import CAUSES, Cause
from lighthouse_runtime.cli import format_duration

ROWS = 50  # in a table
MEANING = {
    Cause.COMPUTE: "committed steps, including their collectives.",
    Cause.WAIT: "in a quorum, but in no step: for lost, healing or slow groups, or for the next quorum.",
    Cause.REPEATED: "discarded steps, and steps that had been committed before.",
    Cause.HEAL: "receiving the state of another group, until the next step.",
    Cause.RESTART: "starting again, until the first request for a quorum.",
    Cause.DOWN: "lost, from the last heartbeat on.",
    Cause.IDLE: "in no quorum without a failure: the first start, spares.",
}


def page(costs: Report) -> str:
    """Return the report as an HTML document."""
    style = resources.files(__package__ or "").joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>What failures cost</title><style>{style}</style></head><body><h1>What failures cost</h1>"
        f'<p class="soft">{escape(title(costs))}</p><p>{headline(costs)}</p>'
        f"{''.join(_body(costs)) if costs.group_s else ''}</body></html>\n"
    )


def title(costs: Report) -> str:
    """Return the job and the period. Without records, a period that the caller has not chosen does not exist."""
    return ", ".join([f"job {costs.job}"] * bool(costs.job) + [period(costs)] * bool(costs.until_unix_s))


def period(costs: Report) -> str:
    return f"{clock(costs.since_unix_s)[:16]} to {clock(costs.until_unix_s)[:16]}"


def headline(costs: Report) -> str:
    if not costs.group_s:
        return "There are no records in this period."
    gap_s = costs.until_unix_s - costs.since_unix_s - costs.recorded_s
    return (
        f"{_hours(costs.group_s)} of {costs.groups:.3g} groups: {costs.goodput:.2%} in committed steps, at most "
        f"{_hours(costs.lost_s)} lost to failures."
        + (f" Nothing is recorded for {_duration(gap_s)} of the period." if gap_s > 1 else "")
    )


def means(costs: Report) -> Iterator[tuple[str, str]]:
    """Yield the name and the formatted value of each mean time in the report."""
    for name, seconds in (
        ("mean time to failure", costs.mttf_s),
        ("mean time to notice", costs.notice_s),
        ("mean time to recover", costs.recover_s),
        ("mean time until all are back", costs.back_s),
    ):
        yield name, _duration(seconds)


def count_of(costs: Report) -> str:
    return f"{len(costs.faults)} {'fault' if len(costs.faults) == 1 else 'faults'}"


def model_text(costs: Report) -> str:
    """Describe what the same faults would have cost with restarts from checkpoints, and explain the estimate."""
    if not costs.faults:
        return "There were no faults, so restarts from checkpoints would have cost nothing either."
    every, half, restart = map(_duration, (costs.checkpoint_every_s, costs.checkpoint_every_s / 2, costs.restart_s))
    how = "assumed" if costs.back_s is None else "as measured here"
    return (
        f"With a checkpoint every {every}, the same faults would have cost {_hours(costs.checkpoints_lost_s)}. "
        f"Here, they cost at most {_hours(costs.lost_s)}. The model: each of {count_of(costs)} costs each of "
        f"{costs.groups:.3g} groups half an interval ({half}) and one restart ({restart}, {how}). Writing "
        f"checkpoints costs nothing. The cost here is all time of {', '.join(LOST[:-1])} and {LOST[-1]}, even if "
        "a slow group was the reason."
    )


def hours(seconds: float, costs: Report) -> str:
    """Format seconds as hours for a table, with more digits if the report covers little training time."""
    return f"{seconds / 3600:,.{2 if costs.group_s > 36_000 else 4}f}"


def _duration(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds).replace("m00s", "m").replace("h00m", "h")


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.{0 if seconds >= 360_000 else 1 if seconds >= 36_000 else 2}f} h"


def _body(costs: Report) -> Iterator[str]:
    lost = [("lost to failures", _hours(costs.lost_s)), ("with checkpoints instead", _hours(costs.checkpoints_lost_s))]
    if (money := costs.money) is not None:
        lost.append((f"lost, at {costs.price_per_h:g}/h per rank", f"{sum(money[cause] for cause in LOST):,.2f}"))
    tiles = [("in committed steps", f"{costs.goodput:.2%}"), *lost, *means(costs)]
    yield f'<div class="tiles">{"".join(f"<div><b>{value}</b>{name}</div>" for name, value in tiles)}</div>'
    yield f"<h2>Hours by cause</h2>{_bar(costs.seconds, 24)}"
    yield _table(
        ("cause", "#hours", "#share", *(["#money"] * (money is not None))),
        (
            (
                f'<i class="{cause}"></i>{cause}',
                hours(costs.seconds[cause], costs),
                f"{costs.seconds[cause] / costs.group_s:.2%}",
                *([f"{money[cause]:,.2f}"] if money is not None else []),
            )
            for cause in CAUSES
        ),
    )
    meaning = " ".join(f"{cause.title()}: {text}" for cause, text in MEANING.items())
    yield f'<p class="soft">{meaning}</p>'
    yield f"<h2>Over time</h2>{_over_time(costs)}<h2>With checkpoints instead</h2><p>{escape(model_text(costs))}</p>"
    yield f"<h2>Hosts</h2>{_shares('host', costs.by_host, costs.faults_by_host)}"
    yield f"<h2>Groups</h2>{_shares('group', costs.by_group, costs.faults_by_group)}<h2>Faults</h2>"
    yield _table(
        ("at", "kind", "what", "#noticed", "#recovered", "#back"),
        (
            (
                clock(fault.opened_unix_s),
                fault.kind,
                escape(fault.text),
                *map(_duration, (fault.noticed_s, fault.step_s, fault.back_s)),
            )
            for fault in reversed(costs.faults)
        ),
    )


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return an HTML table of at most ROWS rows of HTML cells. A # before a title marks a column of numbers."""
    classes = ["n" if title.startswith("#") else "name" for title in titles]
    head = "".join(f'<th class="{kind}">{title.lstrip("#")}' for kind, title in zip(classes, titles, strict=True))
    found = [zip(classes, row, strict=True) for row in rows]
    body = "".join(f"<tr>{''.join(f'<td class={kind}>{cell}' for kind, cell in row)}" for row in found[:ROWS])
    more = f'<p class="soft">and {len(found) - ROWS} more</p>' if len(found) > ROWS else ""
    return f'<div class="wide"><table><tr>{head}{body}</table></div>{more}'


def _shares(title: str, spent: Mapping[str, Seconds], faults: Mapping[str, int]) -> str:
    lost_s = {name: sum(seconds[cause] for cause in LOST) for name, seconds in spent.items()}
    rows = (
        (escape(name), _bar(spent[name], 14), _hours(lost_s[name]), str(faults[name]))
        for name in sorted(spent, key=lambda name: (-lost_s[name], name))
    )
    return _table((title, "time by cause", "#lost", "#faults"), rows)


def _bar(seconds: Seconds, height: int) -> str:
    x, total, parts = 0.0, sum(seconds.values()) or 1.0, list[str]()
    for cause, spent_s in seconds.items():
        width = 1000 * spent_s / total
        title = f"<title>{cause}: {_hours(spent_s)}</title>"
        parts.append(f'<rect class="{cause}" x="{x:.2f}" width="{width:.2f}" height="10">{title}</rect>' * (width > 0))
        x += width
    return _svg("hours by cause", 1000, 10, height, parts)


def _over_time(costs: Report) -> str:
    """Return a bar chart of the average number of groups that spent their time on each cause, over the period."""
    most = max(sum(seconds.values()) for seconds in costs.columns)
    column_s = (costs.until_unix_s - costs.since_unix_s) / len(costs.columns)
    parts: list[str] = []
    for i, seconds in enumerate(costs.columns):
        y, named = 100.0, ", ".join(f"{cause} {_hours(spent_s)}" for cause, spent_s in seconds.items() if spent_s)
        parts.append(f"<g><title>{clock(costs.since_unix_s + i * column_s)}: {named or 'no records'}</title>")
        for cause, spent_s in seconds.items():
            height = 100 * spent_s / most
            y -= height
            rect = f'<rect class="{cause}" x="{i + 0.04:.2f}" y="{y:.2f}" width=".92" height="{height:.2f}"/>'
            parts.append(rect * (height > 0))
        parts.append("</g>")
    graph = _svg("groups by cause over time", len(costs.columns), 100, 160, parts)
    return f'<p class="soft">Groups by cause, up to {most / column_s:.3g}; {period(costs)}</p>{graph}'


def _svg(label: str, width: int, height: int, pixels: int, parts: Iterable[str]) -> str:
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {width} {height}" height="{pixels}" '
        f'preserveAspectRatio="none">{"".join(parts)}</svg>'
    )
