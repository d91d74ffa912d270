"""The hooks that Lightning calls once or more per batch, and how not to pay for those that a callback leaves empty."""

from __future__ import annotations

from lightning_timekeeper.names import Callback

PER_BATCH = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_batch_start",
    "on_test_batch_end",
    "on_predict_batch_start",
    "on_predict_batch_end",
)


def drop_empty_hooks(callback: object, hooks: tuple[str, ...] = PER_BATCH, base: type = Callback) -> None:
    """Make Lightning pass over the per-batch hooks that the callback's class does not implement.

    Calling an empty hook costs about 2 µs, most of it for the profiler's span around it, and there are six in a
    training step. Lightning asks ``callable(hook)`` first, so a None on the instance is passed over. The class stays as
    it is: a subclass that implements the hook is called, and its ``super()`` finds ours.

    Args:
        callback: The instance to change.
        hooks: Those to look at.
        base: Whose implementation counts as none: Lightning's, which is empty, or one that has nothing to do now.
    """
    for hook in hooks:
        if getattr(type(callback), hook) is getattr(base, hook):
            vars(callback)[hook] = None
