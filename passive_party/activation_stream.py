"""Activations sent on one stream, ahead of their replies, and sent again if the stream breaks."""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from splitveil.common.errors import SplitveilError
from splitveil.common.run.messages import Activation
from splitveil.common.wire.message_stream import MessageStream
from splitveil.common.wire.tensor_codec import TensorLimits, encode_activation

ReplyT = TypeVar("ReplyT")


class ActivationStream(Generic[ReplyT]):
    """Sends activations, and receives their replies in the same order.

    Args:
        read: receives the reply to an activation, and checks that it is that one's.
    """

    def __init__(
        self,
        open_stream: Callable[[], MessageStream],
        read: Callable[[MessageStream, Activation], ReplyT],
        limits: TensorLimits,
    ) -> None:
        self.stream: MessageStream | None = None
        """None before the first reply is awaited, and after the stream was lost."""
        self.unanswered: deque[Activation] = deque()
        """Activations whose reply has not been received."""
        self._open_stream = open_stream
        self._read = read
        self._limits = limits

    def send(self, activation: Activation) -> None:
        self.unanswered.append(activation)
        if self.stream is not None:
            self.stream.send_all(encode_activation(activation, self._limits))

    def oldest_reply(self) -> ReplyT:
        """Wait for the reply to the oldest activation without one.

        If there is no stream, one is opened, and every activation without a reply is sent again.
        A failed attempt abandons the stream, and can be repeated.
        """
        if not self.unanswered:
            raise RuntimeError("an activation must be sent first")
        if self.stream is None:
            self.stream = self._open_stream()
            for activation in self.unanswered:
                self.stream.send_all(encode_activation(activation, self._limits))
        stream = self.stream
        try:
            return self._read(stream, self.unanswered[0])
        except SplitveilError:
            self.stream = None
            stream.drop()
            raise

    def take(self) -> None:
        self.unanswered.popleft()

    def drop(self) -> None:
        """Abandon the stream; its activations still wait for their replies."""
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.drop()

    def forget(self) -> None:
        """Abandon the stream and everything that was sent on it."""
        self.drop()
        self.unanswered.clear()

    def finish(self) -> None:
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.finish()
