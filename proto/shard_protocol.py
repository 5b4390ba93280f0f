"""The version of the messages between a coordinator and a shard.

A shard reports its version in ``ShardStatsReply``. While a cluster is upgraded, shards of the previous version continue
to work; those before ``SAVES_PROTOCOL`` receive one table at a time, and take part in saves and restores again once
their processes run this build. A job with a quorum needs ``QUORUM_PROTOCOL`` of every shard.
"""

from __future__ import annotations

SHARD_PROTOCOL = 3
SAVES_PROTOCOL = 2
QUORUM_PROTOCOL = 3
