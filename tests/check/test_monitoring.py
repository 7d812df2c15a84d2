"""The dashboard and the alerts, against a real Prometheus that scrapes a real import."""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cdi_worker.importer import metrics
from tests.support import misbehave, processes, prometheus, repository, worker

MiB = 1 << 20
DEPLOY = repository.ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
RULE = yaml.safe_load((DEPLOY / "prometheus-rule.yaml").read_text())
ALERTS = {rule["alert"]: rule for group in RULE["spec"]["groups"] for rule in group["rules"]}
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"]}
#: What Grafana puts in place of its variables.
VARIABLES = {"$namespace": ".*", "$__rate_interval": "10s"}
DATA = 12 * MiB
PAGE = misbehave.Page(random.Random(1).randbytes(DATA), drip=(64 << 10, 0.25))


def expressions() -> Iterator[str]:
    """Yield all expressions of the dashboard and the alerts, as Prometheus gets them."""
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield resolved(target["expr"])
    for rule in ALERTS.values():
        yield rule["expr"]


def resolved(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


@pytest.fixture(scope="module")
def during(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[prometheus.Server, worker.Pod]]:
    """Run an import that is slow and whose server fails at first, and a Prometheus that scrapes it."""
    folder = tmp_path_factory.mktemp("monitoring")
    env = {"IMPORTER_SOURCE": "http", "FILESYSTEM_OVERHEAD": "0", "OWNER_UID": "uid"}
    pod = worker.Pod(folder / "pod", env=env, metrics_port=processes.free_port())
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(misbehave.Server())
        url = server.serve("/disk.img", (misbehave.Page(status=503), 1), PAGE)
        scraping = stack.enter_context(prometheus.running(folder, {"importer-disk": pod.metrics_port}))
        stack.enter_context(worker.started(*pod.arguments, env={**pod.env, "IMPORTER_ENDPOINT": url}))
        processes.wait_for(lambda: scraping.query("cdi_worker_phase_bytes > 0"), "the first bytes")
        # A rate needs two points.
        time.sleep(2 * prometheus.INTERVAL)
        yield scraping, pod


def test_panels_show_a_running_import(during: tuple[prometheus.Server, worker.Pod]) -> None:
    scraping, _pod = during
    for title, panel in PANELS.items():
        for target in panel["targets"]:
            assert scraping.query(resolved(target["expr"])), f"{title}: {target['expr']}"
    (progress,) = scraping.query(resolved(PANELS["Progress"]["targets"][0]["expr"]))
    assert progress["metric"] == {"namespace": "vms", "pod": "importer-disk"}
    assert 0 < float(progress["value"][1]) < 100
    (speed,) = scraping.query(resolved(PANELS["Speed of all workers"]["targets"][0]["expr"]))
    assert 0 < float(speed["value"][1]) < 6 * 64 * 1024 / 0.25 * 1.5


def test_every_metric_that_is_named_is_served(during: tuple[prometheus.Server, worker.Pod]) -> None:
    scraping, _pod = during
    served = {series["metric"]["__name__"] for series in scraping.query('{job="worker"}')}
    served |= {f"{name}_total" for name in metrics.COUNTERS.values()}
    for expression in expressions():
        patterns = re.findall(r'__name__=~"([^"]+)"', expression)
        assert all(any(re.fullmatch(pattern, name) for name in served) for pattern in patterns)
        if patterns:
            assert {f"{name}_total" for name in metrics.COUNTERS.values()} <= {
                name for name in served if re.fullmatch(patterns[0], name)
            }
        assert (
            set(re.findall(r"\b(?:cdi_worker|kubevirt_cdi)_\w+", re.sub(r'"[^"]*"', "", expression)))
            <= served
        )


def test_documented_metrics_are_those_served(during: tuple[prometheus.Server, worker.Pod]) -> None:
    scraping, _pod = during
    served = {series["metric"]["__name__"] for series in scraping.query('{__name__=~"cdi_worker_.+"}')}
    page = (repository.ROOT / "docs/pods/metrics.md").read_text()
    rows = re.findall(r"^\| `(cdi_worker_\w+)`", page, re.MULTILINE)
    # The time of start that the OpenMetrics library adds to counters is not of our making.
    assert {name for name in served if not name.endswith("_created")} == set(rows)


# -- alerts, at a time that passes as fast as promtool can compute ---------------------------------------

LABELS = 'namespace="vms", pod="importer-disk", ownerUID="uid"'


def series(name: str, values: str, more: str = "") -> dict[str, str]:
    return {"series": f"{name}{{{LABELS}{more}}}", "values": values}


TRANSFER = series("cdi_worker_phase", "1x60", ', phase="transfer"')
#: For each alert: input series that raise it after ``minutes``, and those that do not.
CASES: list[tuple[str, int, list[dict[str, str]], bool]] = [
    ("CDIWorkerHalted", 3, [TRANSFER, series("cdi_worker_speed_bytes_per_second", "0x60")], True),
    ("CDIWorkerHalted", 1, [TRANSFER, series("cdi_worker_speed_bytes_per_second", "0x60")], False),
    ("CDIWorkerHalted", 3, [TRANSFER, series("cdi_worker_speed_bytes_per_second", "9x60")], False),
    (
        "CDIWorkerHalted",
        3,
        [
            series("cdi_worker_phase", "1x60", ', phase="sync"'),
            series("cdi_worker_speed_bytes_per_second", "0x60"),
        ],
        False,
    ),
    ("CDIWorkerManyRetries", 12, [series("cdi_worker_retries_total", "0+5x60")], True),
    ("CDIWorkerManyRetries", 12, [series("cdi_worker_retries_total", "0+1x60")], False),
    ("CDIWorkerSlowSync", 16, [series("cdi_worker_phase", "1x60", ', phase="sync"')], True),
    ("CDIWorkerSlowSync", 14, [series("cdi_worker_phase", "1x60", ', phase="sync"')], False),
    ("CDIWorkerSlowTransfer", 16, [series("cdi_worker_remaining_seconds", "30000x60")], True),
    ("CDIWorkerSlowTransfer", 16, [series("cdi_worker_remaining_seconds", "3000x60")], False),
]


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{name}-{'yes' if fires else 'no'}" for name, _, _, fires in CASES]
)
def test_alert(case: tuple[str, int, list[dict[str, str]], bool], tmp_path: Path) -> None:
    processes.need("promtool")
    name, minutes, given, fires = case
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": RULE["spec"]["groups"]}))
    processes.run("promtool", "check", "rules", tmp_path / "rules.yaml")
    # With what is expected; only the presence of an alert is compared here, by its summary below.
    expected: list[dict[str, Any]] = []
    test = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m"}
    test["tests"] = [
        {
            "interval": "1m",
            "input_series": given,
            "promql_expr_test": [],
            "alert_rule_test": [{"eval_time": f"{minutes}m", "alertname": name, "exp_alerts": expected}],
        }
    ]
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    if not fires:
        processes.run("promtool", "test", "rules", tmp_path / "test.yaml")
        return
    with pytest.raises(AssertionError, match=f'alertname="{name}"') as caught:
        processes.run("promtool", "test", "rules", tmp_path / "test.yaml")
    assert 'pod="importer-disk"' in str(caught.value)
    assert ALERTS[name]["annotations"]["summary"] in str(caught.value)


def test_pod_monitor_selects_cdi_s_workers() -> None:
    """The labels and the name of the port are those of CDI 1.65."""
    spec = yaml.safe_load((DEPLOY / "pod-monitor.yaml").read_text())["spec"]
    assert spec["selector"]["matchLabels"] == {"prometheus.cdi.kubevirt.io": "true"}
    assert "importer" in spec["selector"]["matchExpressions"][0]["values"]
    (endpoint,) = spec["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["scheme"]) == ("metrics", "https")
    assert endpoint["tlsConfig"] == {"insecureSkipVerify": True}
