-- Extend leases, and return the positions (from 1) of those that are lost (rules.renew in Python); negative are those
-- that were not extended, for another transaction has locked the row. What one settles right now counts as held.
create or replace function {renew}(
  keys text[],
  owners text[],
  fences bigint[],
  leases bigint[],
  keeps bigint[],
  holders text[],
  tasks text[],
  prints text[],
  nexts bigint[],
  revives boolean[]
)
returns setof bigint
language plpgsql
set search_path = pg_catalog, pg_temp
set lock_timeout = '1500ms'
set enable_seqscan = off
set plan_cache_mode = force_custom_plan
as $$
declare
  clock bigint := {now};
  held bigint[];
  c_key text;
  l record;
  r {table};
  locked boolean;
  outdated boolean; -- whether the row is from before the lease, and its own lease is over (rules.outdated)
  waited boolean := false; -- in vain, for a row that another transaction keeps locked
begin
  -- Those that are held as they should be, in one statement.
  with mine as materialized ( -- lateral, so that each is looked up: a join reads all leases of the table to find a few
    select m.key, a.lease, a.keep, a.place
    from
      unnest(keys, owners, leases, keeps) with ordinality a (key, owner, lease, keep, place),
      lateral (
        select t.key
        from {table} t
        where t.key = a.key
          and t.owner = a.owner
          and t.state = 'in_progress'
          and t.expires > clock
        for update skip locked
      ) m
  ),
  done as (
    update {table} t set
      lease_end = clock + mine.lease,
      expires = clock + mine.lease + mine.keep,
      crashes = case when clock - t.since > mine.lease * 10 / 3 then 0 else t.crashes end -- that is no crash loop
    from mine
    where t.key = mine.key
    returning mine.place
  )
  select coalesce(array_agg(place), '{}') into held
  from done;

  -- The others, one by one.
  for l in
    select *
    from
      unnest(keys, owners, fences, leases, keeps, holders, tasks, prints, nexts, revives) with ordinality
      a (key, owner, fence, lease, keep, holder, task, print, next, revive, place)
    where place <> all (held)
    order by a.key
  loop
    c_key := l.key;
    begin
      if waited and not {idle} then
        return next -l.place;
        continue;
      elsif not waited then
        perform {queue}; -- a claim may be about to take it over
      end if;
      select * into r from {table} t where t.key = c_key for update skip locked;
      locked := found;
      if not found then
        select * into r from {table} t where t.key = c_key;
      end if;
      clock := {now};
      outdated := l.revive
        and r.fence < l.fence
        and (r.state = 'released' or (r.state = 'in_progress' and r.lease_end <= clock));
      if outdated and not locked then
        return next -l.place;
      elsif r.expires > clock and not outdated then
        if r.state <> 'in_progress' or r.owner <> l.owner then
          return next l.place;
        elsif locked then
          update {table} t set
            lease_end = clock + l.lease,
            expires = clock + l.lease + l.keep
          where t.key = c_key;
        elsif {unsettled} then
          return next -l.place;
        end if;
      elsif not l.revive then
        return next l.place;
      elsif {unsettled} then -- the server lost its data, and the key was not claimed since
        delete from {table} t where t.key = c_key;
        insert into {table} (
          key, state, fence, owner, task_id, holder, since, lease_end, fingerprint, expires, attempts
        )
        values (
          c_key,
          'in_progress',
          l.fence,
          l.owner,
          l.task,
          l.holder,
          clock,
          clock + l.lease,
          l.print,
          clock + l.lease + l.keep,
          case when l.next > 0 then jsonb_build_object(l.task, l.next) else '{}' end
        )
        on conflict (key) do nothing;
        if not found then
          return next l.place;
        end if;
      end if;
    exception
      when lock_not_available then -- the renewals of the others stand
        return next -l.place;
        waited := true;
    end;
  end loop;
end $$;
