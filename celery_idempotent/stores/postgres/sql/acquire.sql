-- Take the lease on a key, or return why not: rules.acquire in Python, case by case and in its order.
-- Claims of one key queue for a moment, and wait for a renewal or a purge that has locked the row. They do not wait for an
-- open transaction that settles it, be its record there, expired or not: conflict.
create or replace function {acquire}(
  c_key text,
  c_owner text,
  c_task text,
  c_attempt bigint,
  c_copy integer,
  c_token text,
  c_again boolean, -- whether this is a copy, or a later attempt
  c_sender text, -- the owner that published it, or ''
  c_print text, -- the fingerprint, or ''
  c_most bigint, -- max_crashes
  c_lease bigint,
  c_keep bigint,
  c_holder text,
  c_announcer text, -- the task whose dispatched callbacks the answer is about
  out verdict text,
  out clock bigint,
  out took_over boolean,
  out r {table}
)
language plpgsql
set search_path = pg_catalog, pg_temp
set lock_timeout = '1500ms'
set enable_seqscan = off
as $$
declare
  queued boolean := false;
  known boolean;
  gone boolean;
  mine boolean;
  running boolean;
  handed boolean;
  mark jsonb := jsonb_build_array(c_attempt, c_copy, c_token);
  last jsonb;
  died bigint;
  old bigint;
  lapsed boolean;
  crashed boolean;
begin for tries in 1..1000 loop
  if queued then
    select * into r from {table} t where t.key = c_key for update skip locked;
  end if;
  known := queued and found;
  if not known then
    select * into r from {table} t where t.key = c_key;
  end if;
  clock := {now};
  gone := r.expires <= clock;
  mine := r.task_id = c_task;
  running := r.state = 'in_progress';
  took_over := false;

  -- Settled, unreadable (a state of a newer version), or other arguments: that stays so, and no lock was needed.
  verdict := case when not gone and r.state not in ('in_progress', 'released') then r.state end;
  if not gone
    and not mine
    and r.state <> 'released'
    and '' not in (c_print, r.fingerprint)
    and r.fingerprint <> c_print
  then
    verdict := 'key_reused';
  end if;
  if verdict is not null then
    -- Of the tasks whose callbacks were dispatched, the answer has the claimer's alone: it must not grow with them.
    r.announced := case when r.announced ? c_announcer then jsonb_build_object(c_announcer, 1) else '{}' end;
    return;
  end if;

  -- Everything else is decided in turn, over a row that is locked.
  if not queued then
    perform {queue};
    queued := true;
    continue;
  end if;
  if not known and not {unsettled} then -- an open transaction settles the key: who waits for it stops the renewals too
    verdict := 'conflict';
    if coalesce(gone, true) and r.state is distinct from 'in_progress' then -- the record that it writes is not seen yet
      r.key := c_key;
      r.state := 'in_progress';
      r.fence := coalesce(r.fence, 0);
      r.owner := '';
      r.task_id := c_task; -- perhaps, and the copies of its own task wait in any case
      r.holder := 'an open transaction';
      r.since := 0;
      r.lease_end := clock;
      r.not_before := 0;
      r.crashes := 0;
      r.reason := '';
      r.fingerprint := '';
      r.payload := '';
      r.ended := 0;
      r.expires := clock;
      r.announced := '{}';
    end if;
    return;
  end if;
  if not known and r.key is not null then -- a renewal or a purge has it, for a moment
    perform from {table} t where t.key = c_key for update;
    continue;
  end if;

  -- Expired: as if there were no record, but for the fence.
  old := coalesce(r.fence, 0);
  if gone then
    delete from {table} t where t.key = c_key;
    r := null;
    known := false;
    running := null;
  end if;

  -- The owner's own lease: its first reply was lost, perhaps long ago, and it counts the lease from now.
  if running and r.owner = c_owner then
    update {table} t set
      lease_end = clock + c_lease,
      expires = clock + c_lease + c_keep
    where t.key = c_key
    returning * into r;
    verdict := 'lease';
    return;
  end if;

  -- A copy or an attempt whose place a later one has taken.
  last := r.waiting -> c_task;
  handed := running and c_sender <> '' and c_sender = r.owner;
  if c_again
    and (
      c_attempt < (r.attempts ->> c_task)::bigint
      or (c_copy > 0 and last - 2 = mark - 2 and last <> mark)
      or (c_attempt, c_copy) < ((last ->> 0)::bigint, (last ->> 1)::integer)
    )
  then
    verdict := 'superseded';
    return;
  end if;

  -- A live lease that was not handed over, or a retry of another message that is not due: wait.
  if running and r.lease_end > clock and not handed
    or r.state = 'released' and r.not_before > clock
    and not (mine and c_attempt / 1000000 >= coalesce((r.attempts ->> c_task)::bigint, 0) / 1000000)
  then
    update {table} t set
      waiting = t.waiting || jsonb_build_object(c_task, mark)
    where t.key = c_key
      and c_attempt / 1000000 < 999999 -- what claims for a continuation that will not come is no message (rules.py)
      and last is distinct from mark
      and (last is not null or {marks} < 1000); -- of a crowd, so many are distinguished (MOST_WAITING in rules.py)
    -- Published again: its copies count from here, also if what runs has died.
    update {table} t set
      attempts = t.attempts || jsonb_build_object(c_task, c_attempt)
    where t.key = c_key
      and c_attempt < (r.attempts ->> c_task)::bigint
      and c_attempt / 1000000 = (r.attempts ->> c_task)::bigint / 1000000;
    verdict := 'conflict';
    return;
  end if;

  -- A lease that ran out is a crash, unless its shutdown was announced; too many in a row end the operation for its task.
  took_over := coalesce(running and not handed, false);
  lapsed := took_over and r.reason <> 'shutdown';
  died := coalesce(r.crashes, 0) + lapsed::integer;
  crashed := lapsed or r.reason = 'crashed';
  -- Messages of several task ids may take turns.
  if (mine and died >= c_most and (crashed or c_again)) or (crashed and died >= 2 * c_most) then
    update {table} t set
      state = 'released',
      owner = '',
      reason = 'crash_loop',
      not_before = 0,
      crashes = died,
      -- The task has failed: published again, its message is not one of those that have been superseded.
      waiting = t.waiting - c_task,
      attempts = t.attempts - c_task
    where t.key = c_key
    returning * into r;
    verdict := 'crash_loop';
    return;
  end if;

  r := {grant}(r, known, old, died, clock, c_key, c_owner, c_task, c_attempt, c_print, c_lease, c_keep, c_holder);
  if r.key is not null then
    verdict := 'lease';
    return;
  end if; -- else a holder has restored its record meanwhile
end loop;
raise insufficient_privilege using
  message = format('the record of %s is there, and cannot be locked: a row-level security policy hides it', c_key);
end $$;
