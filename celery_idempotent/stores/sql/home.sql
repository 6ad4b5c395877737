-- Tell which database of which server this is: what is settled within a transaction must be settled in the store's own.
create or replace function {home}() returns text language sql stable as $$
  select m.store_id || '/' || c.system_identifier || '/' || d.oid
  from {meta} m, pg_control_system() c, pg_database d where d.datname = current_database()
$$;
