"""Compose files, systemd units and Kubernetes manifests: valid, hardened, and of one mind.

They were started for real, too; what these tests hold is what a later change could break unseen.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from splitveil.active_party.commands.program import parser as active_parser
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import (
    DataError,
    EndedForGood,
    PeerEndedForGood,
    PeerUnreachable,
    SettingsError,
    SplitveilError,
)
from splitveil.common.party.party_settings import PartySettings, load_party_settings
from splitveil.passive_party.commands.program import parser as passive_parser
from splitveil.passive_party.settings import PassiveSettings
from tests.support.deployed import EXAMPLE, STATUS_PORT, VARIABLE, Deployed, filled
from tests.support.markdown import ROOT

PARTIES = ("active", "passive")
PARSERS = {"active": active_parser, "passive": passive_parser}
SETTINGS: dict[str, type[PartySettings]] = {"active": ActiveSettings, "passive": PassiveSettings}
TRAINING = [Deployed(name, "", f"{name}-party", "Job") for name in PARTIES]
SERVING = [Deployed(name, "-serve", f"{name}-serve", "Deployment") for name in PARTIES]
PORTS = {"active": "8443", "passive": "50061"}
"""Those at which others ask of a party that serves."""

FINAL = {"": {2, 3, 5}, "-serve": {2, 3}}
"""Exit codes after which the same start ends the same way: settings, data, and the end for good."""


def named(found: Deployed) -> str:
    return found.party + found.ending


deployed = pytest.mark.parametrize("found", [*TRAINING, *SERVING], ids=named)
trained = pytest.mark.parametrize("found", TRAINING, ids=named)
served = pytest.mark.parametrize("found", SERVING, ids=named)


def commands(found: Deployed) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the program and the words of the command line in each of a party's files."""
    program = f"{found.party}-party"
    yield (program, [filled(word, found.env_example) for word in found.compose["command"]])
    (start,) = found.unit["ExecStart"]
    path, *words = filled(start, found.unit_environment).split()
    yield Path(path).name, words
    (container,) = found.pod["containers"]
    environment = {one["name"]: one.get("value", "") for one in container.get("env", ())}
    args = [re.sub(r"\$\((\w+)\)", lambda m: environment[m[1]], one) for one in container["args"]]
    yield program, args


@deployed
def test_every_command_line_is_one_that_the_program_takes(found: Deployed) -> None:
    for program, words in commands(found):
        assert program == f"{found.party}-party"
        parsed = PARSERS[found.party]().parse_args(words)
        assert parsed.command == ("serve" if found.ending else "run")
        assert parsed.log_format == "json"
        path = EXAMPLE / f"{found.party}.yaml"
        settings = load_party_settings(SETTINGS[found.party], path, parsed.overrides)
        assert settings.status is not None
        if isinstance(settings, ActiveSettings) and found.ending:
            serving = settings.serving
            is_beyond = serving.http is not None and "127." not in serving.http
            assert not is_beyond or (serving.tls is not None and serving.token_file is not None)


@deployed
def test_no_supervisor_restarts_for_ever_what_will_not_change(found: Deployed) -> None:
    assert {SettingsError.exit_code, DataError.exit_code} == FINAL["-serve"]
    assert {EndedForGood.exit_code, PeerEndedForGood.exit_code} <= FINAL[""]
    assert not {SplitveilError.exit_code, PeerUnreachable.exit_code} & FINAL[""]
    prevented = " ".join(found.unit["RestartPreventExitStatus"]).split()
    assert {int(code) for code in prevented} == FINAL[found.ending]
    assert found.unit["Restart"] == ["on-failure"]
    if found.ending:
        assert found.unit["StartLimitIntervalSec"] == ["0"]
        assert found.compose["restart"] == "unless-stopped"
        return
    rules = found.manifests["Job"]["spec"]["podFailurePolicy"]["rules"]
    (failing,) = [rule["onExitCodes"] for rule in rules if rule["action"] == "FailJob"]
    assert (failing["operator"], set(failing["values"])) == ("In", FINAL[""])
    assert failing["containerName"] == f"{found.party}-party"
    assert found.manifests["Job"]["spec"]["backoffLimit"] >= 10
    assert found.pod["restartPolicy"] == "Never"  # as podFailurePolicy demands
    # Compose knows no exit codes, so that the number of restarts is bounded; after exit code 5, the
    # next start ends with 0.
    assert re.fullmatch(r"on-failure:\$\{\w+:-[1-9]\d*\}", found.compose["restart"])
    assert int(found.env_example[f"{found.party.upper()}_RESTARTS"]) >= 10


@deployed
def test_nobody_is_root_memory_is_limited_and_only_the_results_can_be_written(
    found: Deployed,
) -> None:
    (writable,) = [one for one in found.compose["volumes"] if not one.endswith(":ro")]
    assert writable.endswith(":/runs")
    assert found.compose["tmpfs"] == ["/tmp"]  # noqa: S108 - mounted without exec; the image has libsodium
    found.check_nobody_is_root()
    (container,) = found.pod["containers"]
    limits = (
        found.compose["mem_limit"],
        *found.unit["MemoryMax"],
        container["resources"]["limits"]["memory"],
    )
    assert {limit.removesuffix("i").upper() for limit in limits} == {"8G"}


@deployed
def test_health_is_asked_at_the_status_port_which_stays_on_loopback(found: Deployed) -> None:
    (start,) = found.unit["ExecStart"]
    name = f"{named(found)}".upper().replace("-", "_") + "_STATUS"
    assert f"--set status=${{{name}}}" in start
    assert found.unit_environment[name] == found.env_example[name]
    assert found.unit["EnvironmentFile"] == [f"-/etc/splitveil/%i/{named(found)}.env"]
    check = " ".join(found.compose["healthcheck"]["test"])
    assert f"127.0.0.1:{STATUS_PORT}/healthz" in check
    (status,) = [port for port in found.compose["ports"] if port.endswith(f":{STATUS_PORT}")]
    assert status.partition(":-")[2].startswith("127.0.0.1:")
    (container,) = found.pod["containers"]
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": "status"}
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"
    ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
    assert ports["status"] == STATUS_PORT
    if found.ending:
        assert {*ports.values()} == {PORTS[found.party], STATUS_PORT}
        assert {port.rpartition(":")[2] for port in found.compose["ports"]} == {*ports.values()}


def test_every_example_is_defended_and_compose_runs_one() -> None:
    for example in EXAMPLE.parent.glob("*/active.yaml"):
        assert load_party_settings(ActiveSettings, example, []).defense.name != "none"
    both = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    for party in PARTIES:
        service = both[f"{party}-party"]
        assert service["command"][1] == f"/examples/{EXAMPLE.name}/{party}.yaml"
        assert service["mem_limit"]
    assert "--set=defense.name=${DEFENSE:-marvell}" in both["active-party"]["command"]


@deployed
def test_the_example_of_an_env_file_names_every_variable_and_no_other(found: Deployed) -> None:
    assert {one[1] for one in VARIABLE.finditer(found.compose_text)} == set(found.env_example)


@served
def test_training_and_serving_use_different_ports_of_the_host(found: Deployed) -> None:
    training = (ROOT / f"docker-compose.{found.party}.yml").read_text(encoding="utf-8")
    taken = set(re.findall(r":-[\d.]+:(\d+)\}", training))
    own = set(re.findall(r":-[\d.]+:(\d+)\}", str(found.compose["ports"])))
    (start,) = found.unit["ExecStart"]
    assert own
    assert not (own | set(re.findall(r"127\.0\.0\.1:(\d+)", start))) & taken


@trained
def test_an_image_is_built_from_the_packages_of_one_party(found: Deployed) -> None:
    party = found.party
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    stages = dict(
        re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    )
    own = stages[f"{party}-party"]
    assert f"--from={party}-packages" in own
    assert "--from=packages" not in own
    kept = re.findall(r"! -name (\S+)", stages[f"{party}-packages"])
    assert kept == ["__init__.py", "protos", "common", f"{party}_party", f"{party}-party"]
    assert "USER splitveil" in own
    assert "libsodium" in stages["dependencies"]
    assert found.compose["build"]["target"] == f"{party}-party"


@pytest.mark.parametrize("party", PARTIES)
def test_a_party_runs_without_the_packages_that_its_image_lacks(party: str) -> None:
    other = PARTIES[1 - PARTIES.index(party)]
    kept = ("protos", "common", f"{party}_party")
    packages = (path.parent.name for path in (ROOT / "splitveil").glob("*/__init__.py"))
    absent = [f"splitveil.{name}" for name in packages if name not in kept]
    assert f"splitveil.{other}_party" in absent
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({absent}))\n"
        f"from splitveil.{party}_party.__main__ import main\n"
        f"main(['check', {str(EXAMPLE / f'{party}.yaml')!r}, '--set', "
        "'security={mode: insecure}', '--set', "
        f"'{'listen' if party == 'active' else 'connect'}=127.0.0.1:1'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "ok: data: 569 rows" in done.stdout, done.stderr
    assert "No module named" not in done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@deployed
def test_systemd_finds_no_fault_with_a_unit(found: Deployed, tmp_path: Path) -> None:
    """The program is not installed here, so that another stands in its place."""
    text = found.unit_file.read_text(encoding="utf-8")
    file = tmp_path / found.unit_file.name
    file.write_text(text.replace(f"/opt/splitveil/bin/{found.party}-party", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@deployed
def test_every_manifest_fits_the_schema_of_kubernetes_and_is_applied(found: Deployed) -> None:
    kinds = {found.workload, "NetworkPolicy"}
    kinds |= {"Service"} if found.ending else {"PersistentVolumeClaim"}
    assert kinds <= found.manifests.keys()
    for document in found.manifests.values():
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    files = {path.name for path in found.manifest_folder.glob("*.yaml")} - {"kustomization.yaml"}
    assert files == set(found.kustomization["resources"])
    volumes = {one["name"] for one in found.pod["volumes"]}
    containers = (*found.pod["containers"], *found.pod["initContainers"])
    assert {m["name"] for one in containers for m in one["volumeMounts"]} == volumes


@deployed
def test_policies_and_services_choose_the_party_s_pods(found: Deployed) -> None:
    (labels,) = (one["pairs"] for one in found.kustomization["labels"])
    name = {"app.kubernetes.io/name": f"splitveil-{named(found)}"}
    assert name.items() <= labels.items()
    chosen = [found.manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]]
    if found.ending:
        chosen.append(found.manifests["Deployment"]["spec"]["selector"]["matchLabels"])
    if "Service" in found.manifests:
        service = found.manifests["Service"]["spec"]
        chosen.append(service["selector"])
        assert STATUS_PORT not in {str(port["port"]) for port in service["ports"]}
    assert chosen == [name] * len(chosen)
