-- What is no part of a delivery, or its last part: each waits for a row no longer than its timeout.
create or replace function {announce}(c_key text, c_task text) returns boolean
language sql set lock_timeout = '1500ms' as $$
  with marked as (
    update {table} t set announced = t.announced || jsonb_build_object(c_task, 1)
    where t.key = c_key and t.state = 'completed' and t.expires > {now} returning 1
  ) select exists (select from marked)
$$;
create or replace function {forget}(c_key text) returns boolean language sql set lock_timeout = '1500ms' as $$
  with gone as (delete from {table} t where t.key = c_key returning t.expires > {now} as known)
  select coalesce((select known from gone), false)
$$;
create or replace function {purge}(most bigint) returns bigint language sql as $$
  with old as materialized (
    select t.key from {table} t where t.expires <= {now} order by t.expires limit most for update skip locked
  ), gone as (delete from {table} t using old where t.key = old.key returning 1)
  select count(*) from gone
$$;
