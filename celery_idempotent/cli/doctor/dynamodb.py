# ruff: noqa: D103 - a check is documented by its name, its words where all is well, and its findings
"""Checks of a DynamoDB table, which must take every claim and forget in time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...errors import StoreRefused
from ...stores.dynamodb.connections import code
from ...stores.dynamodb.store import DynamoDBStore
from . import any_store
from .findings import Checks, CheckSkipped, Findings, Target, error, info, ok, warning

CHECKS = Checks()
RIGHTS = "Give the role that runs doctor dynamodb:DescribeTable and dynamodb:DescribeTimeToLive on the table."
#: Writes a second below which a fixed capacity is a warning; a first run takes two.
SMALL = 50


def _store(target: Target) -> DynamoDBStore:
    store = target.store
    assert isinstance(store, DynamoDBStore)
    return store


@contextmanager
def _describing() -> Iterator[None]:
    """Skip the check where the right to describe the table is missing: workers do not need it."""
    try:
        yield
    except StoreRefused as refusal:
        if code(refusal) not in ("AccessDenied", "AccessDeniedException"):
            raise
        raise CheckSkipped("The role may not describe the table.", RIGHTS) from refusal


def _described(target: Target) -> dict[str, Any]:
    with _describing():
        found: dict[str, Any] = _store(target)._table.call("describe_table")["Table"]
    return found


@CHECKS.add(any_store.schema_pending.well)
def schema_pending(target: Target) -> Findings:
    with _describing():
        yield from any_store.schema_pending.look(target)


@CHECKS.add()
def table_not_active(target: Target) -> Findings:
    status = _described(target)["TableStatus"]
    if status not in ("ACTIVE", "UPDATING"):
        yield error(f"The table is {status}: no task can claim its key.", "Wait, or look at the table in the console.")
    yield ok(f"the table is {status}")


@CHECKS.add("the table is in one region")
def table_in_regions(target: Target) -> Findings:
    if regions := [replica["RegionName"] for replica in _described(target).get("Replicas", ())]:
        yield error(
            f"The table is a global one (also in {', '.join(sorted(regions))}): two regions may both grant a claim, "
            "since each decides on its own copy.",
            "Let all workers name one region in the store's URL (?region=...), or give each region its own table.",
        )


@CHECKS.add()
def capacity_fixed(target: Target) -> Findings:
    table = _described(target)
    throughput = table.get("ProvisionedThroughput", {})
    writes = int(throughput.get("WriteCapacityUnits", 0))
    if table.get("BillingModeSummary", {}).get("BillingMode") == "PAY_PER_REQUEST" or not writes:
        yield ok("the table is billed by request")
    make = warning if writes < SMALL else info
    yield make(
        f"The table has a fixed capacity of {writes} writes a second, and a first run takes two: what is throttled "
        "waits, as if the store were down.",
        f"aws dynamodb update-table --table-name {_store(target)._table.place.table} --billing-mode PAY_PER_REQUEST",
    )


@CHECKS.add()
def region_unsaid(target: Target) -> Findings:
    store = _store(target)
    region = store._table.client().meta.region_name
    if not store._table.place.region:
        yield info(
            f"The URL names no region; on this machine it is {region}, on another it may be another.",
            f"Add region={region} to the query of the store's URL.",
        )
    yield ok(f"the region is {region}")


CHECKS += [any_store.slow_store, any_store.claims_refused]
