"""Compose files, systemd units and Kubernetes manifests of ``serve``: valid and hardened."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import DataError, PeerUnreachable, SettingsError, SplitveilError
from splitveil.common.party.party_settings import load_party_settings
from splitveil.passive_party.settings import PassiveSettings
from tests.deployed import EXAMPLE, KUBERNETES, STATUS_PORT, VARIABLE, Deployed, filled
from tests.docs.markdown import ROOT
from tests.docs.test_deployment import PARSERS, Words, party

FINAL = {SettingsError.exit_code, DataError.exit_code}
"""Exit codes after which the same start ends the same way."""
PORTS = {"active": {"8443"}, "passive": {"50061"}}
"""Those at which others ask."""


def deployed(party: str) -> Deployed:
    return Deployed(party, "-serve", f"{party}-serve", "Deployment")


def commands(party: str) -> Iterator[Words]:
    words = [
        filled(word, deployed(party).env_example) for word in deployed(party).compose["command"]
    ]
    yield Words(f"{party}-party", words)
    (start,) = deployed(party).unit["ExecStart"]
    path, *words = filled(start, deployed(party).unit_environment).split()
    yield Words(Path(path).name, words)
    (container,) = deployed(party).pod["containers"]
    yield Words(f"{party}-party", container["args"])


@party
def test_every_command_line_is_one_that_the_program_takes(party: str) -> None:
    for program, words in commands(party):
        parsed = PARSERS[party]().parse_args(words)
        assert (program, parsed.command) == (f"{party}-party", "serve")
        assert parsed.log_format == "json"
        path = EXAMPLE / f"{party}.yaml"
        if party == "active":
            active = load_party_settings(ActiveSettings, path, parsed.overrides)
            assert active.status is not None
            is_beyond = active.serving.http is not None and "127." not in active.serving.http
            knows_programs = (
                active.serving.tls is not None and active.serving.token_file is not None
            )
            assert knows_programs or not is_beyond
        else:
            assert load_party_settings(PassiveSettings, path, parsed.overrides).status is not None


@party
def test_what_will_not_change_is_not_tried_again_where_the_supervisor_knows_exit_codes(
    party: str,
) -> None:
    prevented = {
        int(code) for code in " ".join(deployed(party).unit["RestartPreventExitStatus"]).split()
    }
    assert prevented == FINAL
    assert not FINAL & {SplitveilError.exit_code, PeerUnreachable.exit_code}
    assert deployed(party).unit["Restart"] == ["on-failure"]
    assert deployed(party).unit["StartLimitIntervalSec"] == ["0"]
    assert deployed(party).compose["restart"] == "unless-stopped"


@party
def test_nobody_is_root_and_nothing_but_the_results_can_be_written(party: str) -> None:
    service = deployed(party).compose
    (writable,) = [one for one in service["volumes"] if not one.endswith(":ro")]
    assert writable.endswith(":/runs")
    deployed(party).check_nobody_is_root()


@party
def test_every_mount_of_the_pod_has_a_volume(party: str) -> None:
    volumes = {one["name"] for one in deployed(party).pod["volumes"]}
    containers = (*deployed(party).pod["containers"], *deployed(party).pod["initContainers"])
    assert {m["name"] for one in containers for m in one["volumeMounts"]} == volumes


@party
def test_health_is_asked_at_the_status_port_which_stays_on_loopback(party: str) -> None:
    service = deployed(party).compose
    assert f"127.0.0.1:{STATUS_PORT}/healthz" in " ".join(service["healthcheck"]["test"])
    (container,) = deployed(party).pod["containers"]
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": "status"}
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    status = [port for port in service["ports"] if port.endswith(f":{STATUS_PORT}")]
    assert len(status) == 1
    assert status[0].partition(":-")[2].startswith("127.0.0.1:")
    ports = {str(port["containerPort"]) for port in container["ports"]}
    assert ports == PORTS[party] | {STATUS_PORT}
    assert {port.rpartition(":")[2] for port in service["ports"]} == ports
    offered = {str(port["port"]) for port in deployed(party).manifests["Service"]["spec"]["ports"]}
    assert offered == PORTS[party]


@party
def test_the_example_of_an_env_file_names_every_variable_and_no_other(party: str) -> None:
    text = (ROOT / f"docker-compose.{party}-serve.yml").read_text(encoding="utf-8")
    assert {found[1] for found in VARIABLE.finditer(text)} == set(deployed(party).env_example)


@party
def test_training_and_serving_use_different_ports_of_the_host(party: str) -> None:
    training = (ROOT / f"docker-compose.{party}.yml").read_text(encoding="utf-8")
    taken = set(re.findall(r":-[\d.]+:(\d+)\}", training))
    own = set(re.findall(r":-[\d.]+:(\d+)\}", str(deployed(party).compose["ports"])))
    assert own
    assert not own & taken
    (start,) = deployed(party).unit["ExecStart"]
    assert not set(re.findall(r"127\.0\.0\.1:(\d+)", start)) & taken


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@party
def test_systemd_finds_no_fault_with_a_unit(party: str, tmp_path: Path) -> None:
    """The program is not installed here, so that another stands in its place."""
    file = tmp_path / f"splitveil-{party}-serve@.service"
    file.write_text(
        deployed(party)
        .unit_file.read_text(encoding="utf-8")
        .replace(f"/opt/splitveil/bin/{party}-party", "/bin/true")
    )
    done = subprocess.run(
        ["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@party
def test_every_manifest_fits_the_schema_of_kubernetes_and_is_applied(party: str) -> None:
    found = deployed(party).manifests
    assert found.keys() == {"Deployment", "NetworkPolicy", "Service"}
    for document in found.values():
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    folder = KUBERNETES / f"{party}-serve"
    files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
    assert files == set(deployed(party).kustomization["resources"])


@party
def test_policies_and_services_choose_the_party_s_pods(party: str) -> None:
    (labels,) = (one["pairs"] for one in deployed(party).kustomization["labels"])
    name = {"app.kubernetes.io/name": f"splitveil-{party}-serve"}
    assert name.items() <= labels.items()
    assert deployed(party).manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == name
    assert deployed(party).manifests["Deployment"]["spec"]["selector"]["matchLabels"] == name
    assert deployed(party).manifests["Service"]["spec"]["selector"] == name


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@party
def test_kustomize_builds_what_fits_the_schema(party: str) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(KUBERNETES / f"{party}-serve")],
        capture_output=True,
        text=True,
        check=True,
    )
    built = list(yaml.safe_load_all(done.stdout))
    assert {document["kind"] for document in built} == set(deployed(party).manifests)
    for document in built:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
