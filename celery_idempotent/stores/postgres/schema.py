"""The table and its functions: their names, their versions, and how they come into a database."""

from __future__ import annotations

import zlib
from functools import cached_property
from importlib import resources

from .connections import Address

#: Raised whenever one of the files changes. `apply_schema` runs all of them, so each leaves alone what is there.
VERSION = 12
FILES = ("table", "home", "grant", "acquire", "renew", "settle", "release", "upkeep", "history")
#: The functions carry in their names the version that changed them last, so that workers of two versions run side by
#: side during an upgrade. Version 2 brought the history, without which a worker can do; version 3 bounds the marks of
#: tasks, answers a claim with its own alone, has awaited continuations go on, and counts no crash where a shutdown was
#: announced; version 4 has renewals that restore no record; version 5 ends crash loops of several tasks;
#: version 6 grants no lease over a record of an unknown state; version 7 waits for no open transaction, also where its
#: key has no record or one that has expired; version 8 lets no lock on one row keep other leases from being renewed;
#: version 9 restores leases that the server has lost also where it has an older record, and refuses a claim where a
#: policy hides the record; version 10 counts the copies of what was published again beside a later attempt from there;
#: version 11 reads what a purge has removed no second time beside an old transaction, and marks no claim for a
#: continuation that will not come; version 12 forgets the marks of a task that has ended while it waited.
FUNCTIONS = {
    **dict.fromkeys(("home", "forget"), 1),
    **dict.fromkeys(("grant", "announce"), 3),
    **dict.fromkeys(("renew", "settle"), 9),
    **dict.fromkeys(("acquire", "purge"), 11),
    "release": 12,
}
#: By its schema: an operator made in a schema which is searched would run with the rights of this connection.
NOW = "(extract(epoch from clock_timestamp()) operator(pg_catalog.*) 1000000)::bigint"


class Schema:
    """The names of one store's table and functions, and the statements that make them.

    Arguments:
        place: Where the records are.
    """

    def __init__(self, place: Address) -> None:
        self.place = place
        schema, name = f'"{place.schema}"', place.table
        #: distinguishes this table's claims from others that queue in the same database
        seed = zlib.crc32(f"{place.schema}.{name}".encode())
        self.names = {
            "schema": schema,
            "name": name,
            "table": f'{schema}."{name}"',
            "fences": f'{schema}."{name}_fences"',
            "history": f'{schema}."{name}_history"',
            "meta": f'{schema}."{name}_meta"',
            "now": NOW,
            #: how many tasks have marks in the row t
            "marks": "((select pg_catalog.count(*) from jsonb_object_keys(t.waiting)) + "
            "(select pg_catalog.count(*) from jsonb_object_keys(t.attempts)))",
            "queue": f"pg_advisory_xact_lock(hashtextextended(c_key, {seed}))",
            #: whether none queues, and then to be the one that does
            "idle": f"pg_try_advisory_xact_lock(hashtextextended(c_key, {seed}))",
            # Held by a transaction that settles the key, until it ends; and whether no transaction holds it.
            "settling": f"pg_advisory_xact_lock(hashtextextended(c_key, {seed} + 1))",
            "unsettled": f"pg_try_advisory_xact_lock_shared(hashtextextended(c_key, {seed} + 1))",
            **{word: f'{schema}."{name}_{word}_{version}"' for word, version in FUNCTIONS.items()},
        }
        self._seed = seed

    def render(self, text: str) -> str:
        """Return the text with the names in place of the words in braces."""
        for word, name in self.names.items():
            text = text.replace("{" + word + "}", name)
        return text

    @cached_property
    def version(self) -> str:
        """The query for the version that a database has; it has no meta table where there is none.

        0 where something of this version is gone, as after a restore that left the functions out: to apply the schema,
        as a worker's error then advises, makes it.
        """
        functions = ", ".join("'" + self.names[word].rpartition('."')[2].rstrip('"') + "'" for word in FUNCTIONS)
        have = (
            f"(select pg_catalog.count(distinct proname) from pg_catalog.pg_proc where proname in ({functions}) "
            f"and pronamespace = pg_catalog.to_regnamespace('{self.names['schema']}')::oid) = {len(FUNCTIONS)}"
        )
        for word in ("table", "fences", "history"):
            have += f" and pg_catalog.to_regclass('{self.names[word]}') is not null"
        return self.render(f"select case when version > {VERSION} or ({have}) then version else 0 end from {{meta}}")

    def statements(self) -> str:
        """Return what makes the schema, or upgrades it from any older version."""
        folder = resources.files(__package__) / "sql"
        files = [(folder / f"{name}.sql").read_text(encoding="utf-8") for name in FILES]
        return self.render("\n".join([*files, f"update {{meta}} set version = {VERSION} where version < {VERSION};"]))

    @cached_property
    def turn(self) -> str:
        """The statements after which no other process makes or upgrades this schema until we have committed.

        What is done then waits for the table no longer than a claim can wait behind it.
        """
        lock = f"select pg_advisory_xact_lock(1768191333, {self._seed % 2**31})"
        return f"set local lock_timeout = '10s'; {lock}; set local lock_timeout = '500ms'"
