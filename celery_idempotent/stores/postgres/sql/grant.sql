-- Write a lease that acquire grants over the row r, which is locked if there is one; null if another client wrote one.
create or replace function {grant}(
  r {table},
  known boolean,
  old bigint,
  died bigint,
  clock bigint,
  c_key text,
  c_owner text,
  c_task text,
  c_attempt bigint,
  c_print text,
  c_lease bigint,
  c_keep bigint,
  c_holder text
)
returns {table}
language plpgsql as $$
declare
  granted {table};
begin
  r.key := c_key;
  r.state := 'in_progress';
  r.owner := c_owner;
  r.task_id := c_task;
  r.holder := c_holder;
  r.fence := greatest(nextval('{fences}'), old + 1); -- rises across deletion, whatever the clock does
  r.since := clock;
  r.lease_end := clock + c_lease;
  r.expires := r.lease_end + c_keep;
  r.not_before := 0;
  r.crashes := died;
  r.reason := '';
  r.fingerprint := c_print;
  r.payload := '';
  r.ended := 0;
  r.announced := '{}';
  r.waiting := coalesce(r.waiting, '{}') - c_task;
  r.attempts := coalesce(r.attempts, '{}') - c_task;
  if c_attempt > 0 and (select {marks} from (select r.waiting, r.attempts) t) < 1100 then -- MOST_MARKS in rules.py
    r.attempts := r.attempts || jsonb_build_object(c_task, c_attempt);
  end if;
  if not known then
    insert into {table}
    select r.*
    on conflict (key) do nothing
    returning * into granted;
    return granted;
  end if;
  update {table} t set
    state = r.state,
    fence = r.fence,
    owner = r.owner,
    task_id = r.task_id,
    holder = r.holder,
    since = r.since,
    lease_end = r.lease_end,
    expires = r.expires,
    not_before = 0,
    crashes = r.crashes,
    reason = '',
    fingerprint = r.fingerprint,
    waiting = r.waiting,
    attempts = r.attempts
  where t.key = c_key
  returning * into granted;
  return granted;
end $$;
