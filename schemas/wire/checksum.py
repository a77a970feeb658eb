"""A checksum of the tokens of a job, in the order of its log, that rolls on from event to event.

CRC-32, as zlib's, of one little-endian 32-bit word a token: its id XOR its choice shifted left by
22. It does not depend on how the tokens were cut into events, so a reader who has the sum at any
cursor can check every event after it.
"""

import struct
import zlib
from collections.abc import Sequence

EMPTY = 0  # the checksum before the first token
_CHOICE_SHIFT = 22
_WORD = struct.Struct("<I")


def roll(checksum: int, index: int, token_ids: Sequence[int]) -> int:
    """Return the checksum after these tokens of one choice, from the one before them."""
    choice = index << _CHOICE_SHIFT
    for token_id in token_ids:
        checksum = zlib.crc32(_WORD.pack((token_id ^ choice) & 0xFFFFFFFF), checksum)
    return checksum
