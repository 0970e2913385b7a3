"""Defenses, attacks and models as a program chooses them: by name, as settings, or as own code.

Settings name such code as ``package.module:name``. What a notebook or a closure defines has none,
so it gets one here, which only this process knows.
"""

import itertools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias

from splitveil.active_party.defenses import CustomDefense, Defense, DefenseSettings
from splitveil.active_party.defenses.interface import Defended, Step, release
from splitveil.active_party.defenses.noise import NoiseSource
from splitveil.active_party.defenses.section import DefenseSection
from splitveil.common.errors import SettingsError
from splitveil.common.privacy.settings import CustomAttack
from splitveil.common.settings import Section, validate
from splitveil.common.text.imports import HANDED_OVER
from splitveil.deploy.overrides import NamedDefense, parse_defense

DefenseChoice: TypeAlias = str | Mapping[str, Any] | DefenseSection | Callable[..., Any]
"""A name (``marvell``), a name with settings (``iso:noise_ratio=2``), a mapping or a section of
settings, a subclass of `Defense`, or a function of gradients, labels and noise."""

AttackChoice: TypeAlias = str | Mapping[str, Any] | CustomAttack | Callable[..., Any]
"""The name of an attack, a mapping or a section of settings, or a function of gradients."""


class _Chosen(Section):
    defense: DefenseSettings


def own_defense(code: Callable[..., Any], **arguments: Any) -> CustomDefense:
    """Return the settings of a custom defense.

    Args:
        code: a subclass of ``splitveil.defenses.Defense``, built as
            ``code(context, noise, **arguments)``; or a function
            ``code(gradients, labels, noise, **arguments)`` that returns a gradient to send, of the
            same shape. A function states no charge, so that the ledger has no bound for its
            answers.
        arguments: further arguments, plain values that settings can hold.

    Raises:
        SettingsError: it is neither.
    """
    if isinstance(code, type):
        if not issubclass(code, Defense):
            raise SettingsError(f"{code.__name__}: expected a subclass of defenses.Defense")
        return CustomDefense(module=_name_of(code), arguments=arguments)
    if not callable(code):
        raise SettingsError(f"expected a defense's class or function, got {type(code).__name__}")
    return CustomDefense(module=_name_of(_class_around(code)), arguments=arguments)


def own_attack(
    function: Callable[..., Any],
    *,
    name: str | None = None,
    needs: Sequence[str] = (),
    num_hints: int | None = None,
) -> CustomAttack:
    """Return the settings of a custom attack.

    Args:
        function: called as ``function(gradients, **side_information)`` with (rows, ...); returns
            one number per row, higher for rows that look more like positives.
        name: the name of its figures; by default the function's.
        needs: side information that it uses, see ``needs`` in the settings of attacks.
        num_hints: number of known positives, for an attack that needs ``hints``.

    Raises:
        SettingsError: the name is taken or has other characters, or a need is unknown.
    """
    values = {
        "kind": "custom",
        "module": _name_of(function),
        "name": name or getattr(function, "__name__", "").strip("<>"),
        "needs": tuple(needs),
        **({} if num_hints is None else {"num_hints": num_hints}),
    }
    return validate(CustomAttack, values, "attack")


def named_defense(choice: DefenseChoice) -> NamedDefense:
    """Return a chosen defense as settings, with a title for tables."""
    if isinstance(choice, str):
        chosen = parse_defense(choice)
        section(chosen.settings)
        return chosen
    if isinstance(choice, Mapping):
        found = section(choice)
        return NamedDefense(_title(found), dict(choice))
    if isinstance(choice, type) and issubclass(choice, DefenseSection):
        choice = choice()
    if not isinstance(choice, DefenseSection):
        choice = own_defense(choice)
    return NamedDefense(
        _title(choice),
        choice.model_dump(mode="json", exclude_defaults=True) | {"name": choice.title},
    )


def section(values: Mapping[str, Any]) -> DefenseSection:
    """Return the section that a defense's settings are; SettingsError if they are wrong."""
    return validate(_Chosen, {"defense": dict(values)}, "settings").defense


def attack_settings(choice: AttackChoice) -> str | dict[str, Any]:
    """Return a chosen attack as the settings write it: a name or a section's values."""
    if isinstance(choice, str):
        return choice
    if isinstance(choice, Mapping):
        return dict(choice)
    if not isinstance(choice, CustomAttack):
        choice = own_attack(choice)
    return choice.model_dump(mode="json", exclude_defaults=True) | {"kind": "custom"}


def model_settings(value: Any) -> Any:
    """Return a setting's value, where a model is its section, and a defense's section its values.

    A model is a class, a factory or an instance.
    """
    if isinstance(value, DefenseSection):
        return named_defense(value).settings
    if isinstance(value, Mapping) and callable(own := value.get("module")):
        return {**value, "module": _name_of(own)}
    return {"kind": "custom", "module": _name_of(value)} if callable(value) else value


def _class_around(function: Callable[..., Any]) -> type[Defense]:
    class FunctionDefense(Defense):
        def __init__(self, _context: object, noise: NoiseSource, **arguments: Any) -> None:
            self._noise, self._arguments = noise, arguments

        def defend(self, batch: Step) -> Defended:
            rows = function(batch.gradients, batch.labels, self._noise, **self._arguments)
            moved = (rows - batch.gradients).square().flatten(1).sum(dim=1).mean()
            sent = release(rows.clone(), batch.gradients)
            return Defended(sent, noise_power=float(moved))

    FunctionDefense.__name__ = getattr(function, "__name__", "function").strip("<>")
    FunctionDefense.__qualname__ = FunctionDefense.__name__
    FunctionDefense.__module__ = "__main__"  # so that it is found only by what was handed over
    return FunctionDefense


def _title(chosen: DefenseSection) -> str:
    if isinstance(chosen, CustomDefense):
        given = [f"{name}={value}" for name, value in chosen.arguments.items()]
        return " ".join([chosen.module.partition(":")[2], *given])
    values = chosen.model_dump(mode="json", exclude_defaults=True, exclude={"name"})
    return " ".join([chosen.title, *(f"{name}={value}" for name, value in values.items())])


def _name_of(thing: Callable[..., object]) -> str:
    """Return ``package.module:name``, under which an import finds a class, function or instance.

    Another one of the same name gets a name of its own.
    """
    module, name = thing.__module__, getattr(thing, "__qualname__", "")
    if module != "__main__" and getattr(sys.modules.get(module), name, None) is thing:
        return f"{module}:{name}"
    own_name = getattr(thing, "__name__", type(thing).__name__)
    plain = re.sub(r"\W", "_", own_name).strip("_") or "unnamed"
    home = sys.modules.setdefault(HANDED_OVER, ModuleType(HANDED_OVER))
    names = itertools.chain([plain], (f"{plain}_{number}" for number in itertools.count(2)))
    free = next(one for one in names if getattr(home, one, thing) is thing)
    setattr(home, free, thing)
    return f"{HANDED_OVER}:{free}"
