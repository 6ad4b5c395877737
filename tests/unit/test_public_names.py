"""What a user imports."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from pkgutil import walk_packages
from typing import TYPE_CHECKING

import pytest

import celery_idempotent

if TYPE_CHECKING:
    from types import ModuleType

HOMES = {
    "AlreadyPublished": "errors",
    "ConfigurationError": "errors",
    "Conflict": "errors",
    "CrashLoop": "errors",
    "Event": "events",
    "IdempotencyError": "errors",
    "IdempotencyOptions": "core.policy",
    "IdempotentTask": "celery.task",
    "KeyReused": "errors",
    "LeaseLost": "errors",
    "MissingKey": "errors",
    "NoLease": "errors",
    "Policy": "core.policy",
    "PreviouslyFailed": "errors",
    "ResultUnavailable": "errors",
    "SettleNotCommitted": "errors",
    "Store": "stores.base",
    "StoreError": "errors",
    "StoreUnreachable": "errors",
    "Unique": "core.policy",
    "UniqueOptions": "core.policy",
    "add_hook": "events",
    "current_lease": "core.lease",
    "idempotent": "functions",
    "open_store": "stores",
    "remove_hook": "events",
}


def home(name: str) -> ModuleType:
    return import_module(f"celery_idempotent.{HOMES[name]}")


def test_the_public_names_are_these() -> None:
    assert sorted(celery_idempotent.__all__) == sorted(HOMES)
    assert dir(celery_idempotent) == sorted(celery_idempotent.__all__)


@pytest.mark.parametrize("name", HOMES)
def test_a_public_name_is_what_its_home_defines(name: str) -> None:
    assert getattr(celery_idempotent, name) is getattr(home(name), name)


def test_the_version_is_that_of_the_distribution() -> None:
    assert celery_idempotent.__version__ == version("celery-idempotent")


def test_every_module_can_be_imported() -> None:
    """With each version: a module may use what an old one lacks, and no other test of that environment import it."""
    found = [module.name for module in walk_packages(celery_idempotent.__path__, "celery_idempotent.")]
    assert len(found) > 100
    for name in found:
        import_module(name)


@pytest.mark.parametrize("name", ["Guard", "errors_", "__wrapped__"])
def test_what_is_not_public_is_not_there(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'celery_idempotent' has no attribute '{name}'"):
        getattr(celery_idempotent, name)


@pytest.mark.parametrize("name", [name for name, module in HOMES.items() if module == "errors"])
def test_every_error_is_an_idempotency_error_made_from_its_message_alone(name: str) -> None:
    error = getattr(celery_idempotent, name)("what went wrong")
    assert isinstance(error, celery_idempotent.IdempotencyError)
    assert str(error) == "what went wrong"
