"""A deterministic simulation: real guard, adapters, middlewares, memory store; a scheduler orders every step.

`world` has the scheduler and a clock; `celery` the broker, and workers whose children run Celery's own tracer;
`threads` workers with several bodies in one process; `law` what a kind of schedule is asked. The kinds (`charges`,
`indexing`, `canvases`, `transactions`, `requests`) say what must hold in every step and at the end. One seed fixes all
that happens: `python -m tests.simulation --seed 7 --verbose` prints that schedule as a story, the same each time.
`shrink` looks for a shorter schedule; `breaks` takes lines that protect away.

The way of testing is that of FoundationDB (W. Wilson, "Testing distributed systems with deterministic simulation",
Strange Loop 2014) and of TigerBeetle's VOPR.
"""
