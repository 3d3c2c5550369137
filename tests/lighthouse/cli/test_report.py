"""`lighthouse report`: text, JSON and a page, from a lighthouse or from its files."""

import json
import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser

import pytest

from lighthouse.cli.report import report as report_command
from lighthouse.store.ledger_files import LedgerFiles
from tests.lighthouse.cli.conftest import unreadable

T = 1_790_000_000.0  # 2026-09-21
HOUR = 3600.0


def line(group: str, hours: tuple[float, float], host: str = "n1", **spent_h: float) -> str:
    period = {"from": T + hours[0] * HOUR, "to": T + hours[1] * HOUR}
    seconds = {cause: hours * HOUR for cause, hours in spent_h.items()}
    return json.dumps({"job": "default", "group": group, **period, "hosts": [host], "ranks": 4, "seconds": seconds})


FAULT = {"id": "i1", "job": "default", "kind": "loss", "text": "b: it <fell> silent", "suspects": ["b"]}
TIMES = {"opened_unix_s": T + HOUR + 2, "noticed_s": 2.0, "step_s": 2.5, "back_s": 90.0}
LINES = [
    line("a", (0, 10), compute=9.5, wait=0.5),
    line("b", (0, 10), "n2", compute=9.0, wait=0.5, repeated=0.1, heal=0.1, restart=0.2, down=0.1),
    json.dumps({"job": "default", "fault": {**FAULT, **TIMES}}),
]
TEXT = """\
20.0 h of 2 groups: 92.50% in committed steps, at most 1.50 h lost to failures.

CAUSE     HOURS   SHARE
compute   18.50  92.50%
wait       1.00   5.00%
repeated   0.10   0.50%
heal       0.10   0.50%
restart    0.20   1.00%
down       0.10   0.50%
idle       0.00   0.00%

HOST  COMPUTE  WAIT  REPEATED  HEAL  RESTART  DOWN  IDLE  FAULTS
n2       9.00  0.50      0.10  0.10     0.20  0.10  0.00       1
n1       9.50  0.50      0.00  0.00     0.00  0.00  0.00       0

GROUP  COMPUTE  WAIT  REPEATED  HEAL  RESTART  DOWN  IDLE  FAULTS
b         9.00  0.50      0.10  0.10     0.20  0.10  0.00       1
a         9.50  0.50      0.00  0.00     0.00  0.00  0.00       0

1 fault: 1 loss
  mean time to failure             10h
  mean time to notice             2.0s
  mean time to recover            2.5s
  mean time until all are back   1m30s

With a checkpoint every 30m, the same faults would have cost 0.55 h. Here, they
cost at most 1.50 h. The model: each of 1 fault costs each of 2 groups half an
interval (15m) and one restart (1m30s, as measured here). Writing checkpoints
costs nothing. The cost here is all time of wait, repeated, heal, restart and
down, even if a slow group was the reason.
"""
EMPTY = "There are no records in this period."


def lines_of(output: str) -> list[str]:
    return [each.rstrip() for each in output.splitlines()]


def test_text_of_80_columns(fake, run):
    fake.ledger = LINES
    output = lines_of(run(report_command, env={"COLUMNS": "80"}).output)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d to \d{4}-\d\d-\d\d \d\d:\d\d", output[0])
    assert output[1:] == TEXT.splitlines()


@pytest.mark.parametrize("width", ["40", "60", "80"])
def test_lines_are_no_wider_than_the_terminal(fake, run, width):
    fake.ledger = [*LINES, *(line(f"group-{i}-of-many", (0, 1), f"node-{i}.example", compute=1) for i in range(30))]
    output = run(report_command, "--price", "2.5/h", env={"COLUMNS": width}).output
    assert max(map(len, lines_of(output))) <= int(width)
    assert output.count("and 12 more, with less lost time") == 2


def test_json_has_the_same_numbers(fake, run):
    fake.ledger = LINES
    found = json.loads(run(report_command, "--json", "--price", "2.5/h").stdout)
    assert found["group_s"] == pytest.approx(20 * HOUR)
    assert found["seconds"]["restart"] == pytest.approx(0.2 * HOUR)
    assert (found["goodput"], found["mttf_s"], found["recover_s"], found["back_s"]) == (0.925, 36000, 2.5, 90)
    assert found["money"]["down"] == pytest.approx(0.1 * 4 * 2.5)
    assert found["by_host"]["n2"]["heal"] == pytest.approx(0.1 * HOUR)
    assert [fault["id"] for fault in found["faults"]] == ["i1"]


def test_pages_are_asked_for_until_the_last(fake, run):
    fake.ledger, fake.page_lines = LINES, 1
    assert json.loads(run(report_command, "--json", "--job", "default").stdout)["group_s"] == pytest.approx(20 * HOUR)
    assert [call["page"] for call in fake.calls] == ["", "20260920:1", "20260920:2"]
    assert {call["job"] for call in fake.calls} == {"default"}


def test_a_period_begins_at_its_day_and_ends_a_day_later(fake, run):
    fake.ledger, fake.page_lines = LINES, 1
    run(report_command, "--since", "2026-09-10", "--until", "2026-09-12")
    assert [call["page"][:8] for call in fake.calls] == ["20260910", "20260910", "20260910"]
    fake.calls.clear()
    output = run(report_command, "--since", "2026-09-01T00:00+00:00", "--until", "2026-09-02T00:00+00:00").output
    assert EMPTY in output
    fake.calls.clear()
    run(report_command, "--since", "3d")
    assert fake.calls[0]["page"] == f"{datetime.now(UTC) - timedelta(days=3):%Y%m%d}"


def test_an_address_is_a_lighthouse(fake, run):
    run(report_command, "other:4711")
    assert fake.calls[0]["address"] == "other:4711"


def test_the_files_of_a_lighthouse_that_has_ended(fake, run, tmp_path):
    LedgerFiles(tmp_path / "journal-1.incidents").append(LINES, T)
    for source in ("journal-1.sqlite", "journal-1.incidents"):
        found = json.loads(run(report_command, str(tmp_path / source), "--json").stdout)
        assert found["group_s"] == pytest.approx(20 * HOUR)
    assert fake.calls == []


def test_an_empty_history(fake, run, tmp_path):
    page = tmp_path / "r.html"
    result = run(report_command, "--output", str(page))
    assert result.exit_code == 0
    assert result.output.splitlines()[-1] == EMPTY
    assert EMPTY in page.read_text()
    assert "1970" not in result.output + page.read_text()
    assert run(report_command, "--job", "j").output == f"job j\n{EMPTY}\n"
    assert json.loads(run(report_command, "--json").stdout)["goodput"] is None


def test_the_addresses_of_several_lighthouses_may_be_longer_than_a_files_name(fake, run):
    addresses = ",".join(f"lighthouse-{i}.lighthouse.training.svc.cluster.local:29510" for i in range(5))
    assert EMPTY in run(report_command, addresses).output
    assert fake.calls[0]["address"] == addresses


@pytest.mark.parametrize("name", ["journal-1.sqlite", "journal-1.incidents"])
@pytest.mark.parametrize("private", [".", "journal-1.incidents"])
def test_the_files_of_another_user(run, tmp_path, name, private):
    """Neither are they empty, nor is standard output to blame."""
    LedgerFiles(tmp_path / "journal-1.incidents").append(LINES, T)
    with unreadable(tmp_path / private):
        result = run(report_command, str(tmp_path / name))
    assert result.exit_code == 1
    assert re.match(r"Error: .*cannot be read: .*Permission denied", result.output), result.output


@pytest.mark.parametrize("option", [("--until", "9999-12-31"), ("--since", "99999d"), ("--until", "99999d")])
def test_a_period_far_from_today(fake, run, option):
    fake.ledger = LINES
    result = run(report_command, *option, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["group_s"] == pytest.approx(0.0 if option == ("--until", "99999d") else 20 * HOUR)
    assert found["since_unix_s"] <= found["until_unix_s"]


def test_a_period_after_the_newest_record(fake, run):
    fake.ledger = LINES
    found = json.loads(run(report_command, "--since", "2026-09-30", "--json").stdout)
    assert found["group_s"] == 0
    assert found["since_unix_s"] == found["until_unix_s"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--price", "two"], "is not a price per hour; write for example 2.5/h"),
        (["--price", "-1/h"], "is not a price"),
        (["--since", "yesterday"], "is not a moment; write for example 7d"),
        (["--until", "2026-99-01"], "is not a moment"),
        (["--since", "2026-09-12", "--until", "2026-09-10"], "--since must be before --until"),
        (["--checkpoint-every", "0s"], "must be more than 0"),
        (["/nowhere/journal.sqlite"], "/nowhere/journal.incidents: there is no such folder"),
        (["nowhere.sqlite"], "there is no such folder"),
        (["--output", "/nowhere/r.html"], "--output: /nowhere/r.html: No such file or directory"),
        (["https://x:1"], "https"),
    ],
)
def test_wrong_arguments(fake, run, arguments, says):
    result = run(report_command, *arguments)
    assert result.exit_code
    assert says in result.output


class Page(HTMLParser):
    """Collects what a page loads, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text = ""
        self.rects = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [name for name, _ in attrs if name in ("src", "href")]
        self.loads += [tag] if tag in ("script", "link", "img", "iframe", "fell") else []
        self.rects += tag == "rect"

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_loads_nothing_and_shows_the_numbers(fake, run, tmp_path):
    fake.ledger, file = LINES, tmp_path / "r.html"
    result = run(report_command, "--output", str(file), "--price", "2.5/h")
    assert f"wrote {file}" in result.output
    page = Page(file.read_text())
    assert page.loads == []
    assert "url(" not in file.read_text()
    for shown in ("92.50%", "1.50 h", "15.00", "b: it <fell> silent", "10h", "18.50", "0.55 h"):
        assert shown in page.text, shown
    assert page.rects > 60  # the graph over time
    assert page.text.count("n2") == 1


def test_a_long_run_shows_the_first_rows(fake, run, tmp_path):
    fake.ledger = [line(f"g{i:03}", (0, 1), f"n{i:03}", compute=1) for i in range(70)]
    file = tmp_path / "r.html"
    assert run(report_command, "--output", str(file)).exit_code == 0
    assert Page(file.read_text()).text.count("and 20 more") == 2
