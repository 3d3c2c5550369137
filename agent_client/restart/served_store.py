"""The TCPStore that `store_kwargs` describes, where no supervisor serves it: in the process of slot 0."""

import os
from datetime import timedelta
from typing import Any

from agent_client.agent.environment import Variables
from agent_client.errors import ConfigurationError
from agent_client.restart.launch import Launch
from agent_client.restart.options import Options
from lighthouse_protocol.identity import Address
from lighthouse_protocol.limits import MASTER_PORT, STORE_PORT_OFFSET
from lighthouse_runtime.process.children import who_listens

_served: dict[int, object] = {}
"""By port; until the process ends, so that every call of a wrapped function finds the same store."""


def serve_store(options: Options, launch: Launch) -> None:
    """Raises ConfigurationError if it cannot be served."""
    if not options.store_kwargs:
        return
    given: dict[str, Any] = {"wait_for_workers": False, **options.store_kwargs}
    variables = Variables(os.environ)
    given.setdefault("host_name", variables.text("MASTER_ADDR").strip("[]") or "127.0.0.1")
    given.setdefault("port", (variables.number("MASTER_PORT") or MASTER_PORT) + STORE_PORT_OFFSET)
    port = given["port"]
    if port == launch.store_port or port in _served or not given.setdefault("is_master", launch.slot == 0):
        return
    if "timeout" in given:
        given["timeout"] = timedelta(seconds=options.store_timeout_s)
    remedy = "leave store_kwargs out if the script needs no store, or is_master=False if another process serves it"
    try:
        from torch.distributed import TCPStore

        _served[port] = TCPStore(**given)
    except ImportError as e:
        raise ConfigurationError(f"store_kwargs needs torch ({e}); {remedy}") from None
    except (RuntimeError, TypeError, ValueError) as e:
        why = f"{who_listens(port)} listens there" if "EADDRINUSE" in str(e) else str(e).partition("\n")[0]
        raise ConfigurationError(
            f"store_kwargs: cannot serve a TCPStore on {Address(given['host_name'], port)}: {why}; give another port; "
            f"{remedy}"
        ) from None
