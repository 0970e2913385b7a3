"""Alignment finds the ids that both parties have and puts them into one common order.

Neither party learns anything else about the other's ids. An engine holds what outlives one
alignment (worker threads), an exchange the rules of one alignment, a channel moves frames, and
``align`` puts them together. Every engine and every channel can be replaced by another.
"""

from splitveil.common.alignment.channel import (
    WAIT_S,
    AlignChannel,
    QueueChannel,
    StreamChannel,
    channel_pair,
    wait_frame,
)
from splitveil.common.alignment.exchange import align, build_engine, records_of
from splitveil.common.alignment.interface import (
    Agree,
    Alignment,
    AlignmentEngine,
    AlignmentExchange,
    RowIndices,
    Splits,
)
from splitveil.common.alignment.share import Share, receive_share, share_frames
from splitveil.common.alignment.store import ExchangeStore, ExchangeStores
from splitveil.common.alignment.tried_ids import TriedIds, file_of_count

__all__ = [
    "WAIT_S",
    "Agree",
    "AlignChannel",
    "Alignment",
    "AlignmentEngine",
    "AlignmentExchange",
    "ExchangeStore",
    "ExchangeStores",
    "QueueChannel",
    "RowIndices",
    "Share",
    "Splits",
    "StreamChannel",
    "TriedIds",
    "align",
    "build_engine",
    "channel_pair",
    "file_of_count",
    "receive_share",
    "records_of",
    "share_frames",
    "wait_frame",
]
