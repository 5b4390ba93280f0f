"""The version of the messages between a coordinator and a shard.

A shard reports its version in ``ShardStatsReply``. While a cluster is upgraded, shards of the previous version continue
to work. They receive one table at a time. They take part in saves and restores again once their processes run this
build.
"""

from __future__ import annotations

SHARD_PROTOCOL = 2
