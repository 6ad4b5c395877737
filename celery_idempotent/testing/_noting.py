"""Facts: what is noted of a key; of stores that keep a history, and of those that do not that they say so."""

from __future__ import annotations

import pytest

from ..notes import MOST, Note
from ..stores.base import Store
from ._asking import DONE, KEEP, KEY, RESULT, Ages, known, take


def note(*texts: str, key: str = KEY, ago: float = 0.0, keep: float = KEEP) -> list[Note]:
    """Return notes of a key."""
    return [Note(key, text, ago, keep) for text in texts]


def told(store: Store, key: str = KEY) -> list[str]:
    """Return what was noted of a key."""
    return [noted.text for noted in store.history(key)]


class NotingFacts(Ages):
    """A history is for people: no promise hangs on it, and it touches no record."""

    @pytest.fixture
    def keeping(self, store: Store) -> Store:
        """The store, if it keeps what is noted; else the facts about that have nothing to show."""
        if not store.keeps_history:
            pytest.skip("this store keeps no history")
        return store

    def test_a_store_that_keeps_no_history_takes_notes_and_tells_nothing(self, store: Store) -> None:
        store.note(note("begun"))
        assert bool(told(store)) is store.keeps_history

    def test_what_was_noted_comes_back_in_its_order(self, keeping: Store) -> None:
        keeping.note([])
        assert told(keeping) == []
        keeping.note(note("one", "two"))
        keeping.note(note("three"))
        assert told(keeping) == ["one", "two", "three"]

    def test_what_is_noted_late_stands_where_it_happened(self, keeping: Store) -> None:
        """Two processes write down what they saw each in its own time."""
        keeping.note(note("taken over", ago=10))
        keeping.note(note("its child died", ago=20))
        assert told(keeping) == ["its child died", "taken over"]

    def test_the_age_of_a_note_is_told_by_the_clock_of_the_store(self, keeping: Store) -> None:
        keeping.note([*note("old", ago=100), *note("new", ago=0.5)])
        old, new = keeping.history(KEY)
        assert 100 <= old.age < 130
        assert 0.4 <= new.age < 30
        assert 99 < old.age - new.age < 100

    def test_each_key_has_a_history_of_its_own(self, keeping: Store) -> None:
        other = f"{KEY}-2"
        keeping.note([*note("one"), *note("other", key=other), *note("two")])
        assert (told(keeping), told(keeping, other)) == (["one", "two"], ["other"])
        assert told(keeping, KEY[:-1]) == []

    def test_the_newest_notes_of_a_key_are_kept(self, keeping: Store) -> None:
        for start in range(0, 120, 40):
            keeping.note(note(*(str(number) for number in range(start, start + 40))))
        assert told(keeping) == [str(number) for number in range(120 - MOST, 120)]
        keeping.note(note(*(str(number) for number in range(120, 320))))
        assert told(keeping) == [str(number) for number in range(320 - MOST, 320)]

    @pytest.mark.parametrize(
        "text", ["", " ", "a\nb", "☃ 🎉", '{"a":"\\u0000"}', "\\0 \\", "'; --", "1 2 3", "x" * 5000]
    )
    def test_any_text_may_be_noted(self, keeping: Store, text: str) -> None:
        keeping.note(note(text, "next"))
        assert told(keeping) == [text, "next"]

    @pytest.mark.parametrize("key", ["☃ b", "a\nb", "%", "{a}", "a\\b"])
    def test_the_key_may_be_any_text(self, keeping: Store, key: str) -> None:
        keeping.note(note("one", key=key))
        assert told(keeping, key) == ["one"]

    def test_what_was_noted_is_kept_for_its_time_and_not_longer(self, keeping: Store) -> None:
        keeping.note(note("over", ago=100, keep=90))
        assert told(keeping) == []
        keeping.note(note("kept", ago=100, keep=200))
        keeping.note(note("late", ago=100, keep=90))
        assert told(keeping) == ["kept"]

    def test_a_history_outlives_its_record_and_needs_none(self, keeping: Store) -> None:
        keeping.settle(take(keeping), DONE, ttl=RESULT)
        keeping.note(note("replayed", keep=10 * RESULT))
        self.age(keeping, KEY, RESULT + 1)
        keeping.purge()
        assert keeping.get(KEY) is None
        assert told(keeping) == ["replayed"]

    def test_a_history_changes_no_record(self, keeping: Store) -> None:
        lease = take(keeping)
        keeping.note(note("begun"))
        assert known(keeping).owner == lease.owner
        keeping.settle(lease, DONE, ttl=RESULT)
        keeping.note(note("replayed"))
        assert known(keeping).payload == DONE.payload

    def test_a_history_is_not_taken_for_a_record(self, keeping: Store) -> None:
        keeping.note(note("one"))
        assert keeping.get(KEY) is None
        assert list(keeping.scan()) == []
        take(keeping)
        assert [record.key for record in keeping.scan(prefix=KEY)] == [KEY]
        assert keeping.purge() == 0

    def test_a_key_that_is_forgotten_has_no_history_any_more(self, keeping: Store) -> None:
        take(keeping)
        keeping.note([*note("one"), *note("other", key="other")])
        assert keeping.delete(KEY)
        assert (told(keeping), told(keeping, "other")) == ([], ["other"])
        assert not keeping.delete("other")
        assert told(keeping, "other") == []
