"""The speed plot of the README, from the records."""

from pathlib import Path

from benchmarks.comparison import LABELS, label_of, training_cells

OPS = ("fwd", "bwd")


def draw(lines: list[dict], path: Path) -> bool:
    """The plot: TFLOP/s by sequence length, one panel per op and head dim; False without data.

    The panels of an op show one run, that of the default plan's table, without what was measured
    with determinism asked for.
    """
    runs = {
        op: [
            line
            for _, cell in training_cells(lines, op)
            for line in cell
            if not line["deterministic"]
        ]
        for op in OPS
    }
    run = [line for of_op in runs.values() for line in of_op]
    if not run:
        return False
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "flashattn_ext"  # the same records, the same file
    from matplotlib import pyplot

    head_dims = sorted({line["head_dim"] for line in run})
    ops = [op for op, of_op in runs.items() if of_op]
    size = (3.6 * len(head_dims), 2.8 * len(ops))
    figure, axes = pyplot.subplots(len(ops), len(head_dims), figsize=size, squeeze=False)
    series = list(dict.fromkeys(label_of(line) for line in run))
    for row, op in enumerate(ops):
        for column, head_dim in enumerate(head_dims):
            panel = axes[row][column]
            for index, label in enumerate(series):
                impl, _, forced = label.partition(":")
                for causal in (False, True):
                    points = sorted(
                        (line["seqlen_q"], line["tflops"])
                        for line in run
                        if (line["op"], line["head_dim"], label_of(line), line["causal"])
                        == (op, head_dim, label, causal)
                    )
                    panel.plot(
                        [x for x, _ in points],
                        [y for _, y in points],
                        color=f"C{index}",
                        linestyle="--" if causal else "-",
                        marker=".",
                        label=" ".join(filter(None, (LABELS[impl], forced)))
                        + (", causal" if causal else ""),
                    )
            panel.set_xscale("log", base=2)
            panel.set_ylim(bottom=0)
            panel.set_title(f"{'forward' if op == 'fwd' else 'backward'}, d {head_dim}")
            panel.grid(alpha=0.3)
        axes[row][0].set_ylabel("TFLOP/s")
    for panel in axes[-1]:
        panel.set_xlabel("sequence length")
    axes[0][0].legend(fontsize=7)
    figure.suptitle(f"{run[0]['gpu']}, {run[0]['dtype']}, 16,384 tokens", fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True
