"""Incidents as JSON files, one per incident, written atomically in a background thread.

Training does not depend on these files. If the folder is not writable, the lighthouse logs the error once and continues
without them.
"""

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path

from lighthouse.job.incidents import LIMIT, surplus
from lighthouse_protocol.messages.incident import Incident, from_document, to_document
from lighthouse_protocol.refusals import InvalidRequest
from lighthouse_protocol.wire.codec import INCIDENT_SUMMARY
from lighthouse_runtime.log_event import event
from lighthouse_runtime.process.files import make_private, write_private

log = logging.getLogger(__name__)


MAX_PENDING = 64
MAX_FOLDER_BYTES = 256 * 1024 * 1024
MAX_FILE_BYTES = 128 * 1024 * 1024
CLOSED_WITHIN_S = 2.0


class IncidentFiles:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer = ThreadPoolExecutor(1, "incidents")
        self._lock = threading.Lock()
        self._pending: dict[str, Incident] = {}
        self._jobs: dict[str, str] = {}  # incident id to job, for the files in the folder
        self._has_failed = False

    def load(self) -> list[Incident]:
        """Read the newest LIMIT incidents that earlier processes have written, on the calling thread.

        An invalid file is logged and skipped.
        """
        found: list[Incident] = []
        for path in self._paths()[-LIMIT:]:
            try:
                if path.stat().st_size > MAX_FILE_BYTES:
                    raise ValueError(f"it has more than {MAX_FILE_BYTES >> 20} MiB")
                incident = from_document(json.loads(path.read_bytes()))
                # A value that no message can contain would break each status.
                INCIDENT_SUMMARY.read(INCIDENT_SUMMARY.write(incident.summary))
                found.append(incident)
                self._jobs[incident.id] = incident.summary.job
            except (InvalidRequest, OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
                log.warning(
                    "ignoring %s, which is not an incident file (%s: %s)",
                    path,
                    type(e).__name__,
                    e,
                    extra=event("incident_unreadable", file=str(path)),
                )
        return found

    def save(self, incident: Incident) -> None:
        """Queue an incident for writing, replacing any queued version. If the queue is full, drop the incident."""
        with self._lock:
            is_queued = incident.id in self._pending
            is_full = not is_queued and len(self._pending) >= MAX_PENDING
            if not is_full:
                self._pending[incident.id] = incident
        if is_full:
            log.warning(
                "incident %s was not saved: %s is too slow",
                incident.id,
                self.folder,
                extra=event("incident_not_filed", job=incident.summary.job, incident=incident.id),
            )
        elif not is_queued:
            self._writer.submit(self._write, incident.id)

    def close(self) -> None:
        """Wait for up to CLOSED_WITHIN_S until the queued incidents are written."""
        last = self._writer.submit(lambda: None)
        wait_for([last], CLOSED_WITHIN_S)
        self._writer.shutdown(wait=False, cancel_futures=True)

    # -- on the writer's thread

    def _write(self, id: str) -> None:
        with self._lock:
            incident = self._pending.pop(id)
        try:
            make_private(self.folder)
            # Readable by its owner only, because evidence contains a job's output.
            write_private(self.folder / f"{id}.json", json.dumps(to_document(incident), indent=1).encode())
            self._jobs[id] = incident.summary.job
            self._prune()
            self._has_failed = False
        except (OSError, ValueError) as e:
            if not self._has_failed:
                log.warning(
                    "incident %s was not saved: %s; set --incident-dir to a writable folder",
                    id,
                    e,
                    extra=event("incident_not_filed", incident=id),
                )
            self._has_failed = True

    def _prune(self) -> None:
        """Delete files, each the oldest of the largest job, until at most LIMIT files and MAX_FOLDER_BYTES are left."""
        kept = [(path.stem, self._jobs.get(path.stem, ""), path.stat().st_size) for path in self._paths()]
        for id in surplus(kept, LIMIT, MAX_FOLDER_BYTES):
            (self.folder / f"{id}.json").unlink(missing_ok=True)
            self._jobs.pop(id, None)

    def _paths(self) -> list[Path]:
        """Return the files, oldest first, by the time at the start of their names."""
        return sorted(self.folder.glob("*.json"))
