"""Writes the API page of the guides from the docstrings: ``python tests/api_page.py``.

griffe reads the source, and griffe2md renders it. What is public is what a module's `__all__` says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import griffe
from griffe2md import ConfigDict, prepare_context, prepare_env

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "examples" / "guides" / "api.md"
PACKAGE = "decent_optim_wrapper"

Item = griffe.Object | griffe.Alias
Annotation = str | griffe.Expr | None

INTRODUCTION = """# API reference

What every name takes, returns and raises; start with [training](training.md)
to learn how to use them. `python tests/api_page.py` makes it from the docstrings. It has the names
in `__all__`, under the first module that you can import them from:

"""
CONFIG: ConfigDict = {
    "heading_level": 3,
    "line_length": 100,
    "members_order": "source",
    "show_if_no_docstring": False,
    "show_object_full_path": True,
    "show_signature_annotations": True,
    "summary": False,
}
# For all sections: each would compile the templates again.
TEMPLATES = prepare_env()
CROSS_REFERENCE = re.compile(r"\[([^\[\]]+)\]\(#([\w.]+)\)")


def load() -> griffe.Module:
    """Read the package's source."""
    loader = griffe.GriffeLoader(
        search_paths=[ROOT],
        docstring_parser="google",
        # The fields of a NamedTuple are no parameters to griffe.
        docstring_options={
            "ignore_init_summary": True,
            "warn_unknown_params": False,
            "warn_missing_types": False,
        },
        allow_inspection=False,
    )
    package = loader.load(PACKAGE)
    loader.resolve_aliases(external=False)
    return cast("griffe.Module", package)


def public_modules(module: griffe.Module) -> Iterator[griffe.Module]:
    """The modules that say what is public: this one and those below it."""
    if module.exports:
        yield module
    for each in module.modules.values():
        if isinstance(each, griffe.Module):
            yield from public_modules(each)


def public_names(package: griffe.Module) -> dict[str, list[Item]]:
    """The objects by the module that they are imported from, each of them once."""
    found: dict[str, list[Item]] = {}
    seen: set[str] = set()
    for module in sorted(public_modules(package), key=lambda each: each.path.count(".")):
        names = sorted(map(str, module.exports or ()))
        members = [module[name] for name in names if not name.startswith("__")]
        fresh = [each for each in members if each.canonical_path not in seen]
        seen |= {each.canonical_path for each in fresh}
        if fresh:
            found[module.path] = fresh
    return found


def without_checks(annotation: Annotation) -> Annotation:
    """The type of a field that also names a check: `Annotated[type, check]`."""
    if not isinstance(annotation, griffe.ExprSubscript) or annotation.canonical_name != "Annotated":
        return annotation
    inner = annotation.slice
    return inner.elements[0] if isinstance(inner, griffe.ExprTuple) else inner


def show_types(item: Item) -> None:
    """Leave only types in the annotations of an object and its members."""
    if isinstance(item, griffe.Attribute):
        item.annotation = without_checks(item.annotation)
    if isinstance(item, (griffe.Class, griffe.Function)):
        for parameter in item.parameters:
            parameter.annotation = without_checks(parameter.annotation)
    if isinstance(item, griffe.Class):
        for member in item.members.values():
            show_types(member)


def render(item: Item, documented: set[str]) -> str:
    """The section of a public name.

    Args:
        item: as it is imported.
        documented: the paths of all public names. What a class inherits from one of them stands
            there.
    """
    target = item.final_target if isinstance(item, griffe.Alias) else item
    show_types(target)
    config = CONFIG.copy()
    if isinstance(target, griffe.Class):
        config["inherited_members"] = [
            name
            for name, member in target.inherited_members.items()
            if not name.startswith("_")
            and member.canonical_path.rpartition(".")[0] not in documented
        ]
    template = TEMPLATES.get_template(f"{target.kind.value}.md.jinja")
    text = template.render(**prepare_context(target, config))
    # Headings have the path of the definition; readers know the name that they import.
    heading = re.compile(rf"^(#+ `){re.escape(target.path)}", re.MULTILINE)
    text = heading.sub(rf"\g<1>{item.name}", text)
    for name in config.get("inherited_members") or ():
        base = target.inherited_members[name].canonical_path
        text = text.replace(f"# `{base}`", f"# `{item.name}.{name}`")
    return text.strip()


def link(text: str, anchors: dict[str, str]) -> str:
    """Let references to public names lead to their sections, and show others as text."""

    def target(found: re.Match[str]) -> str:
        return f"[{found[1]}](#{anchors[found[2]]})" if found[2] in anchors else found[1]

    return CROSS_REFERENCE.sub(target, text)


def api_page() -> str:
    """The page: a section for every module, with a list of its names at the top."""
    names = public_names(load())
    items = [item for of_module in names.values() for item in of_module]
    documented = {item.canonical_path for item in items}
    anchors = {
        path: item.name.lower() for item in items for path in (item.path, item.canonical_path)
    }
    parts = [INTRODUCTION]
    for module, members in names.items():
        links = ", ".join(f"[{item.name}](#{item.name.lower()})" for item in members)
        parts.append(f"- `{module}`: {links}\n")
    for module, members in names.items():
        parts.append(f"\n## {module}\n")
        parts += [f"\n{link(render(item, documented), anchors)}\n" for item in members]
    text = "".join(parts).replace("```\n\n\n", "```\n\n")
    return re.sub(r"[ \t]+$", "", re.sub(r"\n{3,}", "\n\n", text), flags=re.MULTILINE)


if __name__ == "__main__":
    PAGE.write_text(api_page(), encoding="utf-8")
