"""Names of trace files."""

from __future__ import annotations

import pytest
import torch

from lightning_timekeeper.template import Template, free_version, versioned, with_rank

VALUES = {"stage": "fit", "rank": 3, "node": 1, "world_size": 8, "epoch": 2, "step": 40, "attempt": 0}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{stage}-rank{rank}.json", "fit-rank3.json"),
        ("{epoch:03d}/{step}.json.gz", "002/40.json.gz"),
        ("{val_loss:.3f}.json", "0.125.json"),
        ("{missing:.1f}.json", "nan.json"),
        ("{{x}} ü.json", "{x} ü.json"),
        (with_rank("a.json.gz"), "a-rank3.json.gz"),
    ],
)
def test_templates(template, name):
    """Keys, formats, metrics; a metric that is not there is nan."""
    assert Template(template).fill(VALUES, {"val_loss": torch.tensor(0.125)}) == name


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "a",
        "a.txt",
        "{oops}.json",
        "{}.json",
        "{0}.json",
        "{rank!r}.json",
        "{a.b}.json",
        "{a[0]:.1f}.json",
        "{a.json",
        "a\n.json",
        "../a.json",
        "b/../../a.json",
        None,
        7,
    ],
)
def test_bad_templates(bad):
    """One error, with the value and what is accepted."""
    with pytest.raises(ValueError, match=r"expected a name that ends in \.json") as error:
        Template(bad)
    assert repr(bad) in str(error.value)


def test_versions_are_the_same_for_all_ranks():
    """A version is taken where no rank has a file of that name, plain or compressed."""
    there = {"a-rank1.json", "a-rank0-v1.json.gz"}
    assert free_version(["a-rank0.json", "a-rank1.json"], there.__contains__) == 2
    assert versioned("a-rank0.json.gz", 2) == "a-rank0-v2.json.gz"
