"""recovery.md, sections 1 and 4, as text: what happens to a run of wrapped ranks, and the generation that follows.

    run 4 active=3                   all slots have started and run generation 0; `empty 4`: none has started
    kill 1; start 1 -> 100 (100 1 0): 0 1 2

Behind the arrow stand the number of the generation, the documents' counters (global iteration, job restarts, ranks'
restarts), the slots that run, by rank, and why the next generation has not formed, where none stands. Ranks obey: one
that is interrupted is ready at once, unless the run says obedient=False.
"""

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lighthouse.job.events import ProcessPaused, RanksBehind, ResumeAsked, RunVerdict, SessionEnded, StopAsked
from tests.lighthouse.run_stage import RunStage, running
from tests.scenarios.paragraphs import scenarios_of

FILE = Path(__file__).with_name("restart_scenarios.txt")


def obey(stage: RunStage) -> None:
    stage.obedient = True
    stage.obey()


def be_late(stage: RunStage, by_s: float) -> None:
    """The lighthouse was paused: no tick, and nothing was heard."""
    stage.now += by_s
    stage.feed(ProcessPaused(by_s))


def pass_without_a_tick(stage: RunStage, seconds: float) -> None:
    """Its timer is a little late, as they are; what is heard next comes before it."""
    stage.now += seconds


def end_older_stream(stage: RunStage, slot: int) -> None:
    """Of the process that is there, after its newer one has begun."""
    older = stage.workers[slot].session or 0
    stage.enter(slot)
    stage.feed(SessionEnded(older))


OTHERS: dict[str, Callable[..., object]] = {
    "obey": obey,
    "disobey": lambda stage: setattr(stage, "obedient", False),
    "times": lambda stage, count, *words: [do(stage, " ".join(map(str, words))) for _ in range(count)],
    "late": be_late,
    "pass_without_a_tick": pass_without_a_tick,
    "moves_to_a_newer_stream": end_older_stream,
    "behind": lambda stage, *slots: (stage.feed(RanksBehind(slots, "incident 1")), stage.obey()),
    "resize": lambda stage, size, **terms: setattr(stage, "terms", replace(stage.terms, world_size=size, **terms)),
    "stop": lambda stage: stage.feed(StopAsked("enough", "operator")),
    "resume": lambda stage: stage.feed(ResumeAsked()),
}


def do(stage: RunStage, action: str) -> None:
    name, *words = action.split()
    options = {key: value(text) for key, has, text in (word.partition("=") for word in words) if has}
    arguments = [value(word) for word in words if "=" not in word]
    act = OTHERS.get(name)
    if act is not None:
        act(stage, *arguments, **options)
    else:
        getattr(stage, name)(*arguments, **options)


def value(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def shown(stage: RunStage) -> str:
    counters = " ".join(map(str, stage.table()))
    by_rank = " ".join(str(slot) for _, slot in sorted(stage.places().items())) or "nobody"
    verdict = stage.machine.verdict(stage.now)
    if stage.machine.stop is not None:
        by_rank += f", stopped: {stage.machine.stop.reason}"
    elif verdict is not RunVerdict.STANDS:
        by_rank += f", {verdict}"
    return f"{stage.number} ({counters}): {by_rank}"


def play(paragraph: str) -> str:
    """The same paragraph, with what is so behind the arrows."""
    lines: list[str] = []
    stage = RunStage()
    for line in paragraph.splitlines():
        words = line.partition(" -> ")[0]
        if line.startswith("#"):
            lines.append(line)
        elif line.startswith(("run ", "empty ")):
            kind, size, *options = words.split()
            terms = {name: value(text) for name, _, text in (option.partition("=") for option in options)}
            stage = (running if kind == "run" else RunStage)(int(size), **terms)
            lines.append(line)
        else:
            for action in words.split("; "):
                do(stage, action)
            lines.append(f"{words} -> {shown(stage)}")
    return "\n".join(lines)


@scenarios_of(FILE, play)
def test_what_follows(paragraph: str) -> None:
    assert play(paragraph).splitlines() == paragraph.splitlines()
