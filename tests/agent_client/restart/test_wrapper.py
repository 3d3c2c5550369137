"""A wrapped function with the real thread and the real machines, and a lighthouse inside this process."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_client.collectives import group_spec
from agent_client.errors import ConfigurationError, GroupDrained
from agent_client.restart import rank_thread, wrapper
from agent_client.restart.store import RestartAbort, State
from agent_client.restart.wrapper import CallWrapper, Wrapper
from agent_client.step import stop_signals
from examples.ports import free_port
from lighthouse_protocol.messages.session import EvidenceDone
from lighthouse_protocol.refusals import InvalidRequest
from manager.guard.client import cause_of
from tests.agent_client.restart.run_inside import RunInside
from tests.processes import eventually

VARIABLES = {"LIGHTHOUSE_ADDRESS": "127.0.0.1:1", "LIGHTHOUSE_RUN_ID": "r", "RANK": "0", "WORLD_SIZE": "1"}


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith(("LIGHTHOUSE_", "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.fixture
def inside(variables: pytest.MonkeyPatch) -> Iterator[RunInside]:
    inside = RunInside()
    variables.setattr(rank_thread, "LighthouseClient", lambda address, *, job, run: inside)
    variables.setattr(rank_thread, "_completed", set())
    yield inside
    eventually(lambda: not any(thread.name.startswith("lighthouse-") for thread in threading.enumerate()), "the end")


# -- without a lighthouse


def test_a_local_counter_needs_no_lighthouse(variables: pytest.MonkeyPatch) -> None:
    variables.delenv("LIGHTHOUSE_ADDRESS")
    seen: list[tuple[int, int, int]] = []

    @Wrapper()
    def train(value: int, call_wrapper: CallWrapper) -> int:
        state = call_wrapper.state
        seen.append((call_wrapper.iteration, state.job_restart_counter, state.ranks_restart_counter))
        if len(seen) < 3:
            raise RuntimeError("boom")
        return value

    assert train(7) == 7
    assert seen == [(0, 0, 0), (1, 1, 1), (2, 2, 2)]


@pytest.mark.parametrize(
    ("options", "said", "runs"),
    [
        ({"max_iterations": 2}, "max_iterations: 2", 2),
        ({"max_restarts": 2}, r"max_restarts: 2 restarts.* used up; the last: ValueError: boom 2", 3),
    ],
)
def test_a_function_that_always_raises_ends_the_run(
    variables: pytest.MonkeyPatch, options: dict[str, int], said: str, runs: int
) -> None:
    ran: list[int] = []

    @Wrapper(restart_delay=0.01, **options)
    def train(call_wrapper: CallWrapper) -> None:
        ran.append(call_wrapper.iteration)
        raise ValueError(f"boom {call_wrapper.iteration}")

    with pytest.raises(RestartAbort, match=said) as e:
        train()
    assert (e.value.code, ran) == (130, list(range(runs)))


@pytest.mark.parametrize("end", [SystemExit(3), GroupDrained("a leaves: SIGTERM to rank 0")], ids=["exit", "drained"])
def test_what_is_not_an_error_of_the_function_passes(variables: pytest.MonkeyPatch, end: SystemExit) -> None:
    """A group that left because of a signal would be back at once."""

    @Wrapper(max_restarts=1, restart_delay=None)
    def train() -> None:
        raise end

    with pytest.raises(SystemExit) as e:
        train()
    assert e.value is end


def test_hooks_and_their_order(variables: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def hook(name: str) -> Callable[[State], None]:
        return lambda state: said.append(f"{name} {state.iteration}")

    @Wrapper(initialize=hook("initialize"), finalize=hook("finalize"), health_check=hook("check"))
    def train(call_wrapper: CallWrapper) -> None:
        said.append("run")
        if call_wrapper.iteration == 0:
            raise RuntimeError("boom")

    train()
    assert said == ["initialize 0", "run", "finalize 0", "check 0", "initialize 1", "run"]


def test_what_the_function_has_left_open_is_closed_but_for_what_it_keeps(variables: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Open:
        def __init__(self, name: str) -> None:
            self.name = name
            stop_signals.close_at_end(self)

        def close(self) -> None:
            stop_signals.forget_closed(self)
            closed.append(self.name)

    before = Open("before")

    @Wrapper()
    def train(call_wrapper: CallWrapper) -> Open:
        left = Open(f"left {call_wrapper.iteration}")
        call_wrapper.agent = call_wrapper.agent or Open("kept")
        if call_wrapper.iteration < 2:
            raise RuntimeError("boom")
        return left

    last = train()
    assert last is not None
    assert closed == ["left 0", "left 1"]
    for each in (before, last):
        each.close()


def test_a_bad_health_check_ends_the_process(variables: pytest.MonkeyPatch) -> None:
    def check(state: State) -> None:
        raise RuntimeError("GPU 3 is broken")

    @Wrapper(health_check=check)
    def train() -> None:
        raise ValueError("boom")

    with pytest.raises(RuntimeError, match="GPU 3"):
        train()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"barier_timeout": 3}, "no option 'barier_timeout'"),
        ({"store_kwargs": {"prot": 3}}, "no 'prot'"),
        ({"store_kwargs": {"prefix": "x"}}, "no 'prefix'"),
        ({"active_world_size": 6}, "needs use_global_iteration"),
        ({"restart_scope": "group"}, "needs use_global_iteration"),
        ({"restart_scope": "host", "use_global_iteration": True}, "'host' is not one of run, group"),
        ({"hard_timeout": 0}, "hard_timeout=0"),
        ({"max_iterations": 0}, "max_iterations=0"),
        ({"max_restarts": -1}, "max_restarts=-1 is not at least 0"),
        ({"max_restarts": 1001}, "max_restarts=1001 is more than 1000"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Wrapper(**options)


# -- the store of store_kwargs


def test_slot_0_serves_it_as_long_as_its_process_lives(variables: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("torch.distributed")
    variables.setenv("MASTER_PORT", str(free_port("") - 2))

    @Wrapper(store_kwargs={"timeout": 60})
    def train() -> int:
        return distributed.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]) + 2, is_master=False).add("calls", 1)

    assert [train(), train()] == [1, 2]


def test_it_is_not_served_where_it_is_already_or_by_another_rank(variables: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        train = Wrapper(store_kwargs={"port": port})(lambda: 7)
        with pytest.raises(ConfigurationError, match=rf"TCPStore on 127.0.0.1:{port}: process {os.getpid()} .*listens"):
            train()
        assert Wrapper(store_kwargs={"port": port, "is_master": False})(lambda: 7)() == 7
        variables.setenv("LIGHTHOUSE_STORE_PORT", str(port))
        assert train() == 7, "a supervisor serves it"
        variables.setenv("RANK", "1")
        variables.setenv("WORLD_SIZE", "2")
        variables.delenv("LIGHTHOUSE_STORE_PORT")
        assert train() == 7


def test_the_call_wrapper_stands_where_the_function_has_it(variables: pytest.MonkeyPatch) -> None:
    @Wrapper()
    def first(call_wrapper: CallWrapper, lr: float, *more: int, **options: int) -> tuple[Any, ...]:
        return call_wrapper.iteration, lr, more, options

    @Wrapper()
    def annotated(lr: float, /, wrapper: CallWrapper, *, seed: int = 7) -> tuple[Any, ...]:
        return wrapper.iteration, lr, seed

    assert first(0.1, 1, 2, steps=3) == (0, 0.1, (1, 2), {"steps": 3})
    assert first(lr=0.1) == (0, 0.1, (), {})
    assert annotated(0.1) == (0, 0.1, 7)


def test_arguments_that_do_not_fit_are_no_fault_to_restart_after(variables: pytest.MonkeyPatch) -> None:
    @Wrapper()
    def train(call_wrapper: CallWrapper, lr: float) -> None:
        pytest.fail("it runs")

    for wrong in ((), (0.1, 2)):
        with pytest.raises(TypeError, match=r"train\(\): (missing a required argument: 'lr'|too many positional)"):
            train(*wrong)
    with pytest.raises(TypeError, match="unexpected keyword argument 'rate'"):
        train(0.1, rate=3)


# -- with one


def test_a_second_call_of_a_completed_run_is_refused(inside: RunInside) -> None:
    train = Wrapper(use_global_iteration=True)(lambda: None)
    train()
    with pytest.raises(ConfigurationError, match="run 'r' is complete"):
        train()


def test_a_stop_interrupts_and_is_130(inside: RunInside) -> None:
    @Wrapper(use_global_iteration=True)
    def train(call_wrapper: CallWrapper) -> None:
        inside.stop("enough")
        time.sleep(60)

    with pytest.raises(RestartAbort, match=r"the run is stopped: enough \(the test\)") as e:
        train()
    assert e.value.code == 130


@pytest.mark.parametrize(("is_supervised", "has_file"), [(False, False), (True, True), (True, False)])
def test_an_abort_asks_for_the_stop_of_all_and_below_a_supervisor_leaves_that_to_it(
    inside: RunInside,
    variables: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    is_supervised: bool,
    has_file: bool,
) -> None:
    """It finds the reason in the error file."""
    file = tmp_path / "error.json"
    if is_supervised:
        variables.setenv("LIGHTHOUSE_INCARNATION", "i")
    if has_file:
        variables.setenv("TORCHELASTIC_ERROR_FILE", str(file))

    @Wrapper(use_global_iteration=True)
    def train() -> None:
        raise RestartAbort("the loss is NaN")

    with pytest.raises(RestartAbort):
        train()
    assert inside.stopped == ([] if is_supervised else ["rank 0: the loss is NaN"])
    assert not has_file or cause_of(file.read_text()) == "RestartAbort: the loss is NaN"
    assert "this rank ends the run: the loss is NaN" in caplog.text


def test_who_has_no_place_is_told_so(inside: RunInside, variables: pytest.MonkeyPatch) -> None:
    variables.setenv("LIGHTHOUSE_SLOT", "8")
    variables.setenv("LIGHTHOUSE_WORLD_SIZE", "8")
    with pytest.raises(InvalidRequest, match="a world of 8 has slots 0 to 7"):
        Wrapper(use_global_iteration=True)(lambda: None)()


def test_no_lighthouse_is_named(variables: pytest.MonkeyPatch) -> None:
    variables.delenv("LIGHTHOUSE_ADDRESS")
    with pytest.raises(ConfigurationError, match="LIGHTHOUSE_ADDRESS"):
        Wrapper(use_global_iteration=True)(lambda: None)()


def test_who_was_lost_comes_back(inside: RunInside) -> None:
    """Its only stream breaks: to the lighthouse it is lost, and its generation with it."""

    @Wrapper(use_global_iteration=True)
    def train(call_wrapper: CallWrapper) -> int:
        if call_wrapper.iteration == 0:
            call_wrapper.ping(5)
            eventually(lambda: 5 in inside.steps.values(), "the step is told")
            inside.lose_streams()
            time.sleep(60)
        return call_wrapper.iteration

    assert train() == 1


class WithoutPeer:
    """A process group, after a peer's end."""

    has_lost_peer = True

    def abort(self) -> None: ...


class HostThatStandsStill:
    """In each sleep. It takes `time`'s place."""

    def __init__(self) -> None:
        self._still_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._still_s

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
        self._still_s += 10.0


@pytest.mark.parametrize(("is_the_cause", "host"), [(False, time), (True, time), (False, HostThatStandsStill())])
def test_what_a_peer_s_end_makes_fail_is_no_failure_of_this_rank(
    is_the_cause: bool,
    host: Any,
    inside: RunInside,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is told of the peer a moment later, also if its host stands still. If not, it has failed by itself."""
    monkeypatch.setattr(wrapper, "time", host)
    group = WithoutPeer()
    group_spec.register_group(group)

    @Wrapper(use_global_iteration=True)
    def train(call_wrapper: CallWrapper) -> None:
        if call_wrapper.iteration == 0:
            if not is_the_cause:
                threading.Timer(0.1, inside.lose_streams).start()
            raise RuntimeError("connection closed by peer")

    train()
    said = [record.getMessage() for record in caplog.records]
    assert ("iteration 0 failed" in said) == is_the_cause, said


def test_says_where_it_is_and_what_it_does(inside: RunInside) -> None:
    """Steps that are not given are counted in the generation: so ranks compare, whatever their processes did before."""

    @Wrapper(use_global_iteration=True)
    def train(call_wrapper: CallWrapper) -> list[Any]:
        call_wrapper.ping()
        if call_wrapper.iteration == 0:
            call_wrapper.ping()
            eventually(lambda: inside.progress()[0].step == 2, "two pings are told")
            raise RuntimeError("boom")
        eventually(lambda: inside.progress()[0].step == 1, "one ping of this generation is told")
        call_wrapper.ping(41)
        eventually(lambda: inside.progress()[0].step == 41, "the step is told")
        call_wrapper.ping(42)
        told = inside.look()
        eventually(lambda: len(told) == 2, "the evidence is told")
        assert inside.progress()[0].step == 42, "where it is comes before that"
        return told

    evidence, done = train() or []
    assert f"in {train.__name__}" in evidence.rank.stacks
    assert done == EvidenceDone(1)


def test_advance_asks_for_the_next_number(inside: RunInside) -> None:
    @Wrapper(use_global_iteration=True)
    def train(call_wrapper: CallWrapper) -> list[int]:
        state = call_wrapper.state
        numbers = [state.iteration]
        for _ in range(2):
            numbers.append(state.advance(store=None, world_size=1, timeout=None, is_coordinator=True))
        return [*numbers, call_wrapper.iteration]

    assert train() == [0, 1, 2, 2]


def test_a_run_that_always_raises_is_stopped_and_each_rank_says_its_last_error(inside: RunInside) -> None:
    @Wrapper(use_global_iteration=True, max_restarts=1, restart_delay=0.01)
    def train(call_wrapper: CallWrapper) -> None:
        raise ValueError(f"boom {call_wrapper.iteration}")

    told = r"max_restarts: 1 restarts within 600 s are used up; the last: .*boom 1; .*of this rank: ValueError: boom 1"
    with pytest.raises(RestartAbort, match=told) as e:
        train()
    assert e.value.code == 130


def test_a_stop_while_it_advances_is_not_blamed_on_an_error_that_was_recovered(inside: RunInside) -> None:
    @Wrapper(use_global_iteration=True, max_iterations=2, restart_delay=0.01)
    def train(call_wrapper: CallWrapper) -> None:
        if call_wrapper.iteration == 0:
            raise ValueError("boom")
        call_wrapper.state.advance()

    with pytest.raises(RestartAbort, match="max_iterations: 2") as e:
        train()
    assert "boom" not in str(e.value)


def test_the_environment_is_restored(inside: RunInside, variables: pytest.MonkeyPatch) -> None:
    variables.delenv("WORLD_SIZE")
    variables.setenv("LIGHTHOUSE_WORLD_SIZE", "1")
    Wrapper(use_global_iteration=True)(lambda: os.environ["WORLD_SIZE"])()
    assert "WORLD_SIZE" not in os.environ


def test_an_abort_that_takes_long_belongs_to_its_own_generation(inside: RunInside) -> None:
    said: list[str] = []

    def abort(state: State) -> None:
        said.append(f"abort {state.iteration}")
        time.sleep(1.5)
        said.append(f"aborted {state.iteration}")

    @Wrapper(use_global_iteration=True, abort=abort)
    def train(call_wrapper: CallWrapper) -> None:
        said.append(f"run {call_wrapper.iteration}")
        if call_wrapper.iteration == 0:
            inside.lose_streams()
            time.sleep(60)

    train()
    assert said == ["run 0", "abort 0", "aborted 0", "run 1"]
