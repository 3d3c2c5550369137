"""Plot of loss and participants over time, with a mark at each kill."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from examples.demo_report import Report


def plot(report: Report, file: Path) -> None:
    steps = sorted(report.commits)
    first = {step: min(report.commits[step].values(), key=lambda event: event["time"]) for step in steps}
    zero = first[steps[0]]["time"]
    times = [first[step]["time"] - zero for step in steps]
    losses = [report.loss(step) for step in steps]
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 5), height_ratios=(3, 1))
    above.plot(times, losses, linewidth=0.8, color="tab:blue")
    above.set(ylabel="training loss", yscale="log", title="Training through kills")
    below.step(times, [report.participants(step) for step in steps], where="post", color="tab:green")
    below.set(ylabel="groups", xlabel="seconds since the first committed step")
    below.set(ylim=(0, report.groups + 0.5), yticks=range(report.groups + 1))
    for kill in report.kills:
        for axes in (above, below):
            axes.axvline(kill.at - zero, color="tab:red", linestyle="--", linewidth=1)
        label = f"SIGKILL {kill.victim}\n({kill.what})"
        above.annotate(label, (kill.at - zero, max(losses)), color="tab:red", va="top", fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
