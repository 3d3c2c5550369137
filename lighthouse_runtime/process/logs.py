"""Logging of all our processes to standard error, as text or as JSON.

People need only the message of a line. Programs should read the line's fields (lighthouse_runtime/log_event.py) instead
of its message. Times are UTC in ISO 8601.
"""

import json
import logging
import re
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from lighthouse_protocol.limits import escaped

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

LINES_KEPT = 2000
REMOVED = "(removed)"
_CREDENTIAL = re.compile(r"(lighthouse://)[^\s/@]+@")
_TOKEN = re.compile(r"\blh[jov]_[\w-]{8,}")
_SECRET_VARIABLE = re.compile(
    r"\b((?=[A-Z0-9]*_|\w+['\"]?\s*[=:])"  # NAME=value, 'NAME': 'value', or NAME value if the name has an underscore
    r"[A-Z0-9_]*(?:SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|PRIVATE|API_KEY|ACCESS_KEY)[A-Z0-9_]*"
    r"['\"]?(?:\s*[=:]\s*|\s+)['\"]?)[^\s'\",;]+"
)


_secrets: list[str] = []  # secrets that this process knows


def set_up_logging(
    level: str,
    form: str,
    *,
    job: str = "",
    replica_group: str = "",
    secrets: Iterable[str] = (),
    output: logging.Handler | None = None,
) -> None:
    """Set up logging, replacing earlier settings.

    `level` is one of LEVELS, and `form` one of FORMATS. `job` and `replica_group` become fields of every JSON line,
    unless empty. `secrets` are removed from every line. `output` writes the lines, by default to standard error.
    Daemons pass a StandardError, because the default blocks while the reader is paused.
    """
    _secrets[:] = filter(None, secrets)
    handlers = [output or logging.StreamHandler(sys.stderr), _RecentLines()]
    own = {key: value for key, value in (("job", job), ("replica_group", replica_group)) if value}
    for handler in handlers:
        handler.setFormatter(_JsonFormatter(own) if form == "json" else _TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=handlers, force=True)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


def recent_lines() -> str:
    """Return the newest LINES_KEPT entries of this process's log, in the format used on standard error."""
    kept = (handler for handler in logging.getLogger().handlers if isinstance(handler, _RecentLines))
    return "".join(f"{line}\n" for handler in kept for line in tuple(handler.lines))


class _RecentLines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=LINES_KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def without_credentials(text: str) -> str:
    """Return `text` with credentials removed.

    Credentials are tokens, the credentials in join strings, the values of variables whose names suggest a secret
    (API_KEY=...), and the secrets passed to set_up_logging().
    """
    for secret in _secrets:
        text = text.replace(secret, REMOVED)
    text = _CREDENTIAL.sub(rf"\1{REMOVED}@", text)
    return _SECRET_VARIABLE.sub(rf"\1{REMOVED}", _TOKEN.sub(REMOVED, text))


def _without_credentials_in(value: object) -> object:
    """Return `value` for a JSON line, with credentials removed from its texts.

    In the line itself, the escapes of JSON would hide a credential, or become a part of it.
    """
    if isinstance(value, Mapping):
        return {key: _without_credentials_in(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_credentials_in(each) for each in value]
    return value if value is None or isinstance(value, int | float) else without_credentials(str(value))


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return getattr(record, "fields", {})


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname).1s %(name)s: %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        where = "/".join(str(fields[key]) for key in ("job", "run") if key in fields)
        record.message = f"[{where}] {record.message}" if where else record.message
        # A message may quote a caller's text, which must not look like a separate log line.
        record.message = re.sub(r"\n(?=\S)", "\n    ", record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        # A line may quote text of callers, which must not control a terminal.
        text = without_credentials(super().format(record))
        return text if text.replace("\n", "").isprintable() else "\n".join(map(escaped, text.split("\n")))


class _JsonFormatter(logging.Formatter):
    def __init__(self, own: Mapping[str, object]) -> None:
        super().__init__()
        self._own = own

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", "log"),
            **self._own,
            **_fields(record),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(_without_credentials_in(entry), ensure_ascii=False)
