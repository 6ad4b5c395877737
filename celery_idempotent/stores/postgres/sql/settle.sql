-- Record the outcome if the owner still holds the lease (rules.settle in Python): settled, lost, or busy, if an open
-- transaction has the row, or writes one that is not seen yet. c_home is null in a transaction of the store's own; in the
-- caller's it names the store's database (see home.sql), and the row is waited for: no caller could use the answer busy
-- there.
-- No table is read as a whole, here as elsewhere: a connection keeps its plans, and one that was made while the table was
-- small would read all of it when it has grown.
create or replace function {settle}(
  c_key text,
  c_owner text,
  c_fence bigint,
  c_task text,
  c_print text,
  c_state text,
  c_payload bytea,
  c_ttl bigint,
  c_home text,
  out answer text
)
language plpgsql
set search_path = pg_catalog, pg_temp
set lock_timeout = '1500ms'
set enable_seqscan = off
as $$
declare
  r {table};
  clock bigint;
  locked boolean;
  outdated boolean; -- whether the row is from before the lease, and its own lease is over (rules.outdated)
begin
  if c_home is null then
    perform {queue};
    select * into r from {table} t where t.key = c_key for update skip locked;
  elsif c_home <> {home}() then
    answer := 'elsewhere';
    return;
  else
    perform {settling}
    where not exists ( -- a record of another owner is not waited for
      select
      from {table} t
      where t.key = c_key
        and t.owner <> c_owner
        and t.expires > {now}
    );
    select * into r
    from {table} t
    where t.key = c_key
      and (t.owner = c_owner or t.expires <= {now})
    for update;
  end if;
  locked := found;
  if not locked then
    select * into r from {table} t where t.key = c_key;
    if c_home is null
      and (r.state = 'in_progress' and r.owner = c_owner or coalesce(r.expires <= {now}, true) and not {unsettled})
    then
      answer := 'busy';
      return;
    end if;
  end if;
  clock := {now};
  outdated := c_home is null
    and r.fence < c_fence
    and (r.state = 'released' or (r.state = 'in_progress' and r.lease_end <= clock));
  if outdated and not locked then -- its own holder may be about to commit
    answer := 'busy';
    return;
  end if;
  if r.expires > clock and not outdated then
    if r.state = c_state and r.fence = c_fence then -- the first reply was lost
      answer := 'settled';
      return;
    end if;
    if r.state <> 'in_progress' or r.owner <> c_owner then
      answer := 'lost';
      return;
    end if;
    update {table} t set
      state = c_state,
      owner = '',
      holder = '',
      since = 0,
      lease_end = 0,
      not_before = 0,
      crashes = 0,
      reason = '',
      payload = c_payload,
      ended = clock,
      expires = clock + c_ttl,
      waiting = '{}',
      attempts = '{}'
    where t.key = c_key;
    answer := 'settled';
    return;
  end if;

  -- The server lost its data, and the key was not claimed since.
  delete from {table} t where t.key = c_key and (outdated or t.expires <= clock);
  insert into {table} (key, state, fence, task_id, fingerprint, payload, ended, expires)
  values (c_key, c_state, c_fence, c_task, c_print, c_payload, clock, clock + c_ttl)
  on conflict (key) do nothing;
  answer := case
    when found then 'settled'
    when c_home is null then 'busy'
    else 'lost'
  end;
end $$;
