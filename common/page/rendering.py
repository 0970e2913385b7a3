"""Renders a page from a package's own templates and the shared ones, escaping everything."""

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined


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
    return environment.get_template(template).render(values)
