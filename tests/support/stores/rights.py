"""The rights of a Redis user with which a store can do all it does; the guide on Redis shows the same words."""

from __future__ import annotations

#: One server; the rest is for a database other than 0, for replicas that must confirm, and for a cluster.
RIGHTS = (
    "~idem:* +ping +evalsha +eval +del +scan +time +exists +hget +hmget +hgetall +hset +hdel +hlen +hincrby "
    "+pexpire +pttl +rpush +ltrim +lrange"
)
FOR_A_DATABASE, FOR_REPLICAS, FOR_A_CLUSTER = "+select", "+wait", "+cluster|slots +asking"
#: A user of the sentinels.
FOR_SENTINELS = "+sentinel|masters"
#: What people may be told of the memory of a server.
FOR_ROOM = "+info +memory|usage"
