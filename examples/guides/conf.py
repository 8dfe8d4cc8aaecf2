"""Sphinx's settings for the site: the README, the guides, and the reference from docstrings.

The folder of the sources is the root of the repository, so that links between pages are the same
here and on a code host. What only the site needs, such as the order of the pages, is in this file.
"""

from __future__ import annotations

import re
from collections import namedtuple
from functools import cache
from typing import Any, get_type_hints

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.builders import Builder
from sphinx.environment import BuildEnvironment
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

import decent_optim_wrapper

FIELD = type(namedtuple("Any", "field").field)
PACKAGE = decent_optim_wrapper.__name__
# The pages below a page, in the order of the navigation.
CONTENTS = {
    "README": (
        *("examples/first_hour", "examples/guides/README", "examples/guides/reference/README"),
        *("examples/benchmark/README", "examples/guides/changes"),
    ),
    "examples/guides/README": tuple(
        f"examples/guides/{page}"
        for page in (
            *("training", "slow_network", "schedules", "topologies", "options", "module"),
            *("checkpoints", "elastic", "clusters", "several_sites", "frameworks", "mesh", "gpu"),
            *("troubleshooting", "extending", "how_it_works"),
        )
    ),
    "examples/guides/reference/README": tuple(
        f"examples/guides/reference/{page}"
        for page in (
            *("wrapper", "module", "extensions", "codecs", "topologies", "optim", "checkpoints"),
            *("elastic", "integrations", "interfaces"),
        )
    ),
}

project = PACKAGE
release = decent_optim_wrapper.__version__
root_doc = "README"
include_patterns = [f"{page}.md" for page in ("README", *(p for c in CONTENTS.values() for p in c))]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

html_theme = "pydata_sphinx_theme"
html_title = project
html_show_sourcelink = False
html_theme_options = {"show_toc_level": 2, "navigation_with_keys": False}

# Anchors as a code host makes them.
myst_heading_anchors = 4

default_role = "py:obj"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True

# A name in a docstring that nothing has is an error. Types may be private or of another package,
# and names in small letters may be parameters.
nitpicky = True
nitpick_ignore_regex = [("py:(class|exc)", ".*"), ("py:obj", r"[a-z_].*")]

CODE_NAME = re.compile(r"([\w.]*\w)(\(\))?")


@cache
def places(env: BuildEnvironment) -> dict[str, tuple[str, str]]:
    """Return the page and the anchor of each name that is unique, with and without its module."""
    found: dict[str, set[tuple[str, str]]] = {}
    for path, entry in env.domains.python_domain.objects.items():
        for start in re.finditer(r"\b\w", path):
            found.setdefault(path[start.start() :], set()).add((entry.docname, entry.node_id))
    return {name: next(iter(each)) for name, each in found.items() if len(each) == 1}


def linked(builder: Builder, page: str, text: str, content: nodes.Element) -> nodes.Element | None:
    """Return a link to the reference for code that is a name in it, or None."""
    name = CODE_NAME.fullmatch(text)
    place = places(builder.env).get(name[1]) if name else None
    return place and make_refnode(builder, page, *place, content)


class LinkNames(SphinxPostTransform):
    """Links names in the code of the guides to the reference."""

    default_priority = 20

    def run(self, **options: Any) -> None:
        builder, page = self.app.builder, self.env.docname
        for literal in list(self.document.findall(nodes.literal)):
            if not isinstance(literal.parent, (nodes.reference, nodes.title)):
                literal.replace_self(
                    linked(builder, page, literal.astext(), literal.deepcopy()) or literal
                )


def link_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element
) -> nodes.Element | None:
    """Link a name in a docstring that has no module."""
    is_name = node["refdomain"] == "py" and node["reftype"] == "obj"
    return linked(app.builder, node["refdoc"], node["reftarget"], content) if is_name else None


def leave_types(app: Sphinx, what: str, name: str, item: Any, *_: Any) -> None:
    """Leave only types in the annotations of a class, whose fields also name their checks."""
    if what == "class" and "Annotated" in str(vars(item).get("__annotations__")):
        item.__annotations__ = get_type_hints(item)
        item.__init__.__annotations__ = get_type_hints(item)


def leave_out(app: Sphinx, what: str, name: str, item: Any, skip: bool, *_: Any) -> bool | None:
    """Leave the fields of a NamedTuple to its docstring."""
    return True if isinstance(item, FIELD) else None


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Name the pages below a page, for the navigation."""
    if pages := CONTENTS.get(page):
        lines = "".join(f"/{each}\n" for each in pages)
        source[0] += f"\n```{{toctree}}\n:hidden:\n\n{lines}```\n"


def add_index(app: Sphinx, error: Exception | None) -> None:
    """Redirect requests for the folder to the first page."""
    page = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">'
    (app.outdir / "index.html").write_text(page, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Connect the functions above."""
    app.add_post_transform(LinkNames)
    app.connect("missing-reference", link_name)
    # Before autodoc records the types.
    app.connect("autodoc-process-signature", leave_types, priority=400)
    app.connect("autodoc-skip-member", leave_out)
    app.connect("source-read", add_contents)
    app.connect("build-finished", add_index)
