"""Both of Lightning's names, imported in any order, missing or broken, each in a process that has loaded neither."""

from __future__ import annotations

import multiprocessing

import names_process
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.versions]


@pytest.fixture(scope="module")
def anew():
    """Call a function in a new process, in which torch is loaded already, since that takes most of the time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torchmetrics", "names_process"])
    with context.Pool(1, maxtasksperchild=1) as pool:
        yield pool.apply


@pytest.mark.parametrize("order", names_process.ORDERS, ids=" then ".join)
def test_any_order_of_imports(anew, order, tmp_path):
    """Both Trainers take both callbacks as their own, stop for a limit, resume; both LightningCLIs make them."""
    anew(names_process.work, (order, str(tmp_path)))


@pytest.mark.parametrize("name", names_process.NAMES)
def test_console_lines(anew, name):
    """Importing us brings back no line that the user silenced, and takes away none of the others."""
    before, after, silenced = anew(names_process.console_of, (name,))
    assert "GPU available" in before
    assert after == before
    assert silenced == ""


@pytest.mark.parametrize("kind", ["missing", "broken", "foreign"])
def test_the_second_name_may_be_missing_or_broken(anew, kind, tmp_path):
    """It does no harm: all goes on under the first."""
    anew(names_process.without_the_second, (kind, str(tmp_path)))


def test_the_second_name_alone(anew, tmp_path):
    """An environment in which only ``pytorch_lightning`` can be imported is enough."""
    anew(names_process.without_the_first, (str(tmp_path),))


def test_no_name_at_all(anew, tmp_path):
    """The error is the first name's own."""
    assert anew(names_process.without_any, (str(tmp_path),)) == "the first is broken"
