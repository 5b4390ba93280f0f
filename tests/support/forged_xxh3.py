"""Another file with the same XXH3-64: whoever can write 128 bytes of a file can give it any contents before them."""

from __future__ import annotations

import numpy as np

_BLOCK, _STRIPE = 1024, 64
_SECRET = bytes.fromhex(  # XXH3's own, which every file without a seed is hashed with
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428"
)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def forged(before: bytes, after: bytes, block: int) -> bytes:
    """Returns ``after`` with the last 128 bytes of a block of 1,024 chosen so that the checksum is that of ``before``.

    Args:
        before, after: contents of one length, which differ in this block alone.
        block: the number of the block, which is not the last one.
    """
    begin, end = block * _BLOCK, (block + 1) * _BLOCK
    wanted = _sum(before[begin:end]) - _sum(after[begin : end - 2 * _STRIPE])
    # A product is 0 where one half of the lane is that of the secret; the other half is free, and is added to the sum.
    low_of, high_of = _secret(14), _secret(15)
    target = wanted[np.arange(8) ^ 1]  # the sum to which each lane is added
    low = (target - (low_of & _LOW)) & _LOW
    first = (low_of & _LOW) | ((target - (low_of & _LOW) - low - (high_of >> _HALF << _HALF)) & ~_LOW)
    second = low | (high_of >> _HALF << _HALF)
    return after[: end - 2 * _STRIPE] + first.tobytes() + second.tobytes() + after[end:]


def _secret(stripe: int) -> np.ndarray:
    return np.frombuffer(_SECRET[8 * stripe : 8 * stripe + _STRIPE], "<u8")


def _sum(data: bytes) -> np.ndarray:
    """What the stripes of a block add to the eight sums, (8) uint64."""
    total = np.zeros(8, np.uint64)
    for stripe in range(len(data) // _STRIPE):
        lanes = np.frombuffer(data[stripe * _STRIPE : (stripe + 1) * _STRIPE], "<u8")
        key = lanes ^ _secret(stripe)
        total += lanes[np.arange(8) ^ 1] + (key & _LOW) * (key >> _HALF)
    return total
