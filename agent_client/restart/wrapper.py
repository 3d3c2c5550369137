"""@Wrapper: run a function again in its process, together with all ranks of its run, after a fault in any of them."""

import functools
import inspect
import logging
import typing
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from agent_client.restart.call import CallWrapper, WrappedCall
from agent_client.restart.options import Options
from agent_client.restart.served_store import serve_store

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Wrapper:
    """Decorator that runs a function again in the same process after a fault in any rank of the run.

    When a rank fails or dies, the function is interrupted in all ranks, their process groups are closed, and it starts
    again in the next generation. A spare rank takes the place of a dead one. The function gets its CallWrapper through
    the parameter with that annotation, or with the name `call_wrapper`.

    The decorated function returns the function's result once all active ranks have returned, or None on a spare. It
    raises RestartAbort (exit code 130) when the run is stopped, and a LighthouseError if this process may not take
    part.

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
            ConfigurationError: An option is unknown or does not fit.
        """
        self.options = Options.of(options)

    def __call__(self, function: Callable[P, T]) -> Callable[..., T | None]:
        signature = inspect.signature(function)
        name = _parameter(signature)

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> T | None:
            own = None if name in kwargs else name
            given = _bind(function, signature, own, args, kwargs)

            def call(call_wrapper: CallWrapper) -> T:
                arguments = given if own is None else {**given, own: call_wrapper}
                bound = inspect.BoundArguments(signature, typing.cast(Any, arguments))
                return typing.cast(Callable[..., T], function)(*bound.args, **bound.kwargs)

            serve_store(self.options, self.options.launch())
            return WrappedCall(call, self.options).run()

        return wrapped


def _parameter(signature: inspect.Signature) -> str | None:
    """By which the function takes its CallWrapper: by its annotation, or by its name."""
    for parameter in signature.parameters.values():
        annotation = parameter.annotation
        text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
        if parameter.name == "call_wrapper" or CallWrapper.__name__ in text:
            return parameter.name
    return None


def _bind(
    function: Callable[..., Any], signature: inspect.Signature, own: str | None, args: Sequence[Any], kwargs: Any
) -> dict[str, Any]:
    """The arguments of every call, by parameter, without `own`, which the wrapper fills in, wherever it stands.

    Raises TypeError for arguments that do not fit: no restart would fix them.
    """
    others = [parameter for parameter in signature.parameters.values() if parameter.name != own]
    try:
        return dict(signature.replace(parameters=others).bind(*args, **kwargs).arguments)
    except TypeError as e:
        raise TypeError(f"{function.__qualname__}(): {e}") from None
