"""Whether a server's clock and this machine's agree."""

from __future__ import annotations

import time
from collections.abc import Callable

from .finding import Finding, info, ok

__all__ = ["compared"]

#: Seconds that two clocks may differ.
DIFFERENCE = 2.0


def compared(server_time: Callable[[], float]) -> Finding:
    """Compare a server's clock, in seconds since 1970, with this machine's."""
    before = time.time()
    there = server_time()
    after = time.time()
    # What was written between the two times is nowhere outside of them, if the clocks agree.
    ahead = there - after if there > after else min(0.0, there - before)
    if abs(ahead) > DIFFERENCE:
        return info(
            f"The clock of the store is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this machine's.",
            "Let NTP set both. Leases do not mind, since the store's clock decides; countdowns and the "
            "visibility_timeout go by the clocks of the workers.",
        )
    return ok("the clocks of the store and of this machine agree")
