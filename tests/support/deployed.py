"""The files with which operators deploy a party: Compose, systemd and Kubernetes."""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.support.markdown import ROOT

EXAMPLE = ROOT / "deploy" / "examples" / "breast_cancer"
KUBERNETES = ROOT / "deploy" / "kubernetes"
SYSTEMD = ROOT / "deploy" / "systemd"
CAN_RENDER = shutil.which("kubectl") is not None
STATUS_PORT = "9464"
VARIABLE = re.compile(r"\$\{(\w+)(?::[-?+](?:\$\{[^}]*\}|[^}])*)?\}")


def filled(text: str, values: dict[str, str]) -> str:
    """Replace the variables in a text of a Compose file; those without a value by nothing."""
    return VARIABLE.sub(lambda found: values.get(found[1], ""), text)


def services_of(file: str) -> dict[str, dict[str, Any]]:
    text = (ROOT / file).read_text(encoding="utf-8")
    services: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return services


@cache
def rendered(folder: Path) -> dict[str, dict[str, Any]]:
    text = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, check=True
    ).stdout
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def directives(*files: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in "\n".join(file.read_text(encoding="utf-8") for file in files).splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


class Deployed(NamedTuple):
    party: str
    serves: bool = False

    @property
    def name(self) -> str:
        return self.party + ("-serve" if self.serves else "")

    @property
    def compose_file(self) -> str:
        return f"docker-compose.{self.party}.yml"

    @property
    def compose(self) -> dict[str, Any]:
        services = services_of(self.compose_file)
        return services[self.name if self.serves else f"{self.party}-party"]

    @property
    def env_example(self) -> dict[str, str]:
        path = ROOT / "deploy" / "env" / f"{self.party}.env.example"
        lines = path.read_text(encoding="utf-8").splitlines()
        given = (line for line in lines if line and not line.startswith("#"))
        return dict(line.split("=", 1) for line in given)

    @property
    def unit_file(self) -> Path:
        return SYSTEMD / f"splitveil-{'serve-' if self.serves else ''}PARTY@.service"

    @property
    def unit(self) -> dict[str, list[str]]:
        read = directives(self.unit_file).items()
        return {name: [one.replace("%j", self.party) for one in values] for name, values in read}

    @property
    def unit_environment(self) -> dict[str, str]:
        return dict(one.split("=", 1) for one in self.unit["Environment"])

    @property
    def manifests(self) -> dict[str, dict[str, Any]]:
        return rendered(KUBERNETES / self.name)

    @property
    def pod(self) -> dict[str, Any]:
        kind = "Deployment" if self.serves else "Job"
        found: dict[str, Any] = self.manifests[kind]["spec"]["template"]["spec"]
        return found

    def check_nobody_is_root(self) -> None:
        """Assert that neither container nor unit has rights that it does not need."""
        service = self.compose
        assert re.fullmatch(r"\$\{\w+:-[1-9]\d*:[1-9]\d*\}", service["user"])
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert self.unit["User"] == ["splitveil"]
        assert self.unit["ProtectSystem"] == ["strict"]
        assert self.unit["NoNewPrivileges"] == ["yes"]
