-- What happened to keys, for people: the newest lines of each. Nothing that a verb decides depends on it.
create table if not exists {history} (
  key      text     collate "C" primary key,       -- the operation; its record may be there or not
  at       bigint[] not null,                      -- when each of them happened, in microseconds since 1970
  line     text[]   not null,                      -- what happened, as JSON
  expires  bigint   not null                       -- when all of it is forgotten
);
do $$ begin
  if to_regclass('{schema}."{name}_history_expires"') is null then
    create index if not exists "{name}_history_expires" on {history} (expires);
  end if;
end $$;
