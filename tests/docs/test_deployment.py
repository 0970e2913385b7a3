"""Compose files, systemd units and Kubernetes manifests: valid, hardened, and of one mind.

They were started for real, too; what these tests hold is what a later change could break unseen.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from torch.distributed import run as torchrun

from splitveil.active_party.commands.program import parser as active_parser
from splitveil.active_party.settings import ActiveSettings
from splitveil.common import errors
from splitveil.common.party.party_settings import PartySettings, load_party_settings
from splitveil.passive_party.commands.program import parser as passive_parser
from splitveil.passive_party.settings import PassiveSettings
from tests.support import unit_sandbox
from tests.support.deployed import (
    CAN_RENDER,
    EXAMPLE,
    KUBERNETES,
    STATUS_PORT,
    SYSTEMD,
    VARIABLE,
    Deployed,
    directives,
    filled,
    rendered,
    services_of,
)
from tests.support.markdown import ROOT, blocks

PARTIES = ("active", "passive")
PARSERS = {"active": active_parser, "passive": passive_parser}
SETTINGS: dict[str, type[PartySettings]] = {"active": ActiveSettings, "passive": PassiveSettings}
TRAINING = [Deployed(party) for party in PARTIES]
SERVING = [Deployed(party, serves=True) for party in PARTIES]
PORTS = {"active": "8443", "passive": "50061"}
"""Those at which others ask of a party that serves."""

FINAL = {False: {2, 3, 5}, True: {2, 3}}
"""Exit codes after which the same start ends the same way: settings, data, and the end for good."""

GPU = "docker-compose.gpu.yml"
LAUNCHER = "python -m splitveil.common.party.torchrun --no-python"
INDEX = "batch.kubernetes.io/job-completion-index"

deployed = pytest.mark.parametrize("found", [*TRAINING, *SERVING], ids=lambda found: found.name)
trained = pytest.mark.parametrize("found", TRAINING, ids=lambda found: found.name)
renders = pytest.mark.skipif(not CAN_RENDER, reason="kubectl is not installed")


def commands(found: Deployed) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the program and the words of the command line in each of a party's files."""
    program = f"{found.party}-party"
    yield (program, [filled(word, found.env_example) for word in found.compose["command"]])
    (start,) = found.unit["ExecStart"]
    path, *words = filled(start, found.unit_environment).split()
    yield Path(path).name, words
    if CAN_RENDER:
        (container,) = found.pod["containers"]
        env = {one["name"]: one.get("value", "") for one in container.get("env", ())}
        words = [re.sub(r"\$\((\w+)\)", lambda m: env[m[1]], one) for one in container["args"]]
        yield container["command"][0], words


@deployed
def test_every_command_line_is_one_that_the_program_takes(found: Deployed) -> None:
    for program, words in commands(found):
        assert program == f"{found.party}-party"
        parsed = PARSERS[found.party]().parse_args(words)
        assert parsed.command == ("serve" if found.serves else "run")
        assert parsed.log_format == "json"
        path = EXAMPLE / f"{found.party}.yaml"
        settings = load_party_settings(SETTINGS[found.party], path, parsed.overrides)
        assert settings.status is not None
        if isinstance(settings, ActiveSettings) and found.serves:
            serving = settings.serving
            is_beyond = serving.http is not None and "127." not in serving.http
            assert not is_beyond or (serving.tls is not None and serving.token_file is not None)


@deployed
def test_no_supervisor_restarts_for_ever_what_will_not_change(found: Deployed) -> None:
    assert {errors.SettingsError.exit_code, errors.DataError.exit_code} == FINAL[True]
    assert {errors.EndedForGood.exit_code, errors.PeerEndedForGood.exit_code} <= FINAL[False]
    assert not {errors.SplitveilError.exit_code, errors.PeerUnreachable.exit_code} & FINAL[False]
    prevented = " ".join(found.unit["RestartPreventExitStatus"]).split()
    assert {int(code) for code in prevented} == FINAL[found.serves]
    assert found.unit["Restart"] == ["on-failure"]
    if found.serves:
        assert found.unit["StartLimitIntervalSec"] == ["0"]
        assert found.compose["restart"] == "unless-stopped"
        return
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
    memory = f"{found.party.upper()}_MEMORY"
    assert found.compose["mem_limit"] == f"${{{memory}:-8g}}"
    assert (found.env_example[memory], found.unit["MemoryMax"]) == ("8g", ["8G"])


@deployed
def test_health_is_asked_at_the_status_port_which_stays_on_loopback(found: Deployed) -> None:
    (start,) = found.unit["ExecStart"]
    assert "--set status=${STATUS}" in start
    name = found.name.upper().replace("-", "_") + "_STATUS"
    assert {found.unit_environment["STATUS"], found.env_example[name]} <= {
        f"127.0.0.1:946{number}" for number in ("67" if found.serves else "45")
    }
    assert found.unit["EnvironmentFile"] == [f"-/etc/splitveil/%i/{found.name}.env"]
    check = " ".join(found.compose["healthcheck"]["test"])
    assert f"127.0.0.1:{STATUS_PORT}/healthz" in check
    (status,) = [port for port in found.compose["ports"] if port.endswith(f":{STATUS_PORT}")]
    assert status.partition(":-")[2].startswith("127.0.0.1:")
    if found.serves:
        inside = {port.rpartition(":")[2] for port in found.compose["ports"]}
        assert inside == {PORTS[found.party], STATUS_PORT}


@trained
def test_runs_on_one_host_differ_in_project_and_ports(found: Deployed) -> None:
    both = services_of(found.compose_file)
    ports = [one for service in both.values() for one in service.get("ports", ())]
    names = [re.fullmatch(r"\$\{(\w+):-[\d.]+:\d+\}:\d+", port) for port in ports]
    values = [found.env_example[name[1]] for name in names if name]
    assert len({value.rpartition(":")[2] for value in values}) == len(ports)  # training and serving
    text = (ROOT / found.compose_file).read_text(encoding="utf-8")
    assert f"\nname: {found.party}-${{{found.party.upper()}_RUN:?" in text


@pytest.mark.parametrize("base", ["docker-compose.yml", *(one.compose_file for one in TRAINING)])
def test_the_file_for_gpus_fits_every_compose_file(base: str, tmp_path: Path) -> None:
    own, gpu = services_of(base), services_of(GPU)
    assert gpu.keys() <= own.keys()  # Compose refuses a service that is in the override only
    absent = {name for name in gpu if own[name] == {"profiles": ["elsewhere"]}}
    for name, service in gpu.items():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        party, _, kind = name.partition("-")
        for launcher in ["", LAUNCHER][: 1 if kind == "serve" else 2]:
            own_words = [*launcher.split(), f"{party}-party", "run", "a file.yaml"]
            script = [filled(word, {"GPUS": launcher}) for word in service["entrypoint"]]
            assert said(tmp_path, script) == [*own_words, "--set=device=cuda"]
    compose = ["docker", "compose"]
    if subprocess.run([*compose, "version"], capture_output=True, check=False).returncode == 0:
        words = ["-f", base, "-f", GPU, "--profile", "serve", "config", "--services"]
        variables = {name: value for one in TRAINING for name, value in one.env_example.items()}
        services = subprocess.check_output([*compose, *words], cwd=ROOT, env=os.environ | variables)
        assert {*services.decode().split()} == own.keys() - absent


def said(folder: Path, entrypoint: Sequence[str]) -> list[str]:
    """Return the words that an entry point starts a program with, its name first."""
    for program in ("active-party", "passive-party", "python"):
        (folder / program).write_text('#!/bin/sh\nprintf "%s\\n" "${0##*/}" "$@"\n')
        (folder / program).chmod(0o700)
    command = [word.replace("$$", "$") for word in entrypoint]
    path = {"PATH": f"{folder}:/usr/bin:/bin"}
    words = subprocess.check_output([*command, "run", "a file.yaml"], env=path, text=True)
    return words.splitlines()


def test_every_example_is_defended_and_compose_runs_one() -> None:
    for example in EXAMPLE.parent.glob("*/active.yaml"):
        assert load_party_settings(ActiveSettings, example, []).defense.name != "none"
    both = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]
    for party in PARTIES:
        service = both[f"{party}-party"]
        assert service["command"][1] == f"/examples/{EXAMPLE.name}/{party}.yaml"
        assert service["mem_limit"]
    assert "--set=defense.name=${DEFENSE:-marvell}" in both["active-party"]["command"]


@trained
def test_the_example_of_an_env_file_names_every_variable_and_no_other(found: Deployed) -> None:
    text = (ROOT / found.compose_file).read_text(encoding="utf-8")
    assert {one[1] for one in VARIABLE.finditer(text)} == set(found.env_example)


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


def test_an_image_takes_no_package_without_a_digest_but_another_build_of_torch() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    installs = [one.split() for one in re.findall(r"(?:pip|uv) install ([^;&\n]*)", text)]
    unchecked = [one for one in installs if "--no-deps" not in one and "-r" not in one]
    assert [one[-1] for one in unchecked] == ["torch"]
    assert "TORCH_BACKEND" in " ".join(unchecked[0])
    files = {one[one.index("-r") + 1] for one in installs if "-r" in one}
    assert files == {"/dev/stdin", "pylock.rest.toml", "pylock.toml"}
    assert re.search(r"pip==\S+ --hash=sha256:[0-9a-f]{64} +\| pip install -r /dev/stdin", text)
    assert all("--no-build-isolation" in one for one in installs if "--no-deps" in one)


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
    """The program is not installed here, so that a link in another folder stands in its place."""
    unit = tmp_path / found.unit_file.name.replace("PARTY", found.party)
    (tmp_path / f"{unit.name}.d").mkdir()
    copies = {found.unit_file: unit}
    for drop_in in () if found.serves else ("gpu.conf", "ranks.conf"):
        copies[SYSTEMD / drop_in] = tmp_path / f"{unit.name}.d" / drop_in
    for file, copy in copies.items():
        copy.write_text(
            file.read_text(encoding="utf-8").replace("/opt/splitveil/bin", str(tmp_path))
        )
    for program in (f"{found.party}-party", "python"):
        (tmp_path / program).symlink_to("/bin/true")
    for check in (["verify"], ["security", "--offline=yes", "--threshold=20"]):
        done = subprocess.run(
            ["systemd-analyze", *check, str(unit)], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stdout


@pytest.mark.skipif(not unit_sandbox.CAN_FILTER, reason="needs systemd-analyze and libseccomp")
def test_ranks_meet_under_the_filters_of_the_drop_in(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from splitveil.common.models.ranks import Ranks\n"
        "from splitveil.common.party.workers import Rank, _private_file\n"
        "rank = Rank.of_environment()\n"
        "ranks = Ranks(rank.number, rank.size, file=_private_file(rank))\n"
        "ranks.compare({})\nprint('met')\nranks.close()\n"
    )
    filters = directives(TRAINING[0].unit_file, SYSTEMD / "ranks.conf")
    assert filters["KillMode"] == ["mixed"]
    done = subprocess.run(
        [sys.executable, *LAUNCHER.split()[1:3], "--nproc-per-node=2", str(program)],
        preexec_fn=lambda: unit_sandbox.enter(filters),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.count("met") == 2, done.stderr


@renders
@deployed
def test_every_manifest_fits_the_schema_of_kubernetes_and_is_hardened(found: Deployed) -> None:
    expected = {"Deployment" if found.serves else "Job", "NetworkPolicy"}
    expected |= {"Service"} if found.serves or found.party == "active" else set()
    assert found.manifests.keys() == expected
    for document in found.manifests.values():
        check_schema(document)
    check_pod(found.pod)
    if found.serves:
        ports = {str(one["containerPort"]) for one in found.pod["containers"][0]["ports"]}
        assert ports == {PORTS[found.party], STATUS_PORT}
        return
    check_schema(
        yaml.safe_load((KUBERNETES / found.party / "runs.yaml").read_text(encoding="utf-8"))
    )
    job = found.manifests["Job"]["spec"]
    (failing,) = [
        one["onExitCodes"] for one in job["podFailurePolicy"]["rules"] if one["action"] == "FailJob"
    ]
    assert (failing["operator"], set(failing["values"])) == ("In", FINAL[False])
    assert failing["containerName"] == found.pod["containers"][0]["name"]
    assert job["backoffLimit"] >= 10
    assert found.pod["restartPolicy"] == "Never"  # as podFailurePolicy demands


def check_schema(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def check_pod(pod: dict[str, Any]) -> None:
    containers = (*pod["containers"], *pod["initContainers"])
    volumes = {one["name"] for one in pod["volumes"]}
    assert {m["name"] for one in containers for m in one["volumeMounts"]} == volumes
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in containers:
        allowed = container["securityContext"]
        assert allowed["readOnlyRootFilesystem"] is True
        assert allowed["allowPrivilegeEscalation"] is False
        assert allowed["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"]


def overlay(folder: Path, party: str, run: str, *components: str) -> Path:
    """Write the overlay of the guide for a run, and return its folder."""
    shutil.copytree(KUBERNETES, folder / "deploy" / "kubernetes", dirs_exist_ok=True)
    (shown,) = [
        one.text
        for one in blocks(ROOT / "docs" / "guide" / "operations.md")
        if one.text.startswith("# monday/kustomization.yaml")
    ]
    wanted = f"components: [{', '.join(f'../deploy/kubernetes/{one}' for one in components)}]"
    assert "components: [../deploy/kubernetes/gpu, ../deploy/kubernetes/ranks]" in shown
    text = re.sub(r"components: \[.*?\]", wanted, shown)
    (folder / run).mkdir()
    for name in (f"{party}.yaml", "contract.yaml"):
        (folder / run / name).touch()
    text = text.replace("monday", run).replace("active", party)
    (folder / run / "kustomization.yaml").write_text(text)
    return folder / run


@renders
@pytest.mark.parametrize("components", [(), ("gpu", "ranks")], ids=["Job", "JobSet"])
@pytest.mark.parametrize("party", PARTIES)
def test_two_runs_in_a_namespace_do_not_meet(
    party: str, components: Sequence[str], tmp_path: Path
) -> None:
    runs = [rendered(overlay(tmp_path, party, run, *components)) for run in ("monday", "tuesday")]
    for kind, one in runs[0].items():
        assert one["metadata"]["name"] != runs[1][kind]["metadata"]["name"]
    assert "PersistentVolumeClaim" not in runs[0]  # with the account books, which both runs share
    pods = [job_of(run)["template"] for run in runs]
    rank_0 = {INDEX: "0"} if components else {}
    labels = [pod["metadata"]["labels"] | rank_0 for pod in pods]
    for number, run in enumerate(runs):
        chosen = [run["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]]
        if "Service" in run:
            chosen.append(run["Service"]["spec"]["selector"])
            assert (INDEX in chosen[-1]) == bool(components)
            assert STATUS_PORT not in {str(one["port"]) for one in run["Service"]["spec"]["ports"]}
        for selector in chosen:
            assert selector.items() <= labels[number].items()
            assert not selector.items() <= labels[1 - number].items()
        maps = [
            one["configMap"]["name"]
            for one in pods[number]["spec"]["volumes"]
            if "configMap" in one
        ]
        assert maps == [run["ConfigMap"]["metadata"]["name"]]


def job_of(manifests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the specification of a Job, of a JobSet's only one, too."""
    if "JobSet" not in manifests:
        found: dict[str, Any] = manifests["Job"]["spec"]
        return found
    ((found,),) = [
        [one["template"]["spec"] for one in manifests["JobSet"]["spec"]["replicatedJobs"]]
    ]
    return found


@renders
@pytest.mark.parametrize("party", PARTIES)
def test_torchrun_starts_the_ranks_of_a_job_set_on_gpus(
    party: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = rendered(overlay(tmp_path, party, "monday", "gpu", "ranks"))
    job = job_of(manifests)
    check_schema(
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "any"}, "spec": job}
    )
    check_pod(job["template"]["spec"])
    (container,) = job["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable.get("value", "1"))
    launcher, words = container["command"][:3], container["command"][3:]
    found: Any = torchrun.get_args_parser().parse_args([*words, *container["args"]])
    assert launcher == LAUNCHER.split()[:3]
    assert (found.no_python, found.training_script) == (True, f"{party}-party")
    assert found.training_script_args == container["args"]
    assert int(found.nnodes) == job["completions"] == job["parallelism"] == 2
    assert (found.nproc_per_node, found.node_rank, found.master_port) == ("1", 1, 29500)
    assert PARSERS[party]().parse_args(container["args"]).overrides[-1] == "device=cuda"
    fields = {
        one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"]
        for one in container["env"]
        if "valueFrom" in one
    }
    assert fields == {
        "PET_NODE_RANK": f"metadata.annotations['{INDEX}']",
        "PET_MASTER_ADDR": "metadata.annotations['jobset.sigs.k8s.io/coordinator']",
    }
    assert manifests["JobSet"]["spec"]["coordinator"] == {"replicatedJob": "ranks"}
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2, 3, 5]
    (rule,) = manifests["JobSet"]["spec"]["failurePolicy"]["rules"]
    assert rule == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    policy = manifests["NetworkPolicy"]["spec"]
    own = [{"podSelector": policy["podSelector"]}]
    assert ({"from": own} in policy["ingress"], {"to": own} in policy["egress"]) == (True, True)
    assert not {"startupProbe", "livenessProbe", "readinessProbe"} & container.keys()  # rank 0 only
