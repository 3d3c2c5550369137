"""Starts and stops the store process (program.py), without importing torch."""

import asyncio
import importlib.util
import sys
from pathlib import Path

from lighthouse_protocol.refusals import InvalidRequest

SCRIPT = Path(__file__).with_name("program.py")
START_TIMEOUT_S = 120.0
_REMEDY = "give --store HOST:PORT of a running TCPStore, or --store-python an interpreter that has torch"


def check_torch(python: str) -> None:
    """Raise InvalidRequest if `python` has no torch. Only the running interpreter is checked, not any other."""
    if python == sys.executable and importlib.util.find_spec("torch") is None:
        raise InvalidRequest(f"auto needs torch, and {python} has none: {_REMEDY}", field="--store")


class StoreProcess:
    """Child process that hosts the group's TCPStore."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self._process = process
        self.port = port

    @classmethod
    async def start(cls, python: str, host: str) -> "StoreProcess":
        """Start a store on a free port of `host`, or of all addresses if `host` is empty. Wait until it serves.

        `python` is an interpreter that has torch. Raise InvalidRequest if the store does not start. The message names
        the options that select another store or Python.
        """
        check_torch(python)
        try:
            process = await asyncio.create_subprocess_exec(
                python,
                str(SCRIPT),
                "0",
                host,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as e:
            raise InvalidRequest(f"cannot run {python}: {e.strerror or e}; {_REMEDY}", field="--store-python") from e
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
        except TimeoutError:
            line = b"no answer within %d s" % START_TIMEOUT_S
        word, _, number = line.decode(errors="replace").strip().partition(" ")
        if word != "store" or not number.isdigit():
            await _end(process)
            raise InvalidRequest(
                f"auto: {line.decode(errors='replace').strip() or 'the process exited'}: {_REMEDY}", field="--store"
            )
        return cls(process, int(number))

    async def wait(self) -> int:
        return await self._process.wait()

    async def stop(self) -> None:
        await _end(self._process)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), 2.0)
    except TimeoutError:
        process.kill()
        await process.wait()
