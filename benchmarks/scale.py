"""Whether a task costs more when the store remembers a million others."""

from __future__ import annotations

from .figure import Figure
from .sampling import interleave, ratio
from .subject import Subject

__all__ = ["measure"]

BATCH = 5000
#: Copies a settled record under new keys, within the server: a million of them take seconds.
_COPY = """
local fields = redis.call('HGETALL', KEYS[1])
for i = tonumber(ARGV[1]), tonumber(ARGV[2]) do
  local key = string.format('%s-%08d', string.sub(KEYS[1], 1, -10), i)
  redis.call('HSET', key, unpack(fields)) redis.call('PEXPIRE', key, 86400000 + i % 1000 * 1000)
end
"""


def fill(subject: Subject, records: int) -> None:
    """Have the store remember that many operations."""
    model = subject.first_run(subject.claim()).key
    copy = subject.client.register_script(_COPY)
    for start in range(0, records, BATCH):
        copy(keys=[model], args=[start, min(start + BATCH, records) - 1])


def measure(few: Subject, many: Subject, *, sizes: tuple[int, int], blocks: int, calls: int) -> list[Figure]:
    """Time guarded first runs and replays on a store with few records, and on one with many, in turns."""
    for subject, records in zip((few, many), sizes, strict=True):
        fill(subject, records)
    arms = {"few": few.guarded, "many": many.guarded}
    samples = interleave(arms, blocks=blocks, calls=calls)
    value, spread = ratio(samples["many"].medians, samples["few"].medians)
    note = f"{samples['many']}; {samples['few']}; {many.client.dbsize()} and {few.client.dbsize()} keys"
    return [Figure("scale", f"task at {sizes[1]} records / at {sizes[0]}", value, "x", spread, 1.05, note=note)]
