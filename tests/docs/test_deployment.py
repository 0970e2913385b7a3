"""Compose files, systemd units and Kubernetes manifests: valid, hardened, and of one mind.

They were started for real, too; what these tests hold is what a later change could break unseen.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import kubernetes_validate
import pytest
import yaml

from splitveil.active_party.command import parser as active_parser
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.errors import EndedForGood, PeerEndedForGood, PeerUnreachable, SplitveilError
from splitveil.common.party.party_settings import load_party_settings
from splitveil.passive_party.commands.program import parser as passive_parser
from splitveil.passive_party.settings import PassiveSettings
from tests.deployed import EXAMPLE, KUBERNETES, STATUS_PORT, VARIABLE, Deployed, filled
from tests.docs.markdown import ROOT

PARTIES = ("active", "passive")
PARSERS = {"active": active_parser, "passive": passive_parser}
SYSTEMD = ROOT / "deploy" / "systemd"

FINAL = {2, 3, 5}
"""Exit codes after which the same start ends the same way: settings, data, and the end for good."""

party = pytest.mark.parametrize("party", PARTIES)


class Words(NamedTuple):
    """A command line as a file names it."""

    program: str
    words: Sequence[str]


def deployed(party: str) -> Deployed:
    return Deployed(party, "", f"{party}-party", "Job")


def commands(party: str) -> Iterator[Words]:
    """Yield the command line in each of a party's files."""
    program = f"{party}-party"
    yield Words(
        program,
        [filled(word, deployed(party).env_example) for word in deployed(party).compose["command"]],
    )
    (start,) = deployed(party).unit["ExecStart"]
    path, *words = filled(start, deployed(party).unit_environment).split()
    yield Words(Path(path).name, words)
    (container,) = deployed(party).pod["containers"]
    environment = {one["name"]: one["value"] for one in container.get("env", ())}
    args = [re.sub(r"\$\((\w+)\)", lambda m: environment[m[1]], one) for one in container["args"]]
    yield Words(program, args)


def status_of(party: str, overrides: Sequence[str]) -> str | None:
    """Load an example's settings with overrides, and return the address of the endpoint."""
    path = EXAMPLE / f"{party}.yaml"
    if party == "active":
        return load_party_settings(ActiveSettings, path, overrides).status
    return load_party_settings(PassiveSettings, path, overrides).status


# ---- what all of them agree on ----


@party
def test_every_command_line_is_one_that_the_program_takes(party: str) -> None:
    for program, words in commands(party):
        assert program == f"{party}-party"
        parsed = PARSERS[party]().parse_args(words)
        assert parsed.command == "run"
        assert parsed.log_format == "json"
        assert status_of(party, parsed.overrides) is not None


def test_the_codes_of_a_run_that_was_ended_for_good_are_final() -> None:
    assert {EndedForGood.exit_code, PeerEndedForGood.exit_code} <= FINAL
    assert SplitveilError.exit_code not in FINAL  # a full disk
    assert PeerUnreachable.exit_code not in FINAL  # a peer that comes back


@party
def test_no_supervisor_restarts_for_ever_what_will_not_change(party: str) -> None:
    prevented = {
        int(code) for code in " ".join(deployed(party).unit["RestartPreventExitStatus"]).split()
    }
    rules = deployed(party).manifests["Job"]["spec"]["podFailurePolicy"]["rules"]
    failing = [rule["onExitCodes"] for rule in rules if rule["action"] == "FailJob"]
    assert prevented == FINAL
    assert [(one["operator"], set(one["values"])) for one in failing] == [("In", FINAL)]
    assert [one["containerName"] for one in failing] == [f"{party}-party"]
    # Compose knows no exit codes, so that the number of restarts is bounded; after exit code 5, the
    # next start ends with 0.
    assert re.fullmatch(r"on-failure:\$\{\w+:-[1-9]\d*\}", deployed(party).compose["restart"])


@party
def test_a_failure_that_may_pass_is_tried_again(party: str) -> None:
    assert deployed(party).unit["Restart"] == ["on-failure"]
    assert deployed(party).manifests["Job"]["spec"]["backoffLimit"] >= 10
    assert deployed(party).pod["restartPolicy"] == "Never"  # as podFailurePolicy demands
    assert int(deployed(party).env_example[f"{party.upper()}_RESTARTS"]) >= 10


def test_the_guide_has_the_exit_codes_of_the_supervisors() -> None:
    text = (ROOT / "docs" / "guide" / "operations.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (\d(?:, \d+)*) \|.*\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE
    )
    final = {int(codes) for codes, _, systemd, _ in rows if systemd.startswith("stays down")}
    assert final == FINAL


@party
def test_nobody_is_root_and_nothing_but_the_results_can_be_written(party: str) -> None:
    service = deployed(party).compose
    assert [one for one in service["volumes"] if not one.endswith(":ro")] == [
        f"${{{party.upper()}_RUNS:?folder for the results}}:/runs"
    ]
    deployed(party).check_nobody_is_root()


@party
def test_health_is_asked_at_the_status_port(party: str) -> None:
    assert f"127.0.0.1:{STATUS_PORT}/healthz" in " ".join(
        deployed(party).compose["healthcheck"]["test"]
    )
    (container,) = deployed(party).pod["containers"]
    paths = {
        probe: container[probe]["httpGet"]["path"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    health = {"startupProbe": "/healthz", "livenessProbe": "/healthz"}
    assert paths == health | {"readinessProbe": "/readyz"}
    ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
    assert ports["status"] == STATUS_PORT


@pytest.mark.parametrize("ending", ["", "-serve"])
@party
def test_a_party_s_memory_is_limited_alike_by_every_supervisor(party: str, ending: str) -> None:
    found = Deployed(
        party, ending, f"{party}{ending or '-party'}", "Deployment" if ending else "Job"
    )
    (container,) = found.pod["containers"]
    limits = (
        found.compose["mem_limit"],
        *found.unit["MemoryMax"],
        container["resources"]["limits"]["memory"],
    )
    assert {limit.removesuffix("i").upper() for limit in limits} == {"8G"}


# ---- compose ----


def test_what_compose_runs_is_defended() -> None:
    both = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    for party, service in (("active", both["active-party"]), ("passive", both["passive-party"])):
        assert service["command"][1] == f"/examples/{EXAMPLE.name}/{party}.yaml"
        assert service["mem_limit"]
    settings = load_party_settings(ActiveSettings, EXAMPLE / "active.yaml", [])
    assert settings.defense.name in {"marvell", "max_norm"}


@pytest.mark.parametrize(
    "example", sorted(EXAMPLE.parent.glob("*/active.yaml")), ids=lambda path: path.parent.name
)
def test_every_example_is_defended(example: Path) -> None:
    assert load_party_settings(ActiveSettings, example, []).defense.name != "none"


@party
def test_the_example_of_an_env_file_names_every_variable_and_no_other(party: str) -> None:
    text = (ROOT / f"docker-compose.{party}.yml").read_text(encoding="utf-8")
    assert {found[1] for found in VARIABLE.finditer(text)} == set(deployed(party).env_example)


@party
def test_the_status_port_is_published_on_loopback_only(party: str) -> None:
    published = [port for port in deployed(party).compose["ports"] if f":{STATUS_PORT}" in port]
    assert len(published) == 1
    assert published[0].partition(":-")[2].startswith("127.0.0.1:")
    assert deployed(party).env_example[f"{party.upper()}_STATUS"].startswith("127.0.0.1:")


@party
def test_an_image_is_built_from_the_packages_of_one_party(party: str) -> None:
    other = PARTIES[1 - PARTIES.index(party)]
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    stages = dict(
        re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    )
    assert f"--from={party}-packages" in stages[f"{party}-party"]
    assert "--from=packages" not in stages[f"{party}-party"]
    kept = re.findall(r"! -name (\S+)", stages[f"{party}-packages"])
    assert kept == ["__init__.py", "protos", "common", f"{party}_party", f"{party}-party"]
    assert f"{other}_party" not in stages[f"{party}-party"]
    assert "USER splitveil" in stages[f"{party}-party"]
    assert deployed(party).compose["build"]["target"] == f"{party}-party"


@party
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


# ---- systemd ----


@pytest.mark.parametrize("ending", ["", "-serve"])
@party
def test_an_instance_can_have_a_status_port_of_its_own(party: str, ending: str) -> None:
    found = Deployed(party, ending, "", "")
    (start,) = found.unit["ExecStart"]
    name = f"{party}{ending}".upper().replace("-", "_") + "_STATUS"
    assert f"--set status=${{{name}}}" in start
    assert found.unit_environment[name] == found.env_example[name]
    assert found.unit["EnvironmentFile"] == [f"-/etc/splitveil/%i/{party}{ending}.env"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@party
def test_systemd_finds_no_fault_with_a_unit(party: str, tmp_path: Path) -> None:
    """The program is not installed here, so that another stands in its place."""
    text = (SYSTEMD / f"splitveil-{party}@.service").read_text(encoding="utf-8")
    file = tmp_path / f"splitveil-{party}@.service"
    file.write_text(text.replace(f"/opt/splitveil/bin/{party}-party", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


# ---- Kubernetes ----


@party
def test_every_manifest_fits_the_schema_of_kubernetes(party: str) -> None:
    version = kubernetes_validate.latest_version()
    found = deployed(party).manifests
    assert {"Job", "NetworkPolicy", "PersistentVolumeClaim"} <= found.keys()
    for document in found.values():
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schema_notices_a_misspelt_field() -> None:
    job = deployed("active").manifests["Job"]
    job["spec"]["backofLimit"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)


@party
def test_every_manifest_of_the_folder_is_applied(party: str) -> None:
    files = {path.name for path in (KUBERNETES / party).glob("*.yaml")} - {"kustomization.yaml"}
    assert files == set(deployed(party).kustomization["resources"])


@party
def test_policies_and_services_choose_the_party_s_pods(party: str) -> None:
    (labels,) = (one["pairs"] for one in deployed(party).kustomization["labels"])
    name = {"app.kubernetes.io/name": f"splitveil-{party}"}
    assert name.items() <= labels.items()
    assert deployed(party).manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == name
    if party == "active":
        service = deployed(party).manifests["Service"]["spec"]
        assert service["selector"] == name
        assert STATUS_PORT not in str(service["ports"])


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@party
def test_kustomize_builds_what_fits_the_schema(party: str) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(KUBERNETES / party)],
        capture_output=True,
        text=True,
        check=True,
    )
    built = list(yaml.safe_load_all(done.stdout))
    assert {document["kind"] for document in built} == set(deployed(party).manifests)
    for document in built:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
