"""TracedDataset: records what a dataset does, and is otherwise the dataset."""

from __future__ import annotations

import copy
import gzip
import pickle
from collections.abc import Sized

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, RandomSampler, Subset
from traces import parse, slices
from worker_datasets import Batched, Stored, Streamed

from lightning_timekeeper import TracedDataset, Tracer


class Words:
    """A map without torch, with operators and attributes of its own."""

    def __init__(self):
        self.words = {"a": 1, "b": 2}
        self._traced = "its own"

    def __getitem__(self, key):
        return self.words[key]

    def __setitem__(self, key, value):
        self.words[key] = value

    def __contains__(self, key):
        return key in self.words

    def __len__(self):
        return len(self.words)

    def method(self):
        return len(self)


def recorded(function):
    """The (name, arguments) of the spans that a call records."""
    with Tracer() as tracer:
        function()
        tracer.close()
        data = gzip.decompress(b"".join(tracer._drain.sink._parts))
    return [(one.name, one.args) for one in slices(parse(data))]


def test_what_is_recorded(tmp_path):
    """Each item with its index, each batch with its indices, each wait of an iteration, the last one too."""
    stored = TracedDataset(Stored(4, tmp_path), "train")
    assert recorded(lambda: stored[2])[0] == ("train.__getitem__", {"index": 2})
    batched = TracedDataset(Batched(4, tmp_path))
    assert recorded(lambda: batched.__getitems__([0, 3]))[0] == ("Batched.__getitems__", {"indices": [0, 3]})
    streamed = TracedDataset(Streamed(2, tmp_path), "s")
    assert [name for name, _ in recorded(lambda: list(streamed))].count("s.__next__") == 3
    assert [name for name, _ in recorded(lambda: list(TracedDataset([7], "a list")))] == ["a list.__next__"] * 2


def test_an_error_passes_and_is_marked():
    """The caller gets the dataset's exception."""

    def fail():
        with pytest.raises(KeyError):
            TracedDataset(Words(), "words")["c"]

    assert recorded(fail) == [("words.__getitem__", {"index": "c", "error": "KeyError"})]


def test_it_is_the_dataset():
    """Attributes are read, set and deleted there; operators and methods are its own; so is what depends on the class."""
    words = Words()
    traced = TracedDataset(words)
    assert traced["a"] == 1
    assert (len(traced), "a" in traced, "c" in traced, traced.method()) == (2, True, False, 2)
    traced["c"] = 3
    traced.extra = 4
    assert (words.words["c"], words.extra, traced._traced, vars(traced)) == (3, 4, "its own", vars(words))
    del traced.extra
    assert not hasattr(words, "extra")
    assert not hasattr(traced, "extra")
    assert set(dir(words)) == set(dir(traced))
    assert isinstance(traced, Words)
    assert isinstance(traced, TracedDataset)
    assert "Words" in repr(traced)


def test_what_the_dataset_has_not_it_has_not(tmp_path):
    """Length, batches at once, iteration: DataLoaders and samplers ask for them."""
    stored, streamed = TracedDataset(Stored(4, tmp_path)), TracedDataset(Streamed(4, tmp_path))
    assert isinstance(stored, Dataset)
    assert not isinstance(stored, IterableDataset)
    assert isinstance(streamed, IterableDataset)
    assert isinstance(stored, Sized)
    assert not isinstance(streamed, Sized)
    with pytest.raises(TypeError):
        len(streamed)
    for one in (stored, streamed):
        assert not hasattr(one, "__getitems__")
    assert not hasattr(stored, "__iter__")
    assert hasattr(TracedDataset(Batched(4, tmp_path)), "__getitems__")
    assert not hasattr(TracedDataset(Words()), "__iter__")


@pytest.mark.parametrize("again", [pickle.dumps, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
def test_copies(tmp_path, again):
    """A copy is of the dataset too, and records as its original, also where it is traced twice."""
    original = TracedDataset(TracedDataset(Stored(4, tmp_path), "inner"), "outer")
    made = again(original)
    if isinstance(made, bytes):
        made = pickle.loads(made)
    made.size = 2
    assert len(made) == 2
    assert len(original) == 4 or again is copy.copy  # whose inner one is the same
    names = [name for name, _ in recorded(lambda: made[0])]
    assert names == ["outer.__getitem__", "inner.__getitem__", "read"]


def test_a_shallow_copy_has_attributes_of_its_own(tmp_path):
    """As that of the dataset has."""
    original = TracedDataset(Stored(4, tmp_path))
    made = copy.copy(original)
    made.size = 2
    assert (len(original), len(made)) == (4, 2)


def test_torch_takes_it(tmp_path):
    """Loaders, samplers, subsets and sums, which hold the traced one."""
    stored = TracedDataset(Stored(4, tmp_path), "a")
    batched = TracedDataset(Batched(4, tmp_path), "b")
    streamed = TracedDataset(Streamed(4, tmp_path), "c")
    assert isinstance(stored + batched, ConcatDataset)
    assert len(RandomSampler(stored)) == 4
    for dataset, name in (
        (stored, "a.__getitem__"),
        (stored + batched, "a.__getitem__"),
        (batched, "b.__getitems__"),
        (Subset(batched, [0, 1, 2]), "b.__getitems__"),
        (streamed, "c.__next__"),
        (streamed + streamed, "c.__next__"),
    ):

        def load(dataset=dataset):
            loader = DataLoader(dataset, batch_size=2)
            assert torch.cat([batch[:, 0] for batch in loader])[:3].tolist() == [0, 1, 2]

        assert name in {name for name, _ in recorded(load)}


@pytest.mark.parametrize("wrong", [None, 3, Words, object()])
def test_what_is_no_dataset(wrong):
    """The error shows the call and the value."""
    with pytest.raises(
        TypeError, match=r"`TracedDataset\(.*`: expected an object with `__getitem__` or `__iter__`, not"
    ):
        TracedDataset(wrong)
    with pytest.raises(TypeError, match="expected a text for the name"):
        TracedDataset(Words(), 3)
