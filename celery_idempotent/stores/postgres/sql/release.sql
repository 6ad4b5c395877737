-- Free a key for its owner (rules.release in Python): freed, lost, or busy, if an open transaction has the row.
create or replace function {release}(
  c_key text,
  c_owner text,
  c_fence bigint, -- 0 where it is not known
  c_reason text,
  c_wait bigint, -- until the retry is due
  c_next bigint, -- the attempt that it is
  c_keep bigint,
  c_task text, -- what claimed it: the task, its attempt, and the copy
  c_attempt bigint,
  c_copy integer,
  c_token text,
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
  known boolean;
  last jsonb;
  comes_again boolean := c_reason in ('crashed', 'shutdown', 'requeued', 'retry');
begin
  perform {queue};
  select * into r from {table} t where t.key = c_key for update skip locked;
  known := found;
  if not known then
    select * into r from {table} t where t.key = c_key;
    if r.state = 'in_progress' and (r.owner = c_owner or r.fence < c_fence) then
      answer := 'busy';
      return;
    end if;
  end if;
  clock := {now};
  answer := case
    when r.key is null or r.expires <= clock then 'freed' -- a key without a record is free already
    when r.fence < c_fence and (r.state = 'released' or (r.state = 'in_progress' and r.lease_end <= clock))
      then 'freed' -- the server has lost the lease alone (rules.outdated)
    when r.owner <> c_owner or r.state not in ('in_progress', 'released') then 'lost'
    when r.state = 'released' then 'freed' -- the first reply was lost
  end;
  -- A task that has ended while it waited leaves no marks, unless a later copy or attempt of it goes on. What an open
  -- transaction settles has none once that commits.
  if answer = 'lost' and not comes_again and (known or {unsettled}) then
    last := r.waiting -> c_task;
    update {table} t set
      waiting = case
        when ((last ->> 0)::bigint, (last ->> 1)::integer) < (c_attempt, c_copy)
          or last = jsonb_build_array(c_attempt, c_copy, c_token)
          then t.waiting - c_task
        else t.waiting
      end,
      attempts = case
        when (t.attempts ->> c_task)::bigint <= c_attempt
          and not (t.state = 'in_progress' and t.task_id = c_task and t.lease_end > clock)
          then t.attempts - c_task
        else t.attempts
      end
    where t.key = c_key
      and t.state in ('in_progress', 'released')
      and (t.waiting ? c_task or t.attempts ? c_task);
  end if;
  if answer is not null then
    return;
  end if;
  answer := 'freed';
  update {table} t set
    state = 'released',
    reason = c_reason,
    holder = '',
    expires = clock + c_keep + case when c_reason = 'retry' then c_wait else 0 end,
    crashes = case
      when c_reason = 'crashed' then t.crashes + 1
      when c_reason in ('shutdown', 'revoked') then t.crashes
      else 0
    end,
    not_before = case when c_reason = 'retry' then clock + c_wait else t.not_before end,
    attempts = case
      when c_reason = 'retry' and (t.attempts ? t.task_id or {marks} < 1100) -- MOST_MARKS in rules.py
        then t.attempts || jsonb_build_object(t.task_id, c_next)
      when c_reason = 'retry' then t.attempts
      when comes_again then t.attempts
      else t.attempts - t.task_id
    end
  where t.key = c_key;
end $$;
