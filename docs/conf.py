"""Sphinx configuration: `make docs` builds the documentation, and every warning is an error."""

import re
import sys
from importlib.metadata import version as installed_version
from pathlib import Path

from sphinx.application import Sphinx

import qualms

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "qualms"
author = "The qualms developers"
project_copyright = "The qualms developers, BSD-3-Clause"
release = version = installed_version("qualms")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "command_reference",
    "plain_docstrings",
]
exclude_patterns = ["_build", "_templates", "reproduction"]
templates_path = ["_templates"]
nitpicky = True

# Pages are Markdown; headings are link targets.
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["myst.strikethrough"]

# One page for each public object and for each module. A package lists what it exports.
autosummary_generate = True
autosummary_context = {"public": qualms.__all__}
autosummary_ignore_module_all = False
autosummary_imported_members = False
autodoc_member_order = "bysource"
# Types and shapes are in the numpydoc sections; annotations in signatures would repeat them.
autodoc_typehints = "none"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
# `name` in a docstring is a link if there is a target, and a parameter otherwise. Names of other
# packages are not linked: that would need a network.
default_role = "py:obj"
nitpick_ignore_regex = [
    ("py:obj", ".*"),
    ("py:class", r"(abc|ase|collections|matplotlib|numpy|pathlib|pydantic|rich|typing)\..*"),
]

# Pages link to these files, so that the links also work in the repository.
_PAGES_OF_FILES = {"../benchmarks/RESULTS.md": "benchmarks.md", "../CHANGELOG.md": "changelog.md"}

html_theme = "furo"
html_title = f"qualms {release}"
html_static_path = ["_static"]
html_css_files = ["qualms.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def _link_to_pages(app: Sphinx, page: str, source: list[str]) -> None:
    """Redirect links to files outside of this directory to the pages that include them."""
    for file, shown_by in _PAGES_OF_FILES.items():
        source[0] = source[0].replace(f"]({file})", f"]({shown_by})")


def _skip_generated(
    app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object
) -> bool | None:
    """Skip methods that scikit-learn and pydantic generate for every class."""
    generated = r"set_\w+_request|get_metadata_routing|model_config|model_post_init"
    return True if re.fullmatch(generated, name) else None


def setup(app: Sphinx) -> None:
    """Connect the handlers."""
    app.connect("source-read", _link_to_pages)
    app.connect("autodoc-skip-member", _skip_generated)
