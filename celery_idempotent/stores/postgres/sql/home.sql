-- Return which database of which server this is: what is settled within a transaction must be settled in the store's own.
-- It reads a table of one row, and is called where that is forbidden: for its price the server would compile the query.
create or replace function {home}()
returns text
language sql
stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = on
as $$
  select m.store_id || '/' || c.system_identifier || '/' || d.oid
  from {meta} m, pg_control_system() c, pg_database d
  where d.datname = current_database()
$$;
