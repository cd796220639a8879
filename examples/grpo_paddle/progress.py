"""Live view of a run: a table that redraws itself on a terminal, a line now and then elsewhere."""

from rich.console import Console
from rich.live import Live
from rich.table import Table

from examples.grpo_paddle.report import Report

BARS = "▁▂▃▄▅▆▇█"
EVERY = 25
WIDTH = 50


def sparkline(values: list[float]) -> str:
    """Values in [0, 1] as at most WIDTH bars, each the mean of its neighbours."""
    size = max(1, -(-len(values) // WIDTH))
    means = [sum(part) / len(part) for part in (values[i : i + size] for i in range(0, len(values), size))]
    return "".join(BARS[min(int(mean * len(BARS)), len(BARS) - 1)] for mean in means)


class Progress:
    """A context manager; call `update` after each step."""

    def __init__(self, console: Console, steps: int):
        self._console, self._steps = console, steps
        self._live = Live(console=console, refresh_per_second=4, transient=True) if console.is_terminal else None

    def __enter__(self) -> "Progress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def update(self, report: Report, version: int) -> None:
        """Show where the run stands after this step."""
        step = len(report.rewards)
        reward = sum(report.rewards[-10:]) / min(10, step)
        rows = {
            "step": f"{step} / {self._steps}",
            "reward (mean of 10)": f"{reward:.3f}",
            "weight version": str(version),
            "push": f"{report.push_ms[-1]:.1f} ms",
            "stall (worst replica)": f"{max(report.stall_ms[-2:], default=0.0):.1f} ms",
            "staleness": f"{report.staleness[-1]:.2f} versions",
            "answers of mixed versions": str(report.mixed),
            "logprob gap, largest": f"{report.logprob_gap_max:.1e}",
            "tokens/s": f"{report.tokens_per_s:.0f}",
        }
        if self._live:
            table = Table("GRPO", sparkline(report.rewards), title="paddle-rollout demo: sort five digits")
            for name, value in rows.items():
                table.add_row(name, value)
            self._live.update(table)
        elif step % EVERY == 0 or step == self._steps:
            self._console.print("  ".join(f"{name} {value}" for name, value in rows.items()), soft_wrap=True)
