"""Plans of runs, as ``splitveil plan`` prints them."""

import io
from pathlib import Path

from rich.console import Console

from splitveil.active_party.commands.plan import show
from splitveil.active_party.planned import plan_of
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.party_settings import load_party_settings


def printed_plan(folder: Path, *overrides: str, target: float | None = None) -> str:
    settings = load_party_settings(ActiveSettings, folder / "active.yaml", overrides)
    console = Console(file=(printed := io.StringIO()), width=250)
    show(plan_of(settings, PartyData.load(settings.data, folder), target), console)
    return printed.getvalue()
