"""Renders a page from a package's own templates and the shared ones, escaping everything."""

import re

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape


def render(package: str, template: str, **values: object) -> str:
    """Return a page as HTML.

    Args:
        package: the package with the folder ``templates``, in which the template lies.
        template: its name; it may extend or include the shared templates of this package.
        values: the names that the template uses.

    Raises:
        jinja2.UndefinedError: the template uses another name.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader(__package__)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["breakable"] = breakable
    return environment.get_template(template).render(values)


def breakable(text: object) -> Markup:
    """Return text, escaped, in which a line may end after each underscore and each dot in a word.

    Names of attacks and settings have no other place for it, and are wider than a column.
    """
    parts = re.split(r"(_|(?<=[a-z])\.(?=[a-z]))", str(text))
    return Markup("").join(
        escape(part) + Markup("<wbr>") if part in {"_", "."} else escape(part) for part in parts
    )
