"""The ranks of a run as they stand beside those of replica groups: what each does, and which are judged."""

from lighthouse.job.events import RankReported
from lighthouse.job.status import run_ranks, run_status
from lighthouse_protocol.messages.progress import ProgressSample
from lighthouse_protocol.messages.run import RankHeartbeat
from tests.lighthouse.run_stage import RunStage


def beat(stage: RunStage, slot: int, step: int, still_s: float = 0.0) -> None:
    sample = ProgressSample(step, still_s=still_s)
    stage.feed(RankReported(stage.workers[slot].rank, RankHeartbeat(step + 100, "running", sample)))


def shown(stage: RunStage) -> list[str]:
    """Slot, state, step, what it waits for; * where it is judged."""
    lines: list[str] = []
    for each in run_ranks(stage.machine, stage.now):
        view = each.view
        state = each.state.value if each.state is not None else "running" if view.is_running else view.sample.waits_for
        lines.append(f"{view.name} {state} {view.sample.step}{' *' if each.is_judged else ''}")
    return lines


def test_says_where_its_ranks_are():
    stage = RunStage(4, active=3)
    stage.start(0, 1, 2, 3)
    for slot in range(3):
        beat(stage, slot, 5)
    assert shown(stage) == ["r/0 running 5 *", "r/1 running 5 *", "r/2 running 5 *", "r/3 spare 0"]
    assert [rank.step for rank in run_status(("j", "r"), stage.machine, stage.now).ranks] == [5, 5, 5, 0]


def test_a_sample_ages_until_the_next_one_however_fresh_the_heartbeats_are():
    stage = RunStage(2)
    stage.start(0, 1)
    beat(stage, 0, 5, still_s=3)
    stage.now += 4
    stage.beat(0)
    said, silent = (each.view for each in run_ranks(stage.machine, stage.now))
    assert (said.beat_age_s, said.progress_age_s) == (4, 7)
    assert (silent.progress_age_s, silent.limit_s) == (4, 600)
    stage.finish(0)
    finished, _ = (each.view for each in run_ranks(stage.machine, stage.now))
    assert (finished.beat_age_s, finished.progress_age_s) == (0, 7)


def test_what_was_said_in_a_generation_is_over_with_it():
    stage = RunStage(3, obedient=False)
    stage.start(0, 1, 2)
    for slot in range(3):
        beat(stage, slot, 5)
    stage.finish(0)
    assert shown(stage)[0] == "r/0 the other ranks to finish 5 *"
    stage.kill(2)
    beat(stage, 1, 6)
    assert shown(stage) == ["r/0 the other ranks to finish 5", "r/1 running 5", "r/2 lost 105"]
    stage.ready(0)
    assert shown(stage)[0] == "r/0 the next generation 5"
    stage.ready(1)
    assert shown(stage) == ["r/0 running 105 *", "r/1 running 106 *", "r/2 lost 105"]


def test_one_that_has_finished_and_ended_is_shown_no_more():
    stage = RunStage(2)
    stage.start(0, 1)
    stage.finish(0)
    stage.kill(0)
    assert [line.split()[0] for line in shown(stage)] == ["r/1"]
