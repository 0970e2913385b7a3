"""Certificates as a party reads them: refusals at the start, and the effect of replaced files."""

import logging
import os
import stat
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from splitveil.common.errors import SettingsError, StorageError
from splitveil.common.party.credentials import days_until, describe
from splitveil.common.party.party_settings import load_party_settings
from splitveil.common.run.contract import Contract
from splitveil.common.settings import validate
from splitveil.deploy import authority
from splitveil.deploy import authority as issuing
from splitveil.passive_party.settings import PassiveSettings
from tests.support.certificates import NAMES, add_expired, certs, files, make
from tests.support.runs import CONTRACT, write_example

Spoil = Callable[[authority.PartyFolder], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make(tmp_path / "certificates", stranger="stranger.example")


def test_good_files_are_read_and_described(folder: Path) -> None:
    credentials = files(folder, "passive").current()
    assert credentials.identities == ("passive.splitveil",)
    assert describe(credentials) == "CN=passive.splitveil (passive.splitveil), 89 days left"
    key = authority.PartyFolder(folder / "passive").private_key.read_text().splitlines()[1]
    assert key not in repr(credentials) + str(credentials) + repr(files(folder, "passive"))


def problem(folder: Path, party: str = "passive", identity: str | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        files(folder, party, identity).current()
    return str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_key_that_others_may_read_is_refused_with_the_command_that_helps(
    folder: Path, mode: int
) -> None:
    key = authority.PartyFolder(folder / "passive").private_key
    key.chmod(mode)
    assert problem(folder) == (
        f"security.private_key: {key} has mode {mode:04o}, so that others may read it: "
        f"chmod 600 {key}"
    )
    key.chmod(0o400)
    files(folder, "passive").current()


def with_key(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> Spoil:
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return lambda own: own.private_key.write_bytes(pem)


BAD_PEM = "-----BEGIN PRIVATE KEY-----\nsecret\n-----END PRIVATE KEY-----\n"
OTHER = "private_key.pem: does not belong to the certificate in"
UNKNOWN_KIND = "expected an EC (P-256, P-384) or RSA key"


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda own: own.certificate.unlink(), "certificate.pem: there is no such file in "),
        (lambda own: own.certificate.write_text("x"), "expected certificates in PEM form"),
        (lambda own: own.authority.write_text(""), "expected certificates in PEM form"),
        (
            lambda own: own.private_key.write_text(BAD_PEM),
            "private_key.pem: expected a private key in PEM form, no password",
        ),
        (with_key(ec.generate_private_key(ec.SECP256R1())), OTHER),
        (with_key(ec.generate_private_key(ec.SECP521R1())), UNKNOWN_KIND),
        (with_key(ed25519.Ed25519PrivateKey.generate()), UNKNOWN_KIND),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_setting(
    folder: Path, spoil: Spoil, text: str
) -> None:
    spoil(authority.PartyFolder(folder / "passive"))
    found = problem(folder)
    assert text in found
    assert found.startswith("security.")
    assert "secret" not in found


def test_a_certificate_with_another_name_or_outside_its_time_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        "expected 'passive.bank' (contract.identities) among the DNS names of its subject "
        "alternative name, got passive.splitveil"
    ) in problem(folder, identity="passive.bank")
    add_expired(folder, "late", "late.splitveil")
    assert "late/certificate.pem: expired on " in problem(folder, "late")
    monkeypatch.setattr(issuing, "CLOCK_SKEW", timedelta(days=-5))
    authority.keep_certificates(folder, {"early": "early.splitveil"})
    assert "early/certificate.pem: valid only from " in problem(folder, "early")


@pytest.mark.parametrize(("days", "lines"), [(29, 1), (32, 0)])
def test_a_certificate_that_ends_soon_is_warned_of_once(
    folder: Path, caplog: pytest.LogCaptureFixture, days: int, lines: int
) -> None:
    authority.renew_certificate(folder, "passive", days)
    own = files(folder, "passive")
    caplog.clear()
    for _ in range(3):
        own.current()
    assert len(caplog.records) == lines
    assert all(f"in {days - 1} days: replace it" in r.getMessage() for r in caplog.records)


def test_half_a_rotation_leaves_the_old_pair_in_use(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    own, paths = files(folder, "passive"), authority.PartyFolder(folder / "passive")
    before, new = own.current(), make(folder / "new")
    (new / "passive" / "private_key.pem").replace(paths.private_key)
    caplog.clear()
    assert own.current() is before
    assert own.current() is before
    (line,) = caplog.messages
    assert "does not belong to the certificate" in line
    assert "the previous certificate stays in use" in line
    (new / "passive" / "certificate.pem").replace(paths.certificate)
    caplog.clear()
    assert own.current().certificate == paths.certificate.read_bytes()
    assert caplog.messages == [
        "new certificate in use: CN=passive.splitveil (passive.splitveil), 89 days left"
    ]


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("security={mode: tls}", "security: expected mode mtls or insecure"),
        ("security={mode: mtls}", "security.mtls.certificate: expected a value"),
        ("security={}", "security.mtls.private_key: expected a value"),
        ("security=null", "security: expected mode mtls or insecure"),
    ],
)
def test_no_protection_comes_from_no_mistake(tmp_path: Path, override: str, text: str) -> None:
    write_example(tmp_path)
    with pytest.raises(SettingsError) as caught:
        load_party_settings(PassiveSettings, tmp_path / "passive.yaml", [override])
    assert text in str(caught.value)


def test_every_party_has_an_identity_and_both_parties_compare_them() -> None:
    plain = validate(Contract, CONTRACT, "contract")
    assert plain.identities == NAMES
    spelt_out = validate(Contract, CONTRACT | {"identities": NAMES}, "contract")
    assert spelt_out.digest() == plain.digest()
    given = {"identities": {"active": "Split.Bank.example"}}
    other = validate(Contract, CONTRACT | given, "contract")
    assert other.identities == NAMES | {"active": "split.bank.example"}
    assert plain.fields_differing_from(other.canonical_json()) == ["identities.active"]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"identities": {"third": "third.example"}}, "identities: unknown party third"),
        ({"identities": {"active": "passive.splitveil"}}, "identities: two parties have the same"),
        ({"identities": {"active": "*.splitveil"}}, "identities.active: expected a text of"),
        ({"identities": ["active"]}, "identities: expected a section"),
        ({"passive_parties": ["active"]}, "passive_parties: 'active' is the other party's name"),
    ],
)
def test_identities_that_distinguish_no_party_are_refused(
    values: dict[str, object], text: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        validate(Contract, CONTRACT | values, "contract")
    assert text in str(caught.value)


def certificate_of(folder: Path, party: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(
        authority.PartyFolder(folder / party).certificate.read_bytes()
    )


def test_a_party_s_folder_holds_its_own_key_and_nothing_that_signs(tmp_path: Path) -> None:
    folder, before = tmp_path / "certificates", os.umask(0)
    try:
        make(folder, stranger="stranger.example")
    finally:
        os.umask(before)
    keys = {path: path.read_bytes() for path in folder.rglob("private_key.pem")}
    assert len(set(keys.values())) == len(keys) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys} == {0o600}
    assert sorted(path.name for path in (folder / "passive").iterdir()) == [
        "authority.pem",
        "certificate.pem",
        "private_key.pem",
    ]


def test_nothing_is_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*.pem")}
    assert certs(["init", str(folder)]) == 2
    assert certs(["init", str(folder), "--party", "another", "--party", "active"]) == 2
    assert "will not be overwritten" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.rglob("*.pem")} == before


def test_init_keep_adds_what_is_missing_and_renews_what_ends_soon(folder: Path) -> None:
    authority.renew_certificate(folder, "passive", 20)
    kept, ending = certificate_of(folder, "active"), certificate_of(folder, "passive")
    keep = ["init", str(folder), "--keep", *(f"--party={p}" for p in (*NAMES, "third"))]
    assert certs(keep) == 0
    assert certificate_of(folder, "active") == kept
    assert certificate_of(folder, "passive").not_valid_after_utc > ending.not_valid_after_utc
    files(folder, "third").current()


def test_renew_gives_another_key_the_same_name_and_show_says_until_when(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = certificate_of(folder, "stranger")
    assert certs(["renew", str(folder), "--party", "stranger", "--days", "7"]) == 0
    after = certificate_of(folder, "stranger")
    assert after.public_key() != before.public_key()
    renewed = files(folder, "stranger", "stranger.example").current()
    assert renewed.identities == ("stranger.example",)
    assert days_until(renewed.ends) == 6
    capsys.readouterr()
    assert certs(["show", str(authority.PartyFolder(folder / "stranger").certificate)]) == 0
    shown = capsys.readouterr().out
    assert "subject     CN=stranger.example\nidentities  stranger.example\n" in shown
    assert "days left   6\n" in shown


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--party", "../x"], "a contract does not allow this name"),
        (["--party", "authority"], "that folder belongs to the authority"),
        (["--name-of", "third=x"], "expected PARTY=DNS_NAME, with PARTY from active, passive"),
        (["--name-of", "active=no name"], "'no name' is not a DNS name"),
    ],
)
def test_names_that_no_contract_could_use_are_refused(
    tmp_path: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert certs(["init", str(tmp_path / "new"), *arguments]) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        authority.make_certificates(tmp_path / "file", NAMES)
