"""The alert rules and the dashboard speak of metrics that there are, and each alert fires when it should."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent.metrics.catalogue import CATALOGUE, Kind, Metric
from tests.conftest import missing
from tests.support import promtool
from tests.support.docs.pages import ROOT
from tests.support.servers import ServerMissing

pytestmark = pytest.mark.thorough  # the files are the same on every Python

RULES = ROOT / "docs" / "alerts" / "celery-idempotent.rules.yml"
DASHBOARD = ROOT / "docs" / "grafana" / "celery-idempotent.json"
GUIDE = ROOT / "docs" / "guides" / "metrics.md"
ALERTS = ROOT / "docs" / "guides" / "alerts.md"
METRIC = re.compile(r"\bcelery_idempotent_\w+")
PREFIX = "celery_idempotent_"


def exported() -> set[str]:
    """Return every series name that a scrape may hold."""
    plain = {metric.prometheus for metric in CATALOGUE if metric.kind is not Kind.HISTOGRAM}
    histograms = [metric.prometheus for metric in CATALOGUE if metric.kind is Kind.HISTOGRAM]
    return plain | {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def alerts() -> list[str]:
    return re.findall(r"- alert: (\w+)", RULES.read_text())


@pytest.fixture
def checker() -> None:
    try:
        promtool.promtool()
    except ServerMissing as error:
        raise missing(error, optional="promtool") from None


# -- names -------------------------------------------------------------------------------------------------------------


def test_alerts_speak_of_metrics_that_are_exported() -> None:
    named = set(METRIC.findall(RULES.read_text()))
    assert len(named) > 8
    assert named <= exported()


def test_the_dashboard_speaks_of_metrics_that_are_exported() -> None:
    assert {name for text in expressions() for name in METRIC.findall(text)} <= exported()
    for variable in dashboard()["templating"]["list"]:
        assert set(METRIC.findall(json.dumps(variable))) <= exported()


def test_the_dashboard_shows_every_metric() -> None:
    shown = {re.sub("_(bucket|sum|count)$", "", name) for text in expressions() for name in METRIC.findall(text)}
    assert {metric.prometheus for metric in CATALOGUE} == shown


def test_labels_in_expressions_are_those_of_their_metrics() -> None:
    labels = {name: {*metric.labels, "le"} for metric in CATALOGUE for name in exported() if metric.prometheus in name}
    found = 0
    for text in [*expressions(), *RULES.read_text().splitlines()]:
        for name, matchers in re.findall(r"(celery_idempotent_\w+)\{([^}]*)\}", text):
            found += 1
            assert set(re.findall(r"(\w+)\s*=~?", matchers)) <= labels[name], text
        for name, grouped in re.findall(r"by \(([^)]*)\) \(\w*\(?(celery_idempotent_\w+)", text):
            assert {label.strip() for label in name.split(",")} <= labels[grouped], text
    assert found > 20


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda metric: metric.name)
def test_the_guide_lists_every_metric(metric: Metric) -> None:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    assert f"| `{metric.prometheus}` | {metric.kind.value} | {labels} | {metric.help} |" in GUIDE.read_text()


# -- the dashboard -----------------------------------------------------------------------------------------------------


def test_the_dashboard_has_what_grafana_asks_of_one() -> None:
    found = dashboard()
    assert found["schemaVersion"] >= 36
    assert {"title", "uid", "panels", "templating", "time", "annotations"} <= found.keys()
    assert "id" not in found, "a dashboard that is imported gets its id there"
    ids = [panel["id"] for panel in found["panels"]]
    assert len(ids) == len(set(ids))
    variables = {variable["name"] for variable in found["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(found["panels"])))
    assert used <= variables | {"__rate_interval", "__range"}


def test_a_panel_says_what_it_shows_and_where_it_asks() -> None:
    for panel in panels():
        assert panel["title"], panel
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["type"] in {"timeseries", "stat"}
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references)) > 0
        for asked in (panel, *panel["targets"]):
            assert asked["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_no_panel_lies_on_another() -> None:
    places = [(panel["title"], panel["gridPos"]) for panel in dashboard()["panels"]]
    for (name, one), (other, two) in combinations(places, 2):
        assert one["x"] + one["w"] <= 24
        apart = (
            one["x"] + one["w"] <= two["x"]
            or two["x"] + two["w"] <= one["x"]
            or one["y"] + one["h"] <= two["y"]
            or two["y"] + two["h"] <= one["y"]
        )
        assert apart, f"{name} and {other}"


def test_prometheus_understands_every_expression_of_the_dashboard(checker: None, tmp_path: Path) -> None:
    plain = [
        re.sub(r"\$__\w+", "5m", text).replace("$task", ".*").replace("${datasource}", "") for text in expressions()
    ]
    rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(plain)]
    path = tmp_path / "dashboard.rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool.check_rules(path)


# -- the alerts --------------------------------------------------------------------------------------------------------


def test_prometheus_loads_the_rules(checker: None) -> None:
    promtool.check_rules(RULES)


def counter(name: str, values: str, task: str = "shop.charge", **labels: str) -> dict[str, str]:
    known = {"task": task, **labels}
    inside = ",".join(f'{label}="{value}"' for label, value in known.items() if value)
    return {"series": f"{PREFIX}{name}{{{inside}}}", "values": values}


STARTS = counter("starts_total", "0+60x60")
#: By alert: series that it is for, and series beside it that it is not for.
CASES: dict[str, tuple[list[dict[str, str]], list[dict[str, str]]]] = {
    "IdempotencyStoreDown": (
        [counter("stores_down", "0x10 2x50", "", store="RedisStore")],
        [
            counter("stores_down", "0x60", "", store="RedisStore"),
            counter("store_failures_total", "5x60", "", store="S"),
        ],
    ),
    "IdempotencySettleFailed": (
        [counter("settle_failures_total", "0x49 1x11")],
        [counter("settle_failures_total", "0 3x60")],
    ),
    "IdempotencyRunsUnprotected": (
        [counter("unprotected_total", "0x49 1x11")],
        [counter("unprotected_total", "0 3x60")],
    ),
    "IdempotencyCrashLoop": ([counter("crash_loops_total", "0x49 1x11")], [counter("crash_loops_total", "0 3x60")]),
    "IdempotencyLeasesLost": (
        [STARTS, counter("lost_total", "0+1x60")],
        [STARTS, counter("lost_total", "0x49 1x11"), counter("lost_total", "0x60", "other")],
    ),
    "IdempotencyTakeOvers": (
        [STARTS, counter("take_overs_total", "0+6x60")],
        [STARTS, counter("take_overs_total", "0+1x60")],
    ),
    "IdempotencyKeysReused": ([counter("keys_reused_total", "0x49 1x11")], [counter("keys_reused_total", "0 3x60")]),
    "IdempotencyReleaseFailures": (
        [counter("release_failures_total", "0x49 1x11")],
        [counter("release_failures_total", "0 3x60")],
    ),
    "IdempotencyDeferralsPileUp": (
        [STARTS, counter("deferred_total", "0+900x60")],
        [STARTS, counter("deferred_total", "0+120x60")],
    ),
    "IdempotencyStoreSlow": (
        [
            counter("acquire_seconds_bucket", f"0+{rate}x60", le=le)
            for le, rate in (("0.1", 50), ("1", 60), ("+Inf", 60))
        ],
        [
            counter("acquire_seconds_bucket", f"0+{rate}x60", le=le)
            for le, rate in (("0.1", 60), ("1", 60), ("+Inf", 60))
        ],
    ),
}


def test_every_alert_is_tried() -> None:
    assert sorted(CASES) == sorted(alerts())


@pytest.mark.nightly
@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_when_it_should_and_not_otherwise(alert: str, checker: None, tmp_path: Path) -> None:
    bad, good = CASES[alert]
    text = RULES.read_text().split(f"- alert: {alert}\n")[1].split("- alert:")[0]
    severity = re.search(r"severity: (\w+)", text)
    assert severity is not None

    quiet = {"alert_rule_test": [{"eval_time": "55m", "alertname": alert, "exp_alerts": []}]}
    promtool.verify_rules(RULES, tmp_path, {"interval": "1m", "input_series": good, **quiet})
    labels = {"alertname": alert, "alertstate": "firing", "severity": severity[1]}
    by = re.search(r"sum by \((task|store)\)", text)
    if by is not None:
        labels[by[1]] = "RedisStore" if by[1] == "store" else "shop.charge"
    inside = ", ".join(f'{name}="{value}"' for name, value in labels.items())
    loud = {
        "expr": f'ALERTS{{alertname="{alert}"}}',
        "eval_time": "55m",
        "exp_samples": [{"labels": f"ALERTS{{{inside}}}", "value": 1}],
    }
    promtool.verify_rules(RULES, tmp_path, {"interval": "1m", "input_series": bad, "promql_expr_test": [loud]})


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_says_what_to_do_in_the_guide(alert: str) -> None:
    assert f"`{alert}`" in ALERTS.read_text()
