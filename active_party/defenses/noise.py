"""Standard normal numbers that the peer cannot predict.

``NoiseSource`` turns the keystream of a cipher into normal numbers by the method of Box and Muller:
of two words, one gives the radius sqrt(-2 ln u), the other the angle, and both coordinates are
used. The radius's word has 31 bits for float32 and 63 for float64, and the smallest u is half a
step, so numbers do not exceed sqrt(2 ln 2^32) = 6.66 or sqrt(2 ln 2^64) = 9.42; among true normal
numbers, one in 3.6e10 or 4.4e20 does.

Every draw has a key of its own, so that a key found out reveals no other draw. `fresh_key` asks the
operating system, and `AnswerKeys` derives keys from the peer's messages, so that a repeated
question gets the same noise, also from a party that was restarted in the meantime, and any other
question gets different noise.
"""

import hashlib
import math
import secrets
from collections.abc import Callable

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

_KEY_BYTES = 32

_CHUNK_PAIRS = 2**17  # pairs of numbers made at a time: few enough to stay in the processor's cache


DrawKeys = Callable[[], bytes]  # returns 32 secret bytes for one draw, never the same twice


def fresh_key() -> bytes:
    """Return 32 bytes of the operating system's entropy."""
    return secrets.token_bytes(_KEY_BYTES)


class AnswerKeys:
    """Derives the keys of an answer's draws from a key of that answer."""

    def __init__(self, answer_key: bytes | None = None) -> None:
        self.begin(answer_key or fresh_key())

    def begin(self, answer_key: bytes) -> None:
        """Start the draws of one answer, whose key is equal only for equal questions."""
        self._answer_key = answer_key
        self._draws = 0

    def __call__(self) -> bytes:
        self._draws += 1
        counter = self._draws.to_bytes(8, "little")
        return hashlib.blake2b(counter, digest_size=_KEY_BYTES, key=self._answer_key).digest()


class NoiseSource:
    """Noise from the keystream of ChaCha20, drawn on the CPU and copied where it is needed.

    The numbers take about 6 ns each, and on a GPU the copy.
    """

    def __init__(self, keys: DrawKeys = fresh_key) -> None:
        self._keys = keys

    def standard_normal(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Draw numbers with the dtype and on the device of ``like``."""
        numbers = secure_normal(math.prod(shape), like.dtype, self._keys())
        return numbers.reshape(shape).to(like.device)


def isotropic_noise(rows: Tensor, noise_norm: float, noise: NoiseSource) -> Tensor:
    """Draw noise of the rows' shape whose expected squared norm per row is ``noise_norm``^2."""
    deviation = noise_norm / rows.shape[1] ** 0.5
    return noise.standard_normal(tuple(rows.shape), rows).mul_(deviation)


def secure_normal(count: int, dtype: torch.dtype, key: bytes) -> Tensor:
    """Turn the ChaCha20 keystream of a key, 32 secret bytes, into normal numbers on the CPU."""
    words = torch.int32 if dtype == torch.float32 else torch.int64
    cipher = Cipher(algorithms.ChaCha20(key, nonce=bytes(16)), mode=None).encryptor()
    numbers = torch.empty(count + count % 2, dtype=dtype)
    for start in range(0, count, 2 * _CHUNK_PAIRS):
        pairs = numbers[start : start + 2 * _CHUNK_PAIRS]
        keystream = bytearray(pairs.numel() * words.itemsize)
        cipher.update_into(keystream, keystream)
        radius, angle = torch.frombuffer(keystream, dtype=words).chunk(2)
        box_muller(radius, angle, out=pairs)
    return numbers[:count]


def box_muller(radius_bits: Tensor, angle_bits: Tensor, out: Tensor) -> None:
    """Turn pairs of words into pairs of normal numbers in ``out``, all firsts before seconds."""
    bits = 8 * radius_bits.dtype.itemsize - 1
    radius = open_uniform(radius_bits, out.dtype).log_().mul_(-2).sqrt_()
    both = out.view(2, -1)
    first, second = both
    second.copy_(angle_bits).mul_(math.pi * 2.0**-bits)
    torch.cos(second, out=first)
    second.sin_()
    both.mul_(radius)


def open_uniform(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn int32 or int64 words into uniform numbers above 0 and at most 1; no sign bit is used.

    The numbers have the dtype's relative precision down to the smallest, 2^-32 or 2^-64, so that
    the logarithm's tail is finely resolved; numbers near 1 would be too coarse for it.
    """
    limits = torch.iinfo(words.dtype)
    return words.bitwise_and(limits.max).to(dtype).add_(0.5).mul_(2.0 ** -(limits.bits - 1))
