-- Where the records are. Times are microseconds since 1970 by the server's clock.
do $$ begin
  if to_regnamespace('{schema}') is null then create schema {schema}; end if;
end $$;
create table if not exists {table} (
  key         text   collate "C" primary key,       -- the operation
  state       text   not null,                      -- in_progress, completed, failed or released
  fence       bigint not null,                      -- rises with every lease of the key
  owner       text   not null default '',           -- random id of the delivery that holds the lease
  task_id     text   not null default '',           -- whose delivery took it last
  holder      text   not null default '',           -- host and process, for people
  since       bigint not null default 0,            -- when the lease was taken
  lease_end   bigint not null default 0,            -- when it runs out, unless it is renewed
  not_before  bigint not null default 0,            -- when a retry is due
  crashes     bigint not null default 0,            -- how many holders in a row have died
  reason      text   not null default '',           -- why the lease was given back
  fingerprint text   not null default '',           -- digest of the arguments
  payload     bytea  not null default '',           -- what the operation returned or raised
  ended       bigint not null default 0,            -- when it was settled
  expires     bigint not null,                      -- when the record is forgotten
  waiting     jsonb  not null default '{}',         -- per waiting task: the attempt, copy and token that came last
  attempts    jsonb  not null default '{}',         -- per task: the attempt below which copies are superseded
  announced   jsonb  not null default '{}'          -- the tasks whose callbacks were dispatched
);
-- Where an index is there, the table is not touched: "if not exists" waits for open transactions, and claims wait behind it.
do $$ begin
  if to_regclass('{schema}."{name}_expires"') is null then
    create index if not exists "{name}_expires" on {table} (expires);
  end if;
  if to_regclass('{schema}."{name}_live"') is null then
    create index if not exists "{name}_live" on {table} (key) where state = 'in_progress';
  end if;
end $$;
-- It begins at the time of its making: a table that is made again goes on above the fences of the one before.
do $$ begin
  execute 'create sequence if not exists {fences} start with ' || {now};
end $$;
create table if not exists {meta} (version integer not null, store_id uuid primary key default gen_random_uuid());
-- A table whose changes are published, as for logical replication, can be updated only if its rows can be identified.
do $$ begin
  if exists (
    select
    from pg_publication_tables p
    where format('"%s"."%s"', p.schemaname, p.tablename) = '{meta}'
  ) and not exists (
    select
    from pg_index i
    where i.indrelid = '{meta}'::regclass::oid
      and i.indisprimary
  ) then
    alter table {meta} add primary key (store_id);
  end if;
end $$;
insert into {meta} (version) select 0 where not exists (select from {meta});
