"""The API reference, from the docstrings: ``sphinx-build -W -n .ci/docs OUTPUT``, in an environment with ``.[docs]``."""

import pathlib

import lightning_timekeeper

project = "lightning-timekeeper"
version = release = lightning_timekeeper.__version__
html_title = f"{project} {version}"
html_theme = "furo"
html_copy_source = False

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_typehints = "description"  # the docstrings have none
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_type_aliases = {
    "Duration": "lightning_timekeeper.duration.Duration",
    "TriggerLike": "lightning_timekeeper.triggers.TriggerLike",
}
autodoc_preserve_defaults = True

# to others there are no links, so that it builds without a network; to ours, each link must hold
nitpick_ignore_regex = [
    (r"py:.*", r"(collections|datetime|lightning|os|pathlib|torch|typing)\..*|datetime|json|T"),
    (r"py:.*", r"lightning_timekeeper\.trace\.tracer\.Track"),  # how a tracer records, which may change
]

listed = (pathlib.Path(__file__).parent / "index.rst").read_text()
missing = [name for name in lightning_timekeeper.__all__ if f":: lightning_timekeeper.{name}\n" not in listed]
if missing:
    raise RuntimeError(f"public names that are not in the reference: {missing}")
