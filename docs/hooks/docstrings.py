"""Docstrings name functions and classes as Sphinx does; the site's reference is made of Markdown."""

import re

import griffe

ROLE = re.compile(r":(?:class|func|meth):`([^`]+)`")
LITERAL = re.compile(r"::$", flags=re.MULTILINE)


class Roles(griffe.Extension):
    """:meth:`update` becomes a link to it, and the two colons before a block of code become one."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            text = ROLE.sub(r"[`\1`][\1]", obj.docstring.value)
            obj.docstring.value = LITERAL.sub(":", text)
