-- What is no part of a delivery, or its last part: each waits for a row no longer than its timeout.

-- Remember that the callbacks of a task were dispatched (rules.mark_dispatched in Python). The tasks are numbered in the
-- order in which they came; the first is kept for good, and of the others the newest.
create or replace function {announce}(c_key text, c_task text)
returns boolean
language plpgsql
set search_path = pg_catalog, pg_temp
set lock_timeout = '1500ms'
set enable_seqscan = off
as $$
declare
  known jsonb;
  latest bigint;
begin
  select t.announced into known
  from {table} t
  where t.key = c_key
    and t.state in ('completed', 'failed')
    and t.expires > {now}
  for update;
  if not found then
    return false;
  end if;
  if known ? c_task then
    return true;
  end if;
  select max(a.value::bigint) into latest from jsonb_each_text(known) a;
  update {table} t set
    announced = jsonb_build_object(c_task, coalesce(latest, 0) + 1) || known - array(
      select a.key
      from (
        select
          key,
          count(*) over () as total,
          row_number() over (order by value::bigint, key) as place
        from jsonb_each_text(known)
      ) a
      where a.place between 2 and a.total - 248 -- MOST_DISPATCHED in rules.py but for the first and this one
    )
  where t.key = c_key;
  return true;
end $$;

create or replace function {forget}(c_key text)
returns boolean
language sql
set search_path = pg_catalog, pg_temp
set lock_timeout = '1500ms'
set enable_seqscan = off
as $$
  with gone as (
    delete from {table} t
    where t.key = c_key
    returning t.expires > {now} as known
  )
  select coalesce((select known from gone), false)
$$;

-- The oldest rows from a time on, found by the index, which keeps those that were removed while an old transaction is open.
-- How many are gone, and the time of the last. The clock is read once: else the index is read to its end to see that no more
-- has expired. The planner does not know the limit, and is kept from reading the whole table for it, and the server from
-- compiling what it takes for a large query. No commit waits for the disk here: what a crash undoes is purged again.
create or replace function {purge}(most bigint, c_from bigint default 0)
returns bigint[]
language sql
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
  select set_config('synchronous_commit', 'off', true);
  with gone as (
    delete from {table} t
    where t.ctid = any (array(
      select o.ctid
      from {table} o
      where o.expires <= (select {now})
        and o.expires >= c_from
      order by o.expires
      limit most
      for update skip locked
    ))
    returning t.expires
  )
  select array[count(*), max(expires)] from gone
$$;
