"""The guide on Redis gives the rights that the tests of the store have shown to do."""

from __future__ import annotations

import pytest

from tests.support.docs.pages import ROOT
from tests.support.stores.rights import FOR_A_CLUSTER, FOR_A_DATABASE, FOR_REPLICAS, FOR_ROOM, FOR_SENTINELS, RIGHTS


@pytest.mark.parametrize(
    "rights", [f"on >secret {RIGHTS}\n", FOR_A_DATABASE, FOR_REPLICAS, FOR_A_CLUSTER, FOR_SENTINELS, FOR_ROOM]
)
def test_the_rights_on_the_page_are_those_that_were_tried(rights: str) -> None:
    page = (ROOT / "docs/guides/redis.md").read_text(encoding="utf-8").replace("\\|", "|")
    assert rights in page
