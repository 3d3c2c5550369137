"""Verb `report`, which shows what failures cost, as text, as JSON or as one HTML file (report_page.py)."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.text import Text

from lighthouse.cli.layout import Column, table
from lighthouse.cli.options import EVERY_JOB, ClientOptions, client_options, read_coordinator
from lighthouse.cli.report_page import count_of, headline, hours, means, model_text, page, title
from lighthouse.cli.tables import wrapped
from lighthouse.job.costs import LOST, Report, Seconds, add_up
from lighthouse.job.ledger import CAUSES, Cause
from lighthouse.store.ledger_files import LedgerFiles
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_runtime.cli import Duration

if TYPE_CHECKING:
    _ParamType = click.ParamType[float]
else:
    _ParamType = click.ParamType  # not generic before click 8.3

SHOWN = 20  # hosts and groups
WIDEST = 100
_DAYS_AGO = re.compile(r"(\d{1,5}(?:\.\d{1,5})?)([mhd])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}
DAY_S = 86400.0
LAST_DAY = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
_PRICE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(?:/h)?")


class Moment(_ParamType):
    """Click type for a local date, a local date and time, or an age such as 7d. The value is a Unix time."""

    name = "moment"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            if ago := _DAYS_AGO.fullmatch(str(value)):
                return (datetime.now(UTC) - timedelta(**{_UNITS[ago[2]]: float(ago[1])})).timestamp()
            return datetime.fromisoformat(str(value)).timestamp()
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is not a moment; write for example 7d, 2026-11-28 or 2026-11-28T10:00", param, ctx)


class Price(_ParamType):
    """Click type for a price per hour, such as 2.5/h."""

    name = "price"

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = _PRICE.fullmatch(str(value))
        if found is None:
            self.fail(f"{value!r} is not a price per hour; write for example 2.5/h", param, ctx)
        return float(found[1])


@click.command()
@click.argument("source", metavar="[ADDRESS|JOURNAL|FOLDER]", required=False)
@click.option("--since", type=Moment(), help="Begin: 7d (ago), 2026-11-28 or 2026-11-28T10:00.  [default: all records]")
@click.option("--until", type=Moment(), help="End, in the same forms.  [default: the newest record]")
@click.option("--price", type=Price(), metavar="AMOUNT/h", help="Price of one rank (usually one GPU) per hour.")
@click.option(
    "--checkpoint-every",
    type=Duration(),
    default="30m",
    show_default=True,
    help="Compare with restarts from checkpoints this far apart.",
)
@click.option(
    "--output",
    "html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the report to an HTML file, too.",
)
@client_options(job_help=EVERY_JOB, timeout="30s")
def report(
    given: ClientOptions,
    source: str | None,
    since: float | None,
    until: float | None,
    price: float | None,
    checkpoint_every: float,
    html: Path | None,
) -> None:
    """Show what failures cost: hours by cause, host and group, and times to failure and recovery.

    Reads the records of a running lighthouse (ADDRESS, or --lighthouse), or its files. For files, give the path of its
    journal or of its incident folder.
    """
    if since is not None and until is not None and since >= until:
        raise click.UsageError("--since must be before --until")
    lines = _read(given, source, since, until)
    costs = add_up(lines, given.job, since, until, checkpoint_every_s=checkpoint_every, price_per_h=price)
    if html is not None:
        try:
            html.write_text(page(costs), encoding="utf-8")
        except OSError as e:
            raise InvalidRequest(f"{html}: {e.strerror}", field="--output") from e
        click.echo(f"wrote {html}", err=True)
    given.show(costs, lambda width: text(costs, min(width, WIDEST)))


def _read(given: ClientOptions, source: str | None, since: float | None, until: float | None) -> list[str]:
    first = "" if since is None else f"{datetime.fromtimestamp(since, UTC):%Y%m%d}"
    # A fault is written again when its groups are back, which may be a day later.
    last = "99991231" if until is None else f"{datetime.fromtimestamp(min(until + DAY_S, LAST_DAY), UTC):%Y%m%d}"
    if source is not None and _is_path(source):
        folder = Path(source).with_suffix(".incidents") if source.endswith(".sqlite") else Path(source)
        try:
            is_folder = folder.is_dir()
        except OSError as e:
            raise InvalidRequest(f"{folder} cannot be read: {e.strerror}") from e
        if not is_folder:
            raise InvalidRequest(f"{folder}: there is no such folder")
        return _pages(LedgerFiles(folder).read, first, last)
    if source is not None:
        files = given.coordinator.files
        given = dataclasses.replace(
            given, coordinator=read_coordinator(click.get_current_context(), None, source).with_files(files)
        )
    with given.connect() as client:
        return _pages(lambda name: client.ledger(name, given.job, timeout_s=given.timeout), first, last)


def _is_path(source: str) -> bool:
    if source.endswith(".sqlite") or ("/" in source and "://" not in source):
        return True
    try:
        return Path(source).exists()
    except OSError:  # longer than a file's name: the addresses of several lighthouses
        return False


def _pages(read: "Callable[[str], tuple[list[str] | tuple[str, ...], str]]", first: str, last: str) -> list[str]:
    lines, name = list[str](), first
    while True:
        some, name = read(name)
        lines += some
        if not name or name[:8] > last:
            return lines


def text(costs: Report, width: int) -> Iterator[Text]:
    """Return the report as lines of text."""
    if title(costs):
        yield from wrapped(Text(title(costs), "bold"), width)
    yield from wrapped(Text(headline(costs)), width)
    if not costs.group_s:
        return
    columns: list[Column[Cause]] = [
        Column("CAUSE", lambda cause: cause.value),
        Column("HOURS", lambda cause: hours(costs.seconds[cause], costs), is_number=True),
        Column("SHARE", lambda cause: f"{costs.seconds[cause] / costs.group_s:.2%}", is_number=True),
    ]
    if (money := costs.money) is not None:
        columns.append(Column("MONEY", lambda cause: f"{money[cause]:,.2f}", is_number=True))
    yield Text()
    yield from table(columns, CAUSES, width)
    yield from _shares("HOST", costs, costs.by_host, costs.faults_by_host, width)
    yield from _shares("GROUP", costs, costs.by_group, costs.faults_by_group, width)
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(fault.kind for fault in costs.faults).most_common())
    yield Text()
    yield from wrapped(Text(f"{count_of(costs)}{': ' * bool(kinds)}{kinds}"), width)
    for name, value in means(costs):
        yield Text(f"  {name:<28}{value:>8}")
    yield Text()
    yield from wrapped(Text(model_text(costs)), width)


def _shares(
    title: str, costs: Report, spent: Mapping[str, Seconds], faults: Mapping[str, int], width: int
) -> Iterator[Text]:
    names = sorted(spent, key=lambda name: -sum(spent[name][cause] for cause in LOST))
    columns: list[Column[str]] = [
        Column(title, lambda name: name, comfort=12),
        *(
            Column(cause.upper(), lambda name, cause=cause: hours(spent[name][cause], costs), is_number=True)
            for cause in CAUSES
        ),
        Column("FAULTS", lambda name: str(faults[name]), is_number=True),
    ]
    yield Text()
    yield from table(columns, names[:SHOWN], width)
    if len(names) > SHOWN:
        yield Text(f"and {len(names) - SHOWN} more, with less lost time")
