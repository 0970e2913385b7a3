"""The files with which operators deploy a party: Compose, systemd and Kubernetes."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.support.markdown import ROOT

EXAMPLE = ROOT / "deploy" / "examples" / "breast_cancer"
KUBERNETES = ROOT / "deploy" / "kubernetes"
STATUS_PORT = "9464"
VARIABLE = re.compile(r"\$\{(\w+)(?::[-?][^}]*)?\}")


def filled(text: str, values: dict[str, str]) -> str:
    """Replace the variables in a text of a Compose file; those without a value by nothing."""
    return VARIABLE.sub(lambda found: values.get(found[1], ""), text)


class Deployed(NamedTuple):
    """One party's files, for training or for serving."""

    party: str
    ending: str
    """Of the names of the files: ``-serve`` for serving."""
    service: str
    """The name in the Compose file."""
    workload: str
    """The kind of manifest that runs it."""

    @property
    def compose_text(self) -> str:
        path = ROOT / f"docker-compose.{self.party}{self.ending}.yml"
        return path.read_text(encoding="utf-8")

    @property
    def compose(self) -> dict[str, Any]:
        services: dict[str, Any] = yaml.safe_load(self.compose_text)["services"]
        assert list(services) == [self.service]
        service: dict[str, Any] = services[self.service]
        return service

    @property
    def env_example(self) -> dict[str, str]:
        path = ROOT / "deploy" / "env" / f"{self.party}{self.ending}.env.example"
        lines = path.read_text(encoding="utf-8").splitlines()
        given = (line for line in lines if line and not line.startswith("#"))
        return dict(line.split("=", 1) for line in given)

    @property
    def unit_file(self) -> Path:
        return ROOT / "deploy" / "systemd" / f"splitveil-{self.party}{self.ending}@.service"

    @property
    def unit(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for line in self.unit_file.read_text(encoding="utf-8").splitlines():
            if "=" in line and not line.startswith("#"):
                name, _, value = line.partition("=")
                found.setdefault(name, []).append(value)
        return found

    @property
    def unit_environment(self) -> dict[str, str]:
        return dict(one.split("=", 1) for one in self.unit["Environment"])

    @property
    def manifest_folder(self) -> Path:
        return KUBERNETES / f"{self.party}{self.ending}"

    @property
    def kustomization(self) -> dict[str, Any]:
        text = (self.manifest_folder / "kustomization.yaml").read_text(encoding="utf-8")
        loaded: dict[str, Any] = yaml.safe_load(text)
        return loaded

    @property
    def manifests(self) -> dict[str, dict[str, Any]]:
        loaded = [
            document
            for name in self.kustomization["resources"]
            for document in yaml.safe_load_all(
                (self.manifest_folder / name).read_text(encoding="utf-8")
            )
        ]
        return {document["kind"]: document for document in loaded}

    @property
    def pod(self) -> dict[str, Any]:
        found: dict[str, Any] = self.manifests[self.workload]["spec"]["template"]["spec"]
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
        assert self.pod["securityContext"]["runAsNonRoot"] is True
        for container in (*self.pod["containers"], *self.pod["initContainers"]):
            allowed = container["securityContext"]
            assert allowed["readOnlyRootFilesystem"] is True
            assert allowed["allowPrivilegeEscalation"] is False
            assert allowed["capabilities"] == {"drop": ["ALL"]}
