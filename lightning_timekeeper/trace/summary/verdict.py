"""What bounds a run, and what to try: one answer, with documented thresholds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_timekeeper.trace.summary.step_table import StepTable
    from lightning_timekeeper.trace.summary.stragglers import Stragglers

THRESHOLDS = {
    "input": (0.10, 0.20),
    "stragglers": (0.10, 0.20),
    "callbacks": (0.10, 0.20),
    "overhead": (0.30, 0.50),
    "validation": (0.20, 0.40),
    "checkpoint": (0.05, 0.15),
}
"""What may bound a run -> from which share on it is a warning, and from which critical.

Of a steady step: ``input``, its wait for data; ``stragglers``, what ranks wait for a named one; ``callbacks``, with the
module's own hooks; ``overhead``, what is in no phase. Of the training from its first step on: ``validation``,
``checkpoint``. Of those that reach their threshold, the one that exceeds it the most is told.
"""

_OF = {"validation": "the training", "checkpoint": "the training"}
_WHAT = {
    "input": "the wait for data",
    "callbacks": "callbacks and hooks",
    "overhead": "the loop around the work",
    "validation": "validation",
    "checkpoint": "saving checkpoints",
}
_TRY = {
    "input": "more DataLoader workers (num_workers), persistent_workers=True, cheaper or cached transforms.",
    "stragglers": "look at that rank in the trace: its data, its host, other work on its cores.",
    "callbacks": "call the dearest ones below less often, for instance every n steps.",
    "overhead": "larger batches, fewer logged values, inference_mode; spans of your own show what is in it.",
    "validation": "validate less often (check_val_every_n_epoch, val_check_interval) or on less (limit_val_batches).",
    "checkpoint": "save less often (every_n_train_steps, train_time_interval), only weights, or asynchronously.",
    "compute": "mixed precision, torch.compile, a larger batch; torch.profiler shows which operators take the time.",
}


@dataclass(frozen=True)
class Verdict:
    """What bounds the run.

    Attributes:
        bound: ``input``, ``compute``, ``validation``, ``checkpoint``, ``callbacks``, ``stragglers`` or ``overhead``;
            None where there are no steps to judge by.
        level: ``ok``, ``warning`` or ``critical``.
        share: The share that it is judged by, 0 to 1.
        why: One sentence.
        advice: What to try next.
    """

    bound: str | None
    level: str
    share: float | None
    why: str
    advice: str


def judge(
    table: StepTable | None, stragglers: Stragglers, validation: float | None, checkpoint: float | None
) -> Verdict:
    """Tell what bounds a run.

    Args:
        table: Of the steady state.
        stragglers: The ranks.
        validation: Share of validation in the training, 0 to 1.
        checkpoint: Share of checkpoints.
    """
    if table is None:
        return Verdict(None, "ok", None, "There are no steps to judge by.", "")
    callbacks = [table.row(phase).share for phase in ("callback", "module", "logger")]
    shares = {
        "input": table.input_share,
        "stragglers": stragglers.share if stragglers.rank is not None else None,
        "callbacks": sum(share or 0.0 for share in callbacks),
        "overhead": table.row("other").share,
        "validation": validation,
        "checkpoint": checkpoint,
    }
    reached = {bound: share for bound, share in shares.items() if share is not None and share >= THRESHOLDS[bound][0]}
    if not reached:
        share = table.per_step_ns("forward", "backward", "optimizer", "validation", "user") / (
            table.whole.mean_ns or 1.0
        )
        why = f"Model and optimizer take {_percent(share)} of a {table.unit}, and nothing else takes much."
        if len(stragglers.ranks) > 1:
            why += " In it are the waits of backward for other ranks."
        return Verdict("compute", "ok", share, why, _TRY["compute"])
    bound = max(reached, key=lambda each: reached[each] / THRESHOLDS[each][0])
    share, (warning, critical) = reached[bound], THRESHOLDS[bound]
    why = stragglers.why
    if bound != "stragglers":
        what = _WHAT[bound]
        of = _OF.get(bound, f"a {table.unit}")
        why = f"{what[0].upper()}{what[1:]} takes {_percent(share)} of {of}"
        why += f" (a warning from {_percent(warning)}, critical from {_percent(critical)})."
    return Verdict(bound, "critical" if share >= critical else "warning", share, why, _TRY[bound])


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
