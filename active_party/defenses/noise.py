"""Where noise comes from: standard normal numbers that the peer cannot predict.

A seed that torch is given is not enough: of the 64 bits, its CPU generator uses 32, which a peer
can try one by one. Here the generator's whole state comes from the operating system's entropy, anew
for every draw, so that a state recovered from one answer says nothing about the next.
"""

import secrets
from typing import Protocol

import torch
from torch import Tensor

_MT_WORDS = 624
"""Size of the Mersenne Twister's state, in 32-bit words."""

_MT_OFFSET = 24
"""Bytes before those words in torch's CPU generator state, which holds each in 8 bytes."""


class NoiseSource(Protocol):
    """Hands out independent standard normal numbers."""

    def standard_normal(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Draw numbers with the dtype and on the device of ``like``."""
        ...


class EntropyNoise:
    """Noise from the operating system's entropy."""

    def standard_normal(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Draw numbers with the dtype and on the device of ``like``."""
        generator = torch.Generator(like.device)
        if like.device.type == "cpu":
            fill_state(generator, secrets.token_bytes(4 * _MT_WORDS))
        else:
            generator.manual_seed(secrets.randbits(63))
        return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


class InsecureSeededNoise:
    """Repeatable noise, for tests: whoever knows the seed subtracts it."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def standard_normal(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Draw numbers with the dtype and on the device of ``like``."""
        generator = self._generators.get(like.device)
        if generator is None:
            generator = torch.Generator(like.device).manual_seed(self._seed)
            self._generators[like.device] = generator
        return torch.randn(shape, generator=generator, dtype=like.dtype, device=like.device)


def fill_state(generator: torch.Generator, entropy: bytes) -> None:
    """Set all 19,937 bits of a CPU generator's state from 2,496 random bytes.

    Raises:
        RuntimeError: this version of torch arranges the state in another way.
    """
    generator.manual_seed(1)  # leaves "all words used up", so that the next draw stirs new ones
    state = generator.get_state()
    words = state[_MT_OFFSET : _MT_OFFSET + 8 * _MT_WORDS].view(torch.int64)
    if words[0] != 1 or words[1] != 1812433254:  # the first words that seed 1 leads to
        raise RuntimeError("torch's CPU generator does not hold its state as expected")
    words.copy_(torch.frombuffer(bytearray(entropy), dtype=torch.int32).long() & 0xFFFFFFFF)
    generator.set_state(state)
