"""Plot of the long run: steps, faults and the footprint of the daemons over time, one line for each part.

python -m tests.chaos.proof_plot        # docs/proof/part-*.json -> docs/proof.svg
"""

import json

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from examples.daemons import ROOT


def main() -> None:
    matplotlib.rcParams["svg.hashsalt"] = "proof"  # equal data give an equal file
    figure, axes = pyplot.subplots(5, 1, sharex=True, figsize=(9, 9), height_ratios=(3, 1, 1, 1, 1))
    faults = 0
    for path in sorted((ROOT / "docs" / "proof").glob("part-*.json")):
        part = json.loads(path.read_text())
        faults += part["faults"]
        columns = dict(zip(part["columns"], zip(*part["samples"], strict=True), strict=True))
        minutes = [second / 60 for second in columns["second"]]
        label = f"part {part['part']}: {part['faults']:,} faults, {part['commits']:,} commits"
        axes[0].plot(minutes, [step - columns["step"][0] for step in columns["step"]], label=label)
        for below, name in zip(axes[1:], ("memory_mib", "threads", "descriptors", "journal_kib"), strict=True):
            below.plot(minutes, columns[name], linewidth=0.8)
    axes[0].set(ylabel="steps", title=f"Eight replica groups, {faults:,} faults, one every 3 s")
    axes[0].legend(loc="upper left", fontsize=8)
    for below, name in zip(axes[1:], ("memory (MiB)", "threads", "descriptors", "journal (KiB)"), strict=True):
        below.set(ylabel=name, ylim=(0, None))
    axes[-1].set(xlabel="minutes")
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "proof.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
