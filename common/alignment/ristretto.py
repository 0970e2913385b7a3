"""The group ristretto255 (RFC 9496), by libsodium: hash to the group, multiply, reject.

libsodium is the system's library or, failing that, the copy in the ``rbcl`` wheel; either must
reproduce test vectors of the RFC before it is used.
"""

import atexit
import ctypes
import functools
import hashlib
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

POINT_BYTES = 32
SCALAR_BYTES = 32
DIGEST_BYTES = 64

# Ends in a byte that no name contains, so that no other domain equals this one plus an id's text.
_DOMAIN = b"splitveil ecdh-ristretto255 id 1\x00"

# Release 1.0.18, the first with ristretto255, has the library version 23.
_SYSTEM_LIBRARIES = ("libsodium.so.26", "libsodium.so.23")

# RFC 9496, appendix A.1: the generator and twice the generator. Appendix A.3: a label and its group
# element.
GENERATOR = bytes.fromhex("e2f2ae0a6abc4e71a884a961c500515f58e30b6aa582dd8db6a65945e08d2d76")
_TWICE_GENERATOR = bytes.fromhex("6a493210f7499cd17fecb510ae0cea23a110e8d5b901f8acadd3095c73a3b919")
_LABEL = b"Ristretto is traditionally a short shot of espresso coffee"
_LABEL_ELEMENT = bytes.fromhex("3066f82a1a747d45120d1740f14358531a8f04bbffe6a819f86dfe50f44a0a46")


class NotInGroupError(ValueError):
    """Bytes are not the canonical encoding of a group element, or encode the identity."""

    def __init__(self, position: int) -> None:
        self.position = position
        super().__init__(f"element {position} is not in the group, or is its identity")


class LibraryError(RuntimeError):
    """No libsodium with a correct ristretto255 could be loaded."""


def digest_ids(ids: Iterable[str]) -> bytes:
    """Concatenate SHA-512(domain || id) over the ids: the uniform bytes that RFC 9496 requires."""
    prefix = hashlib.sha512(_DOMAIN)
    digests = []
    for text in ids:
        state = prefix.copy()
        state.update(text.encode())
        digests.append(state.digest())
    return b"".join(digests)


class Ristretto:
    """Batches of group operations on concatenated encodings.

    Multiplication is done by libsodium, in a time that does not depend on the scalar.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        try:
            library = ctypes.CDLL(name)
            status = library.sodium_init()
            self._from_hash = library.crypto_core_ristretto255_from_hash
            self._multiply = library.crypto_scalarmult_ristretto255
            self._random_scalar = library.crypto_core_ristretto255_scalar_random
            self._invert = library.crypto_core_ristretto255_scalar_invert
            self._subtract = library.crypto_core_ristretto255_sub
        except (OSError, AttributeError) as error:
            raise LibraryError(f"{name}: not a libsodium with ristretto255: {error}") from error
        if status < 0:
            raise LibraryError(f"{name}: libsodium cannot be initialised")
        self._from_hash.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._multiply.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        self._random_scalar.argtypes = [ctypes.c_void_p]
        self._random_scalar.restype = None
        self._invert.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._subtract.argtypes = self._multiply.argtypes
        self._check_vectors()

    def random_scalar(self) -> bytes:
        """Draw a secret scalar, uniform and nonzero, from the operating system's randomness."""
        scalar = ctypes.create_string_buffer(SCALAR_BYTES)
        self._random_scalar(ctypes.addressof(scalar))
        return scalar.raw

    def invert(self, scalar: bytes) -> bytes:
        """Return the scalar that undoes a multiplication by a nonzero scalar."""
        inverse = ctypes.create_string_buffer(SCALAR_BYTES)
        if self._invert(ctypes.addressof(inverse), _address(scalar)):
            raise ValueError("zero has no inverse")
        return inverse.raw

    def hash_to_group(self, digests: bytes) -> bytes:
        """Map each 64-byte digest to a group element, one-way and uniformly."""
        num_points = len(digests) // DIGEST_BYTES
        points = ctypes.create_string_buffer(num_points * POINT_BYTES)
        source = _address(digests)
        target = ctypes.addressof(points)
        from_hash = self._from_hash
        for i in range(num_points):
            from_hash(target + POINT_BYTES * i, source + DIGEST_BYTES * i)
        return points.raw

    def multiply(self, points: bytes, scalar: bytes) -> bytes:
        _refuse_high_bits(points)
        products = ctypes.create_string_buffer(len(points))
        source, target = _address(points), ctypes.addressof(products)
        factor = _address(scalar)
        multiply = self._multiply
        for offset in range(0, len(points), POINT_BYTES):
            if multiply(target + offset, factor, source + offset):
                raise NotInGroupError(offset // POINT_BYTES)
        return products.raw

    def subtract(self, point: bytes, other: bytes) -> bytes:
        """Return the difference of two points; either may be the identity."""
        _refuse_high_bits(point + other)
        difference = ctypes.create_string_buffer(POINT_BYTES)
        if self._subtract(ctypes.addressof(difference), _address(point), _address(other)):
            raise NotInGroupError(0)
        return difference.raw

    def mask(self, digests: bytes, scalar: bytes) -> bytes:
        return self.multiply(self.hash_to_group(digests), scalar)

    def _check_vectors(self) -> None:
        two = (2).to_bytes(SCALAR_BYTES, "little")
        hashed = self.hash_to_group(hashlib.sha512(_LABEL).digest())
        twice = self.multiply(GENERATOR, two)
        found = (hashed, twice, self.subtract(twice, GENERATOR))
        if found != (_LABEL_ELEMENT, _TWICE_GENERATOR, GENERATOR):
            raise LibraryError(f"{self.name}: fails the test vectors of RFC 9496")


def _refuse_high_bits(points: bytes) -> None:
    """Refuse encodings of 2^255 and above, whose highest bit libsodium 1.0.18 ignores."""
    highest = points[POINT_BYTES - 1 :: POINT_BYTES]
    if highest and max(highest) > 0x7F:
        raise NotInGroupError(next(i for i, byte in enumerate(highest) if byte > 0x7F))


def _address(data: bytes) -> int:
    # The address of the bytes' own memory: nothing is copied, and nothing may be written there.
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0


@functools.cache
def load() -> Ristretto:
    """Load libsodium once per process: the system's library, or the copy in the ``rbcl`` wheel.

    Raises LibraryError: neither can be used; the message gives the reason for each.
    """
    problems = []
    for name in (*_SYSTEM_LIBRARIES, None):
        try:
            return Ristretto(name or find_in_wheel())
        except LibraryError as error:
            problems.append(str(error))
    raise LibraryError("\n".join(problems))


@functools.cache
def find_in_wheel() -> str:
    """Return the path of the temporary copy of the library that ``rbcl`` makes on import.

    Every import writes another 2.8 MB that are never removed. It is therefore imported only once,
    here, and the file is removed at exit.
    """
    try:
        with warnings.catch_warnings():
            # rbcl leaves that file for the garbage collector to close.
            warnings.simplefilter("ignore", ResourceWarning)
            import rbcl  # noqa: PLC0415 - the import writes the file: only when it is needed
    except (ImportError, OSError) as error:
        raise LibraryError(f"rbcl: {error}") from error
    path = str(rbcl._sodium._name)  # noqa: SLF001 - rbcl has no public name for the path
    atexit.register(Path(path).unlink, missing_ok=True)
    return path


class GroupOperations(Protocol):
    """The operations that the engine needs, of one ``Ristretto`` or a ``WorkerPool``."""

    def mask(self, digests: bytes, scalar: bytes) -> bytes:
        """Hash each digest to the group and multiply it by the scalar."""

    def multiply(self, points: bytes, scalar: bytes) -> bytes:
        """Multiply each point by the scalar, or raise NotInGroupError."""


class WorkerPool:
    """The batch operations of a group on several cores, for several threads at once.

    libsodium computes without the interpreter's lock; each batch is split evenly.
    """

    def __init__(self, num_workers: int, group: GroupOperations) -> None:
        self._group = group
        self._num_workers = num_workers
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="align-worker")

    def mask(self, digests: bytes, scalar: bytes) -> bytes:
        return self._spread(self._group.mask, digests, DIGEST_BYTES, scalar)

    def multiply(self, points: bytes, scalar: bytes) -> bytes:
        return self._spread(self._group.multiply, points, POINT_BYTES, scalar)

    def _spread(
        self,
        operation: Callable[[bytes, bytes], bytes],
        data: bytes,
        element_bytes: int,
        scalar: bytes,
    ) -> bytes:
        part = max(1, -(-len(data) // element_bytes // self._num_workers))

        def run(first: int) -> bytes:
            try:
                piece = data[first * element_bytes : (first + part) * element_bytes]
                return operation(piece, scalar)
            except NotInGroupError as error:
                raise NotInGroupError(first + error.position) from error

        return b"".join(self._threads.map(run, range(0, len(data) // element_bytes, part)))
