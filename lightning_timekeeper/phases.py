"""The names that Lightning gives its profiler actions -> the span's short name and its phase.

The action names are strings in Lightning's code and no API: ``[Strategy]SingleDeviceStrategy.training_step``,
``[Callback]ModelCheckpoint{'monitor': None, ...}.on_train_batch_end``, ``run_training_batch``. Only the kind in
brackets and the last component are relied on.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_ACTION = re.compile(r"\[(?P<kind>\w+)\](?P<owner>.*)\.(?P<method>\w+)", re.DOTALL)

_BY_METHOD = {
    "train_dataloader_next": "data",
    "val_next": "data",
    "test_next": "data",
    "predict_next": "data",
    "batch_to_device": "transfer",
    "transfer_batch_to_device": "transfer",
    "on_before_batch_transfer": "transfer",
    "on_after_batch_transfer": "transfer",
    "training_step": "forward",
    "validation_step": "validation",
    "test_step": "forward",
    "predict_step": "forward",
    "backward": "backward",
    "optimizer_step": "optimizer",
    "lr_scheduler_step": "optimizer",
    "configure_gradient_clipping": "clip",
    "optimizer_zero_grad": "zero_grad",
    "save_checkpoint": "checkpoint",
    "prepare_data": "setup",
    "setup": "setup",
    "configure_model": "setup",
    "configure_sharded_model": "setup",
    "configure_optimizers": "setup",
    "configure_callbacks": "setup",
    "train_dataloader": "setup",
    "val_dataloader": "setup",
    "test_dataloader": "setup",
    "predict_dataloader": "setup",
    "teardown": "setup",
    "run_training_epoch": "loop",
    "run_training_batch": "loop",
}

_BY_KIND = {
    "Callback": "callback",
    "LightningModule": "module",
    "LightningDataModule": "module",
    "Strategy": "loop",
}


class Phase(NamedTuple):
    """What a profiler action is shown as.

    Attributes:
        name: Of the span.
        category: The phase: ``data``, ``transfer``, ``forward``, ``backward``, ``optimizer``, ``clip``, ``zero_grad``,
            ``callback``, ``module``, ``validation``, ``checkpoint``, ``setup``, ``loop``, or ``user`` for an action
            that is none of Lightning's.
    """

    name: str
    category: str


def phase_of(action: str) -> Phase:
    """The short name and the phase of a profiler action.

    Example::

        phase_of("[Callback]EarlyStopping{'monitor': 'loss', 'mode': 'min'}.on_train_epoch_end")
        # Phase(name='EarlyStopping.on_train_epoch_end', category='callback')
    """
    match = _ACTION.fullmatch(action)
    if match is None:
        return Phase(action, _BY_METHOD.get(action, "user"))
    kind, owner, method = match["kind"], match["owner"], match["method"]
    if kind == "Callback":  # whatever its hook is called: the time is the callback's
        return Phase(f"{short_key(owner)}.{method}", "callback")
    category = _BY_METHOD.get(method)
    if category is not None:
        return Phase(method, category)
    category = _BY_KIND.get(kind, "loop")
    return Phase(f"{owner}.{method}" if category in ("module", "loop") and owner else method, category)


def short_key(state_key: str) -> str:
    """A callback's class name: its ``state_key`` may begin with where it is defined, and go on with its arguments."""
    return state_key.split("{", 1)[0].rpartition("<locals>.")[2]
