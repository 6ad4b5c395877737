"""What a table of DynamoDB must be, so that it takes every claim and forgets in time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...errors import StoreRefused
from ...stores.dynamodb.connections import code
from ...stores.dynamodb.store import DynamoDBStore
from .any_store import claims_refused, slow_store
from .any_store import schema_pending as pending
from .findings import Check, CheckSkipped, Finding, Section, Target, error, info, ok, run_checks, warning

GRANT = "Give the role that runs doctor dynamodb:DescribeTable and dynamodb:DescribeTimeToLive on the table."
#: Writes a second below which a table of fixed capacity is small; a first run takes two.
SMALL = 50


def _store(patient: Target) -> DynamoDBStore:
    store = patient.store
    assert isinstance(store, DynamoDBStore)
    return store


@contextmanager
def _describing() -> Iterator[None]:
    """Let a missing right to describe the table be no error of the store's: workers do not need it."""
    try:
        yield
    except StoreRefused as refusal:
        if code(refusal) not in ("AccessDenied", "AccessDeniedException"):
            raise
        raise CheckSkipped("The role may not describe the table.", GRANT) from refusal


def _described(patient: Target) -> dict[str, Any]:
    with _describing():
        found: dict[str, Any] = _store(patient)._table.call("describe_table")["Table"]
    return found


def schema_pending(patient: Target) -> Finding:
    """See whether there is a table of the right kind that forgets."""
    with _describing():
        return pending(patient)


def table_not_active(patient: Target) -> Finding:
    """See whether the table can be used."""
    status = _described(patient)["TableStatus"]
    if status not in ("ACTIVE", "UPDATING"):
        return error(f"The table is {status}: no task can claim its key.", "Wait, or look at the table in the console.")
    return ok(f"the table is {status}")


def table_in_regions(patient: Target) -> Finding:
    """See whether two regions could both grant a claim."""
    regions = [replica["RegionName"] for replica in _described(patient).get("Replicas", ())]
    if regions:
        return error(
            f"The table is a global one (also in {', '.join(sorted(regions))}): two regions may both grant a claim, "
            "since each decides on its own copy.",
            "Let all workers name one region in the store's URL (?region=...), or give each region its own table.",
        )
    return ok("the table is in one region")


def capacity_fixed(patient: Target) -> Finding:
    """See whether the table refuses what comes too fast."""
    table = _described(patient)
    throughput = table.get("ProvisionedThroughput", {})
    writes = int(throughput.get("WriteCapacityUnits", 0))
    if table.get("BillingModeSummary", {}).get("BillingMode") == "PAY_PER_REQUEST" or not writes:
        return ok("the table is billed by request")
    make = warning if writes < SMALL else info
    return make(
        f"The table has a fixed capacity of {writes} writes a second, and a first run takes two: what is throttled "
        "waits, as if the store were down.",
        f"aws dynamodb update-table --table-name {_store(patient)._table.place.table} --billing-mode PAY_PER_REQUEST",
    )


def region_unsaid(patient: Target) -> Finding:
    """See whether two machines could mean two tables."""
    store = _store(patient)
    region = store._table.client().meta.region_name
    if not store._table.place.region:
        return info(
            f"The URL names no region; on this machine it is {region}, on another it may be another.",
            f"Add region={region} to the query of the store's URL.",
        )
    return ok(f"the region is {region}")


CHECKS: tuple[Check, ...] = (
    schema_pending,
    table_not_active,
    table_in_regions,
    capacity_fixed,
    region_unsaid,
    slow_store,
    claims_refused,
)


def sections(patient: Target) -> Iterator[Section]:
    """Yield what is found of a DynamoDB store."""
    yield Section(patient.name, list(run_checks(CHECKS, patient)))
