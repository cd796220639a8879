"""What a run leaves behind: numbers per step, summary.json and reward.png."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np


@dataclass
class Report:
    """Collected while the run goes on; lists have one entry per step unless said otherwise."""

    rewards: list[float] = field(default_factory=list)
    staleness: list[float] = field(default_factory=list)
    push_ms: list[float] = field(default_factory=list)
    stall_ms: list[float] = field(default_factory=list)  # one entry per push and replica
    logprob_gap_max: float = 0.0
    mixed: int = 0  # answers that hold tokens of more than one version
    tokens: int = 0
    rescored: int = 0  # answers that the service scored once more, under the version that made them
    unequal: int = 0  # of those, with another bit in a logprob; 0 where replicas are deterministic
    started: float = field(default_factory=time.monotonic)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the time since the start, training and pushes included."""
        return self.tokens / (time.monotonic() - self.started)

    def write(self, out: Path) -> dict[str, float]:
        """summary.json and reward.png; returns the summary."""
        summary = {
            "reward_first10": round(float(np.mean(self.rewards[:10])), 4),
            "reward_last10": round(float(np.mean(self.rewards[-10:])), 4),
            "steps": len(self.rewards),
            "versions_pushed": len(self.push_ms),
            "push_ms_p50": round(float(np.percentile(self.push_ms, 50)), 2),
            "stall_ms_p99": round(float(np.percentile(self.stall_ms, 99)), 2),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "logprob_gap_max": self.logprob_gap_max,
            "answers_of_mixed_versions": self.mixed,
            "answers_rescored": self.rescored,
            "answers_rescored_unequal": self.unequal,
            "seconds": round(time.monotonic() - self.started, 1),
        }
        (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        self._plot(out / "reward.png")
        return summary

    def _plot(self, path: Path) -> None:
        import matplotlib  # noqa: PLC0415  (a second of import that the training loop need not wait for)

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt  # noqa: PLC0415

        rewards = np.array(self.rewards)
        window = min(10, len(rewards))
        smooth = np.convolve(rewards, np.ones(window) / window, mode="valid")
        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        axes.plot(np.arange(1, len(rewards) + 1), rewards, color="0.75", linewidth=1, label="step")
        axes.plot(np.arange(window, len(rewards) + 1), smooth, linewidth=2, label=f"mean of {window}")
        axes.set(xlabel="step (one pushed version each)", ylabel="mean reward", ylim=(0, 1))
        axes.set_title("GRPO on live rollout workers: sort five digits, exact match")
        axes.legend(loc="lower right")
        figure.savefig(path, dpi=120)
        plt.close(figure)
