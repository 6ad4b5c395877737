-- What is no part of a delivery, or its last part: each waits for a row no longer than its timeout.
create or replace function {announce}(c_key text, c_task text) returns boolean
language sql set search_path = pg_catalog, pg_temp set lock_timeout = '1500ms' set enable_seqscan = off as $$
  with marked as (
    update {table} t set announced = t.announced || jsonb_build_object(c_task, 1)
    where t.key = c_key and t.state in ('completed', 'failed') and t.expires > {now} returning 1
  ) select exists (select from marked)
$$;
create or replace function {forget}(c_key text) returns boolean
language sql set search_path = pg_catalog, pg_temp set lock_timeout = '1500ms' set enable_seqscan = off as $$
  with gone as (delete from {table} t where t.key = c_key returning t.expires > {now} as known)
  select coalesce((select known from gone), false)
$$;
-- The oldest rows, found by the index. The clock is read once: else the index is read to its end to see that no more has
-- expired. The planner does not know the limit, and is kept from reading the whole table for it, and the server from
-- compiling what it takes for a large query. And nobody waits for the disk here: what a crash undoes is purged again.
create or replace function {purge}(most bigint) returns bigint
language sql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off set jit = off as $$
  select set_config('synchronous_commit', 'off', true);
  with gone as (
    delete from {table} t where t.ctid = any (array(
      select o.ctid from {table} o where o.expires <= (select {now}) order by o.expires limit most for update skip locked
    )) returning 1
  ) select count(*) from gone
$$;
