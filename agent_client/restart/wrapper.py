"""The Wrapper decorator, the attempts of one call to a wrapped function, and the TCPStore that it can serve.

The decorator binds the arguments of a call once. `WrappedCall` then runs one attempt at a time, until all ranks have
finished or the run is stopped. It interrupts a running attempt when another rank fails, and cleans up before the next
attempt. The lighthouse (rank_thread.py) numbers the attempts. Without a lighthouse, `LocalAttempts` counts the
failures of this process. The function receives a `CallWrapper`.
"""

import contextlib
import functools
import inspect
import logging
import os
import time
import traceback
import typing
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any, Generic, ParamSpec, Self, TypeVar

from agent_client.errors import ConfigurationError
from agent_client.restart.interrupter import Interrupter, InterruptibleSection, Interruption, ProcessGroups
from agent_client.restart.options import Hook, Launch, Options
from agent_client.restart.rank_thread import RankThread
from agent_client.restart.rules.events import Ended, Run
from agent_client.restart.store import RestartAbort, State, StoreMixin
from agent_client.step import stop_signals as at_exit
from agent_client.step.environment import Variables
from lighthouse_protocol.identity import Address
from lighthouse_protocol.limits import MASTER_PORT, STORE_PORT_OFFSET
from lighthouse_protocol.messages.run import RunCompleted, RunCounters, RunStopped, RunTerms
from lighthouse_protocol.rules.rate_limits import RestartBudget
from lighthouse_runtime.process.children import describe_listener

log = logging.getLogger(__name__)

CAUSE_WITHIN_S = 2.0
"""Maximum time in seconds, even on a busy machine, from the closing of a failed peer's connections to the report of
the failure by the lighthouse."""
_POLL_S = 0.005

P = ParamSpec("P")
T = TypeVar("T")


class LocalAttempts:
    """Stands in for `RankThread` in a `WrappedCall` when there is no lighthouse. Numbers the attempts from 0.

    Only failures of this process start a new attempt. Failures of other processes are not detected.
    """

    def __init__(self, rank: int, world_size: int, terms: RunTerms, state: State) -> None:
        self._place = rank, world_size
        self._state = state
        self._terms = terms
        self._counters = RunCounters()
        self._has_returned = False
        self._budget = RestartBudget()
        self._last_failure = ""
        self._began_at = 0.0
        self._has_stepped = False
        self._delay_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ready(self) -> None:
        pass

    def next_order(self) -> Run | Ended:
        if self._has_returned:
            return Ended(RunCompleted(self._counters.number))
        number, limit = self._counters.number + 1, self._terms.max_iterations
        if limit is not None and number >= limit:
            return Ended(RunStopped(f"max_iterations: {limit} iterations were run", "", number - 1))
        if why := self._budget.why_exhausted(self._terms):
            return Ended(RunStopped(f"{why}; the last: {self._last_failure}", "", number - 1))
        time.sleep(self._delay_s)
        self._began_at, self._has_stepped = time.monotonic(), False
        self._counters = RunCounters(number, job_restarts=number, ranks_restarts=number)
        return Run(self._counters, *self._place)

    def begin_generation(self, run: Run) -> None:
        self._state.begin_generation(run.counters, run.rank, run.world_size)

    def raised(self, reason: str) -> None:
        now = time.monotonic()
        lasted_s = now - self._began_at
        self._delay_s = self._budget.add_failure(self._terms, now, lasted_s=lasted_s, has_stepped=self._has_stepped)
        self._last_failure = reason

    def returned(self) -> None:
        self._has_returned = True

    def stepped(self, step: int | None) -> None:
        self._has_stepped = True

    def is_over(self, number: int) -> bool:
        return False


class CallWrapper:
    """A wrapped function's connection to its run.

    Attributes:
        state: Rank, world size and counters.
        store: Reads and writes keys of the run, and iteration numbers of ranks.
        agent: An object, such as an Agent, that the script stores here for the next iteration. The wrapper does not
            close it.
    """

    def __init__(self, state: State, attempts: RankThread | LocalAttempts) -> None:
        self.state = state
        self.store = StoreMixin()
        self.agent: Any = None
        self._attempts = attempts

    @property
    def iteration(self) -> int:
        """Number of the generation (the current attempt to run the function). It is unique within the run."""
        return self.state.iteration

    @property
    def rank(self) -> int:
        """Rank of this process among the active ranks."""
        return self.state.rank

    @property
    def world_size(self) -> int:
        """Number of active ranks."""
        return self.state.world_size

    def ping(self, step: int | None = None) -> None:
        """Report progress. The call takes only microseconds, so it may be made at any rate.

        In a stall, the ranks are compared by their steps, so pass `step` either on all ranks or on none.

        Args:
            step: Number of the current step. Default: one more than in the previous call.
        """
        self._attempts.stepped(step)


class WrappedCall(Generic[T]):
    def __init__(self, function: Callable[[CallWrapper], T], options: Options, launch: Launch) -> None:
        self._function = function
        self._options = options
        self._state = State(initial_rank=launch.slot, use_global_iteration=options.use_global_iteration)
        self._section = InterruptibleSection()
        self._groups = ProcessGroups(launch.lighthouse_address if options.use_global_iteration else "")
        self._interrupter = Interrupter(self._section, [self._groups.abort, lambda: self._hook(options.abort)])
        self._attempts: RankThread | LocalAttempts
        if options.use_global_iteration:
            self._attempts = RankThread(options, launch, self._interrupter, self._state)
            self._state.store = StoreMixin()
        else:
            self._attempts = LocalAttempts(launch.slot, launch.slots, options.terms(launch), self._state)
        self._call_wrapper = CallWrapper(self._state, self._attempts)
        self._result: T | None = None
        self._last_error = ""
        self._left_by: BaseException | None = None
        self._open_before: list[at_exit.Closable] = []

    def run(self) -> T | None:
        """Run attempts until all ranks have finished. Return the function's result, or None on a spare rank."""
        with contextlib.closing(self._groups), self._attempts:
            try:
                ended = self._repeat()
            except RestartAbort as e:
                log.error("this rank ends the run: %s", e.reason)  # the exit code alone does not give the reason
                raise
        return self._outcome(ended)

    def _repeat(self) -> Ended:
        self._attempts.ready()
        has_returned = False
        while isinstance(order := self._attempts.next_order(), Run):
            if has_returned:  # the function has returned, but another rank has failed since then
                self._recover()
            has_returned = self._attempt(order)
            if has_returned:
                self._attempts.returned()
            else:
                self._recover()
                self._attempts.ready()
        return order

    def _attempt(self, run: Run) -> bool:
        self._result, self._last_error = None, ""
        self._open_before = at_exit.opened()
        with _restored("RANK", "WORLD_SIZE"), self._groups.patched(run.number):
            self._attempts.begin_generation(run)
            self._interrupter.arm()
            try:
                self._result = self._section.run(self._call, lambda: self._attempts.is_over(run.number))
                return True
            except Interruption as e:
                self._section.stop_delivery()
                reason, self._left_by = "interrupted", e
            except SystemExit:  # also GroupDrained, which is an Exception, too
                raise
            except Exception as e:
                reason = f"{type(e).__name__}: {e}"
                self._last_error, self._left_by = reason, e
                self._wait_for_cause(run.number)
                if self._attempts.is_over(run.number):
                    log.info("iteration %d was interrupted: %s", self._state.iteration, reason)
                else:
                    log.exception("iteration %d failed", self._state.iteration)
            finally:
                self._interrupter.disarm()
        self._attempts.raised(reason)
        return False

    def _wait_for_cause(self, number: int) -> None:
        """If a peer was lost, wait up to CAUSE_WITHIN_S for the lighthouse to end generation `number` for that reason.

        When a peer fails, collectives fail on this rank, often before the lighthouse notices the failure. If this rank
        reported its own exception first, it would hide the cause. The wait is counted in polls, so that a suspension of
        the host counts as a single poll.
        """
        for _ in range(round(CAUSE_WITHIN_S / _POLL_S)):
            if self._attempts.is_over(number) or not self._groups.has_lost_peer():
                return
            time.sleep(_POLL_S)

    def _call(self) -> T:
        self._hook(self._options.initialize)
        return self._function(self._call_wrapper)

    def _recover(self) -> None:
        """Clean up between two attempts. If the cleanup raises an exception, this process leaves the run."""
        self._groups.abort()
        kept = {id(each) for each in (*self._open_before, self._call_wrapper.agent)}
        left = [each for each in at_exit.opened() if id(each) not in kept]
        error, self._left_by = self._left_by, None
        while error is not None:  # torch's engine may keep the error, whose traceback refers to the function's objects
            traceback.clear_frames(error.__traceback__)
            error = error.__context__
        self._hook(self._options.finalize)
        at_exit.close_each(left)
        left.clear()
        self._groups.recover()
        self._hook(self._options.health_check)

    def _hook(self, hook: Hook | None) -> None:
        if hook is not None:
            hook(self._state)

    def _outcome(self, ended: Ended) -> T | None:
        match ended.outcome:
            case RunCompleted():
                return self._result
            case RunStopped(reason, who):
                text = f"the run is stopped: {reason}{f' ({who})' if who else ''}"
                if self._options.use_global_iteration and self._last_error:  # the reason of a local run contains it
                    text += f"; the last error of this rank: {self._last_error}"
                log.error("%s", text)  # the exit code alone does not give the reason
                raise RestartAbort(text)
            case error:
                raise error


@contextlib.contextmanager
def _restored(*names: str) -> Generator[None]:
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


_served: dict[int, object] = {}
"""Served stores by port. They exist until the process exits, so that all calls of wrapped functions share them."""


def serve_store(options: Options, launch: Launch) -> None:
    """Serve the TCPStore of `store_kwargs`, unless it is already served.

    By default, the process with slot 0 serves the store. `is_master` in `store_kwargs` overrides the default.
    """
    if not options.store_kwargs:
        return
    given: dict[str, Any] = {"wait_for_workers": False, **options.store_kwargs}
    variables = Variables(os.environ)
    given.setdefault("host_name", variables.text("MASTER_ADDR").strip("[]") or "127.0.0.1")
    given.setdefault("port", (variables.read_number("MASTER_PORT") or MASTER_PORT) + STORE_PORT_OFFSET)
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


class Wrapper:
    """Decorator that runs a function again in the same process after any rank in the run has failed.

    When a rank fails or dies, the function is interrupted on all ranks, their process groups are aborted, and the
    function starts again in the next *generation* (a numbered attempt). A spare rank replaces a dead rank. The function
    receives a CallWrapper in the parameter that is annotated with CallWrapper or named `call_wrapper`.

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
        """Create the decorator.

        Args:
            **options: Fields of `agent_client.restart.options.Options`, listed in docs/reference/options.md.

        Raises:
            ConfigurationError: An option is unknown or has an invalid value.
        """
        self.options = Options.from_given(options)

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

            launch = self.options.launch()
            serve_store(self.options, launch)
            return WrappedCall(call, self.options, launch).run()

        return wrapped


def _is_call_wrapper(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return parameter.name == "call_wrapper" or CallWrapper.__name__ in text
