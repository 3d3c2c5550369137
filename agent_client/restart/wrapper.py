"""The Wrapper decorator, and the TCPStore that it can serve for the script.

The decorator binds the arguments of a call once. WrappedCall (call.py) then runs the attempts. If `store_kwargs` is
given and no supervisor serves that store, the process of slot 0 does.
"""

import functools
import inspect
import logging
import os
import typing
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ParamSpec, TypeVar

from agent_client.errors import ConfigurationError
from agent_client.restart.call import CallWrapper, WrappedCall
from agent_client.restart.options import Launch, Options
from agent_client.step.environment import Variables
from lighthouse_protocol.identity import Address
from lighthouse_protocol.limits import MASTER_PORT, STORE_PORT_OFFSET
from lighthouse_runtime.process.children import describe_listener

log = logging.getLogger(__name__)


_served: dict[int, object] = {}
"""Served stores by port. They are kept until the process exits, so that all calls of wrapped functions share them."""


def serve_store(options: Options, launch: Launch) -> None:
    """Serve the TCPStore of `store_kwargs`, by default if this process has slot 0. Do nothing if it is served already.

    `is_master` in `store_kwargs` overrides the default.
    """
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
        why = f"{describe_listener(port)} listens there" if "EADDRINUSE" in str(e) else str(e).partition("\n")[0]
        raise ConfigurationError(
            f"store_kwargs: cannot serve a TCPStore on {Address(given['host_name'], port)}: {why}; give another port; "
            f"{remedy}"
        ) from None


P = ParamSpec("P")
T = TypeVar("T")


class Wrapper:
    """Decorator that runs a function again in the same process after a failure of any rank of the run.

    When a rank fails or dies, the function is interrupted on all ranks, their process groups are aborted, and the
    function starts again in the next *generation*, the lighthouse's number for an attempt. A spare rank replaces a dead
    one. The function receives a CallWrapper in the parameter that has this annotation or is named `call_wrapper`.

    Once all active ranks have returned, the decorated function returns its result, or None on a spare rank. It raises
    RestartAbort (exit code 130) if the run is stopped, and LighthouseError if this process may not take part.

    Example:
        ```python
        from agent_client import CallWrapper, Wrapper

        @Wrapper(use_global_iteration=True, active_world_size=6)  # of eight ranks, two are spares
        def train(call_wrapper: CallWrapper) -> None:
            for step in range(load_checkpoint(), 1000):
                ...
                call_wrapper.ping(step)

        train()
        ```
    """

    def __init__(self, **options: Any) -> None:
        """Set the options.

        Args:
            **options: Fields of `agent_client.restart.options.Options`, listed in docs/reference/options.md.

        Raises:
            ConfigurationError: An option is unknown or has an invalid value.
        """
        self.options = Options.of(options)

    def __call__(self, function: Callable[P, T]) -> Callable[..., T | None]:
        signature = inspect.signature(function)
        taken = next(filter(_is_call_wrapper, signature.parameters.values()), None)

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> T | None:
            own = None if taken is None or taken.name in kwargs else taken.name
            # Bind the arguments once for all attempts. If they do not match, a restart would not help.
            others = [parameter for parameter in signature.parameters.values() if parameter.name != own]
            try:
                given = dict(signature.replace(parameters=others).bind(*args, **kwargs).arguments)
            except TypeError as e:
                raise TypeError(f"{function.__qualname__}(): {e}") from None

            def call(call_wrapper: CallWrapper) -> T:
                arguments = given if own is None else {**given, own: call_wrapper}
                bound = inspect.BoundArguments(signature, typing.cast(Any, arguments))
                return typing.cast(Callable[..., T], function)(*bound.args, **bound.kwargs)

            serve_store(self.options, self.options.launch())
            return WrappedCall(call, self.options).run()

        return wrapped


def _is_call_wrapper(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return parameter.name == "call_wrapper" or CallWrapper.__name__ in text
