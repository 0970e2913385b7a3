"""Sources of noise: standard normal numbers that the peer cannot predict.

``SecureNoise`` turns the keystream of a cipher into normal numbers by the method of Box and Muller:
of two words, one gives the radius sqrt(-2 ln u), the other the angle, and both coordinates are
used. The radius's word has 31 bits for float32 and 63 for float64, and the smallest u is half a
step, so numbers do not exceed sqrt(2 ln 2^32) = 6.66 or sqrt(2 ln 2^64) = 9.42; among true normal
numbers, one in 3.6e10 or 4.4e20 does.

``EntropyNoise`` uses torch's generators. A seed is not enough for them: the CPU's generator uses 32
of its 64 bits, which a peer can try one by one. Here the generator's whole state comes from the
operating system's entropy. Its numbers are still the image of a linear recurrence (Mersenne
Twister) or of a counter (Philox) that was never meant to withstand an adversary.

Both start over for every draw with another key, so that a state recovered from one answer reveals
nothing about the next. The keys have two sources: `fresh_key` asks the operating system, and
`AnswerKeys` derives them from the peer's messages, so that a repeated question gets the same noise,
also from a party that was restarted in the meantime, and any other question gets different noise.
"""

import hashlib
import math
import secrets
from collections.abc import Callable
from typing import Protocol

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

_MT_WORDS = 624  # size of the Mersenne Twister's state, in 32-bit words

_MT_OFFSET = 24  # bytes before those words in torch's CPU state, which holds each in 8

_KEY_BYTES = 32

_CHUNK_PAIRS = 2**17  # pairs of numbers made at a time: few enough to stay in the processor's cache


class NoiseSource(Protocol):
    """A source of independent standard normal numbers."""

    def standard_normal(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Draw numbers with the dtype and on the device of ``like``."""
        ...


DrawKeys = Callable[[], bytes]  # returns 32 secret bytes for one draw, never the same twice


def fresh_key() -> bytes:
    """Return 32 bytes of the operating system's entropy."""
    return secrets.token_bytes(_KEY_BYTES)


class AnswerKeys:
    """Derives the keys of an answer's draws from a key of that answer."""

    def __init__(self) -> None:
        self._answer_key = fresh_key()
        self._draws = 0

    def begin(self, answer_key: bytes) -> None:
        """Start the draws of one answer, whose key is equal only for equal questions."""
        self._answer_key = answer_key
        self._draws = 0

    def __call__(self) -> bytes:
        self._draws += 1
        counter = self._draws.to_bytes(8, "little")
        return hashlib.blake2b(counter, digest_size=_KEY_BYTES, key=self._answer_key).digest()


class SecureNoise:
    """Noise from the keystream of ChaCha20, drawn on the CPU and copied where it is needed."""

    def __init__(self, keys: DrawKeys = fresh_key) -> None:
        self._keys = keys

    def standard_normal(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        numbers = secure_normal(math.prod(shape), like.dtype, self._keys())
        return numbers.reshape(shape).to(like.device)


class EntropyNoise:
    """Noise from the device's own generator, with as much entropy as the generator accepts."""

    def __init__(self, keys: DrawKeys = fresh_key) -> None:
        self._keys = keys

    def standard_normal(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        generator = torch.Generator(like.device)
        key = self._keys()
        if like.device.type == "cpu":
            fill_state(generator, hashlib.shake_256(key).digest(4 * _MT_WORDS))
        else:
            generator.manual_seed(int.from_bytes(key[:8], "little") >> 1)
        return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


class DefaultNoise:
    """Secure noise on the CPU; elsewhere the device's own generator, to save the copy."""

    def __init__(self, keys: DrawKeys = fresh_key) -> None:
        self._secure = SecureNoise(keys)
        self._fast = EntropyNoise(keys)

    def standard_normal(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        source: NoiseSource = self._secure if like.device.type == "cpu" else self._fast
        return source.standard_normal(shape, like)


class InsecureSeededNoise:
    """Repeatable noise, for tests: anyone who knows the seed can subtract it."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def standard_normal(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        generator = self._generators.get(like.device)
        if generator is None:
            generator = torch.Generator(like.device).manual_seed(self._seed)
            self._generators[like.device] = generator
        return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


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


def fill_state(generator: torch.Generator, entropy: bytes) -> None:
    """Set all 19,937 bits of a CPU generator's state from 2,496 random bytes."""
    generator.manual_seed(1)  # leaves "all words used up", so that the next draw stirs new ones
    state = generator.get_state()
    words = state[_MT_OFFSET : _MT_OFFSET + 8 * _MT_WORDS].view(torch.int64)
    if words[0] != 1 or words[1] != 1812433254:  # the first words that seed 1 leads to
        raise RuntimeError("torch's CPU generator does not hold its state as expected")
    words.copy_(torch.frombuffer(bytearray(entropy), dtype=torch.int32).long() & 0xFFFFFFFF)
    generator.set_state(state)
