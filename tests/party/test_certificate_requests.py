"""A party's key stays where it was made: a request travels, and only the right one is signed."""

from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import NameOID

from splitveil.deploy.authority import REQUEST, PartyFolder, make_request
from tests.support.certificates import certs


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    assert certs(["authority", str(tmp_path / "ours")]) == 0
    return tmp_path / "ours"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    make_request(tmp_path / "theirs", "passive", "passive.splitveil")
    return tmp_path / "theirs"


def sign(ours: Path, request: Path, *options: str) -> int:
    return certs(["sign", str(ours), str(request), "--party", "passive", *options])


def test_another_key_than_the_one_read_out_and_another_name_are_not_signed(
    ours: Path, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, _ = make_request(tmp_path / "thief", "passive", "passive.splitveil")
    assert sign(ours, theirs / "passive" / REQUEST, "--fingerprint", other) == 2
    assert "is not the one that was read out" in capsys.readouterr().err
    right, _ = make_request(tmp_path / "other name", "passive", "active.splitveil")
    request = tmp_path / "other name" / "passive" / REQUEST
    assert sign(ours, request) == 2
    expected = "expected a request for the one DNS name 'passive.splitveil', got active.splitveil"
    assert expected in capsys.readouterr().err
    assert not (ours / "passive").exists()
    read_out = ("--fingerprint", right.upper().replace(" ", ":"))
    assert sign(ours, request, "--name", "active.splitveil", *read_out) == 0


def crafted(path: Path, key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey) -> Path:
    builder = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "somebody")]))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("passive.splitveil")]), False)
    )
    algorithm = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    path.write_bytes(builder.sign(key, algorithm).public_bytes(serialization.Encoding.PEM))
    return path


def test_only_keys_that_tls_can_use_are_signed(
    ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in (ed25519.Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP521R1())):
        assert sign(ours, crafted(tmp_path / "request.pem", key)) == 2
        assert "expected the request of an EC key" in capsys.readouterr().err
    assert (
        sign(ours, crafted(tmp_path / "request.pem", ec.generate_private_key(ec.SECP384R1()))) == 0
    )


def test_a_request_that_was_changed_on_its_way_is_refused(
    ours: Path, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    der = x509.load_pem_x509_csr((theirs / "passive" / REQUEST).read_bytes()).public_bytes(
        serialization.Encoding.DER
    )
    changed = x509.load_der_x509_csr(der.replace(b"passive.splitveil", b"passive.splitvail"))
    path = tmp_path / "changed.pem"
    path.write_bytes(changed.public_bytes(serialization.Encoding.PEM))
    assert sign(ours, path, "--name", "passive.splitvail") == 2
    assert "signature is not by the key that it carries" in capsys.readouterr().err


def test_a_wrong_file_is_called_what_it_is(
    ours: Path, theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private_key = PartyFolder(theirs / "passive").private_key
    authority = PartyFolder(ours / "authority").certificate
    (tmp_path / "text.pem").write_text("-----BEGIN NONSENSE-----\n")
    for path, found in (
        (private_key, "a private key, which must not leave its owner's machine"),
        (authority, "a certificate"),
        (tmp_path / "text.pem", "no PEM file that splitveil knows"),
    ):
        assert sign(ours, path) == 2
        message = capsys.readouterr().err
        assert f"expected a certificate signing request, found {found}\n" in message
    assert sign(ours, tmp_path / "absent.pem") == 2
    assert "there is no" in capsys.readouterr().err
    assert certs(["show", str(private_key)]) == 2
    assert "private key" in capsys.readouterr().err


def test_another_party_s_folder_is_left_alone(
    ours: Path, theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_request(ours, "passive", "passive.splitveil")
    assert sign(ours, theirs / "passive" / REQUEST) == 2
    assert "belongs to another key than the request" in capsys.readouterr().err
    assert sign(ours, theirs / "passive" / REQUEST, "--output", str(ours / "sent")) == 0
    assert certs(["authority", str(ours)]) == 2


def test_a_key_that_stays_elsewhere_cannot_be_renewed_here(
    ours: Path, theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = PartyFolder(theirs / "passive").private_key
    before = key.read_bytes()
    _, is_new_key = make_request(theirs, "passive", "passive.splitveil")
    assert not is_new_key
    assert key.read_bytes() == before
    assert sign(ours, theirs / "passive" / REQUEST) == 0
    assert certs(["renew", str(ours), "--party", "passive"]) == 2
    assert "have it send a request" in capsys.readouterr().err
    assert sign(ours, theirs / "passive" / REQUEST, "--days", "9") == 0
