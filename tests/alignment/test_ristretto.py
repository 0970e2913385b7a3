"""ristretto255 as RFC 9496 defines it, from either copy of libsodium."""

import hashlib
import subprocess
import sys

import pytest

from splitveil.common.alignment import ristretto
from splitveil.common.alignment.ristretto import (
    LibraryError,
    NotInGroupError,
    Ristretto,
    WorkerPool,
)

# RFC 9496, appendix A.1: the generator's multiples 1, 2, 3, ...
MULTIPLES = [
    "e2f2ae0a6abc4e71a884a961c500515f58e30b6aa582dd8db6a65945e08d2d76",
    "6a493210f7499cd17fecb510ae0cea23a110e8d5b901f8acadd3095c73a3b919",
    "94741f5d5d52755ece4f23f044ee27d5d1ea1e2bd196b462166b16152a9d0259",
]

# RFC 9496, appendix A.2.
BAD_ENCODINGS = {
    "not canonical, high bit": "00" + "ff" * 31,
    "not canonical, 2^255 - 1": "ff" * 31 + "7f",
    "not canonical, p + 6": "f3" + "ff" * 30 + "7f",
    "not canonical, p": "ed" + "ff" * 30 + "7f",
    "negative, 1": "01" + "00" * 31,
    "negative": "ed57ffd8c914fb201471d1c3d245ce3c746fcbe63a3679d51b6a516ebebe0e20",
    "x squared is no square": "26948d35ca62e643e26a83177332e6b6afeb9d08e4268b650f1f5bbd8d81d371",
    "x y is negative": "3eb858e78f5a7254d8c9731174a94f76755fd3941c0ac93735c07ba14579630e",
    "y is zero": "ec" + "ff" * 30 + "7f",
    "the identity": "00" * 32,
}

# RFC 9496, appendix A.3: labels whose SHA-512 is mapped to the group.
HASHED = {
    "Ristretto is traditionally a short shot of espresso coffee": (
        "3066f82a1a747d45120d1740f14358531a8f04bbffe6a819f86dfe50f44a0a46"
    ),
    "made with the normal amount of ground coffee but extracted with": (
        "f26e5b6f7d362d2d2a94c5d0e7602cb4773c95a2e5c31a64f133189fa76ed61b"
    ),
    "about half the amount of water in the same amount of time": (
        "006ccd2a9e6867e6a2c5cea83d3302cc9de128dd2a9a57dd8ee7b9d7ffe02826"
    ),
}

GENERATOR = bytes.fromhex(MULTIPLES[0])


def scalar(number: int) -> bytes:
    return number.to_bytes(32, "little")


@pytest.fixture(scope="module", params=["first found", "wheel"])
def group(request: pytest.FixtureRequest) -> Ristretto:
    return ristretto.load() if request.param == "first found" else Ristretto(_wheel())


def _wheel() -> str:
    pytest.importorskip("rbcl")
    return ristretto.find_in_wheel()


def test_multiples_of_the_generator_are_those_of_the_rfc(group: Ristretto) -> None:
    multiples = [group.multiply(GENERATOR, scalar(n)).hex() for n in (1, 2, 3)]
    assert multiples == MULTIPLES


def test_differences_are_of_the_group(group: Ristretto) -> None:
    one, two, three = map(bytes.fromhex, MULTIPLES)
    assert group.subtract(three, two) == one
    assert group.subtract(one, group.subtract(one, two)) == two
    assert group.subtract(bytes(32), group.subtract(bytes(32), one)) == one
    for name, encoding in BAD_ENCODINGS.items():
        for pair in ((one, bytes.fromhex(encoding)), (bytes.fromhex(encoding), one)):
            if name != "the identity":
                with pytest.raises(NotInGroupError):
                    group.subtract(*pair)


def test_hashes_to_the_group_are_those_of_the_rfc(group: Ristretto) -> None:
    digests = b"".join(hashlib.sha512(label.encode()).digest() for label in HASHED)
    assert group.hash_to_group(digests).hex() == "".join(HASHED.values())


@pytest.mark.parametrize("encoding", BAD_ENCODINGS.values(), ids=BAD_ENCODINGS.keys())
def test_a_bad_encoding_is_rejected_wherever_it_stands(group: Ristretto, encoding: str) -> None:
    good = bytes.fromhex("".join(MULTIPLES))
    with pytest.raises(NotInGroupError) as caught:
        group.multiply(good + bytes.fromhex(encoding) + good, scalar(5))
    assert caught.value.position == 3


def test_the_order_of_two_multiplications_does_not_matter(group: Ristretto) -> None:
    a, b = group.random_scalar(), group.random_scalar()
    digests = ristretto.digest_ids(["one", "two", "three"])
    assert a != b
    there = group.multiply(group.mask(digests, a), b)
    assert there == group.multiply(group.mask(digests, b), a)
    assert there != group.mask(digests, a)


def test_an_id_is_hashed_under_the_domain() -> None:
    expected = hashlib.sha512(b"splitveil ecdh-ristretto255 id 1\x00" + "Zoë".encode()).digest()
    assert ristretto.digest_ids(["Zoë"]) == expected
    assert ristretto.digest_ids(["Zoë"]) != hashlib.sha512("Zoë".encode()).digest()


def test_a_library_without_the_group_is_refused() -> None:
    with pytest.raises(LibraryError, match="not a libsodium"):
        Ristretto("libc.so.6")
    with pytest.raises(LibraryError, match="not a libsodium"):
        Ristretto("libnothing-of-that-name.so")


def test_a_library_that_computes_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ristretto, "_TWICE_GENERATOR", GENERATOR)
    with pytest.raises(LibraryError, match="RFC 9496"):
        Ristretto(ristretto.load().name)


def test_the_wheel_steps_in_and_leaves_no_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("rbcl")
    folder = tmp_path_factory.mktemp("wheel")
    program = (
        "import os; from splitveil.common.alignment import ristretto as r; "
        "r._SYSTEM_LIBRARIES = ();"
        "print(r.load().name); assert r.load() is r.load();"
        f"print(len(os.listdir({str(folder)!r})))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={"TMPDIR": str(folder), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    name, files_while_loaded = ran.stdout.split()
    assert name.startswith(str(folder))
    assert files_while_loaded == "1"
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("num_elements", [1, 2, 7, 100])
def test_workers_give_the_same_bytes(num_elements: int) -> None:
    group = ristretto.load()
    digests = ristretto.digest_ids(map(str, range(num_elements)))
    secret = group.random_scalar()
    pool = WorkerPool(3, group)
    masked = pool.mask(digests, secret)
    assert masked == group.mask(digests, secret)
    assert pool.multiply(masked, secret) == group.multiply(masked, secret)


def test_workers_name_the_bad_element_and_continue() -> None:
    pool = WorkerPool(3, ristretto.load())
    with pytest.raises(NotInGroupError) as caught:
        pool.multiply(GENERATOR * 10 + bytes(32) + GENERATOR, scalar(2))
    assert caught.value.position == 10
    assert pool.multiply(GENERATOR, scalar(2)).hex() == MULTIPLES[1]
