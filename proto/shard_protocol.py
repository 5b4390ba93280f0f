"""The version of the messages between a coordinator and a shard.

A shard says its version in ``ShardStatsReply``. While a cluster is upgraded, shards of the version before go on: they
are told one table at a time, and take part in saves and restores again when their processes are of this build.
"""

from __future__ import annotations

SHARD_PROTOCOL = 2
