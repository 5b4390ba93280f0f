"""The native hash is XXH3 as the Python package computes it: slots and keys agree in every language."""

import random
import struct

import pytest
import xxhash

from sparserow.cpp_ext import _server
from sparserow.proto.errors import InvalidArgument, error_of
from sparserow.proto.row_keys import hash_key


@pytest.fixture(autouse=True)
def errors():
    _server.set_error_factory(error_of)


def reference(table_id: int, key: int) -> int:
    return xxhash.xxh3_64_intdigest(struct.pack("<Q", key), seed=table_id)


def test_row_hash_equals_xxh3_with_the_table_as_seed():
    rng = random.Random(1)
    cases = [(0, 0), (1, 2**64 - 1), (2**32 - 1, 2**63)]
    cases += [(rng.getrandbits(32), rng.getrandbits(64)) for _ in range(2000)]
    for table_id, key in cases:
        assert _server.row_hash(table_id, key) == reference(table_id, key)


def test_slot_is_the_top_bits():
    rng = random.Random(2)
    for bits in (1, 6, 14, 16):
        for _ in range(200):
            value = rng.getrandbits(64)
            assert _server.slot_of(value, 2**bits) == value >> (64 - bits)
    with pytest.raises(InvalidArgument, match="slot_count"):
        _server.slot_of(1, 3)


def test_keys_of_strings_and_table_ids():
    assert hash_key("user:17") == 0x386A5F06970276A1
    rng = random.Random(3)
    for length in [*range(40), 200, 1000]:
        data = rng.randbytes(length)
        assert hash_key(data) == xxhash.xxh3_64_intdigest(data) >> 1
    for name in ("ads/user_id", "a/b", "söme/täble"):
        assert _server.id_of_name(name) == xxhash.xxh3_64_intdigest(name.encode()) & 0xFFFFFFFF
