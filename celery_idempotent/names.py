"""What each kind of event is called in signals, counts, monitors and spans."""

from __future__ import annotations

from . import events
from .events import Event

__all__ = ["NAMES"]

#: The name of each kind, in the order in which an operation may meet them.
NAMES: dict[type[Event], str] = {
    events.Acquired: "acquired",
    events.TakenOver: "taken_over",
    events.Completed: "completed",
    events.Failed: "failed",
    events.Released: "released",
    events.Replayed: "replayed",
    events.Conflicted: "conflicted",
    events.Deferred: "deferred",
    events.Superseding: "superseded",
    events.Reused: "key_reused",
    events.CrashLooped: "crash_looped",
    events.LeaseMissed: "lease_lost",
    events.SettleFailed: "settle_failed",
    events.ReleaseFailed: "release_failed",
    events.RanUnprotected: "ran_unprotected",
    events.StoreFailed: "store_failed",
    events.StoreRecovered: "store_recovered",
}
