"""A model instance as an argument: the same row is the same argument, whatever was read with it."""

from __future__ import annotations

from tests.support.django_app.project import Project


def compared() -> list[bool]:
    """Return whether a row, read in other ways, is the same argument; then whether another row is."""
    from django.contrib.auth.models import Permission, User

    from celery_idempotent.core.keys import fingerprint

    rows = Permission.objects.order_by("pk")
    asked, (other, *_) = rows.get(pk=rows[0].pk), rows[1:]
    assert asked.content_type.pk
    user = User.objects.create(username="anna")
    prefetched = User.objects.prefetch_related("groups").get(pk=user.pk)
    assert prefetched.groups.all()._result_cache == []
    pairs = [
        *((rows[0], asked), (rows[0], rows.select_related("content_type")[0])),
        *((User.objects.get(pk=user.pk), prefetched), (rows[0], rows.defer("name")[0]), (rows[0], other)),
    ]
    user.delete()
    return [fingerprint({"row": one}) == fingerprint({"row": two}) for one, two in pairs]


def test_a_row_is_one_argument_however_its_relations_were_read_and_another_with_fewer_columns(
    sqlite_project: Project,
) -> None:
    assert sqlite_project.run(compared) == [True, True, True, False, False]
