"""The metrics of a run: Prometheus takes them, alerts fire by them, a dashboard shows them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from stories import JOB, STORY, event, formed, generation, step, worker, write
from test_web import ask, impatient, served

from elastic_trainer.config import ConfigError
from elastic_trainer.events.now import NOW_FILE
from elastic_trainer.events.summary import summarize
from elastic_trainer.views.live import Live, Overview, open_runs
from elastic_trainer.views.metrics import METRICS, PREFIX
from elastic_trainer.views.prices import Price, Prices, costs

ROOT = Path(__file__).resolve().parent.parent
OBSERVE = ROOT / "deploy" / "observe"
PRICES = Prices(currency="EUR", default=Price(spot=36.0, on_demand=100.0))
__all__ = ["impatient"]


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of prometheus and promtool. Debian's package is unpacked, not installed:
    it would start a service."""
    if found := shutil.which("promtool"):
        return Path(found).parent
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        pytest.skip("Prometheus is not here: apt-get install prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    for command in (["apt-get", "update", "--quiet"], ["apt-get", "download", "prometheus"]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if list(folder.glob("*.deb")):
            break
    packages = list(folder.glob("*.deb"))
    if not packages:
        pytest.skip(f"Prometheus could not be downloaded: {done.stderr[-300:]}")
    subprocess.run(["dpkg", "-x", packages[0], folder / "root"], check=True)
    return folder / "root" / "usr" / "bin"


def values_of(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in
            (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))}


@pytest.mark.usefixtures("impatient")
def test_a_run_has_its_numbers_as_metrics_and_promtool_takes_them(
        tmp_path: Path, programs: Path) -> None:
    """Each declared metric of two runs is there once it is known, with the names that the runs
    have; a counter that has not counted is 0."""
    odd = 'a "run" with \\ and\nlines'
    checkpoint = event(13.5, "state.checkpoint_published", step=5, bytes=1, pause_s=0.1)
    story = [*STORY[:-1], checkpoint, STORY[-1]]
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, run in zip(folders, (odd, "x"), strict=True):
        write(folder, [item | {"run": run} for item in story])
    heard = time.time() - 5.0
    (folders[0] / NOW_FILE).write_text(json.dumps({"time": time.time(), "workers": [
        {"worker": "a/0/1", "host": "a", "rank": 0, "phase": "training", "step": 6,
         "heard": heard}]}))
    with served(*folders, prices=PRICES) as server:
        code, headers, text = ask(server, "/metrics")
    oldest_s = time.time() - heard
    assert code == 200 and headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    checked = subprocess.run([programs / "promtool", "check", "metrics"], input=text, text=True,
                             capture_output=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    run = 'run="a \\"run\\" with \\\\ and\\nlines"'
    found = values_of(text)
    assert found[f"{PREFIX}steps{{{run}}}"] == 6 and found[f"{PREFIX}goodput_ratio{{{run}}}"] > 0.5
    assert found[f'{PREFIX}workers_lost_total{{reason="crashed",{run}}}'] == 1
    assert found[f'{PREFIX}workers_lost_total{{reason="frozen",{run}}}'] == 0
    assert found[f'{PREFIX}host_seconds{{account="useful step",{run}}}'] == 11.5
    assert 4.9 < found[f"{PREFIX}oldest_heartbeat_seconds{{{run}}}"] <= oldest_s + 0.1
    assert found[f'{PREFIX}fleet_hosts{{{run},state="training"}}'] == 2
    assert found[f'{PREFIX}host_price_per_hour{{currency="EUR",host="a",{run},type=""}}'] == 36
    assert found[f'{PREFIX}steps{{run="x"}}'] == 6
    assert found[f"{PREFIX}last_checkpoint_timestamp_seconds{{{run}}}"] == 13.5
    assert found[f"{PREFIX}last_step_timestamp_seconds{{{run}}}"] == 13.5
    assert {re.split(r"[{ ]", line)[0].removeprefix(PREFIX) for line in text.splitlines()
            if not line.startswith("#")} == {*METRICS}


def test_a_run_that_has_not_begun_has_metrics(tmp_path: Path) -> None:
    """What is not known is absent, not 0."""
    write(tmp_path, [])
    text = Overview([Live(tmp_path)]).metrics()
    assert f"{PREFIX}loss" not in text and "timestamp" not in text
    assert f"{PREFIX}attempts_total" in text


@pytest.mark.parametrize(("verdict", "is_over"), [
    ("user_error", 1), ("interrupted", 1), ("failed", 0)])
def test_a_run_that_failed_or_was_interrupted_is_over_until_it_is_resumed(
        tmp_path: Path, verdict: str, is_over: int) -> None:
    """It has not finished. A failed attempt is followed by another one."""
    story = [*STORY[:12], event(20.0, "attempt.ended", exit_code=1, verdict=verdict)]
    again = event(90.0, "run.started", options={})
    for events, over, started in ((story, is_over, STORY[0]["time"]), ([*story, again], 0, 90.0)):
        write(tmp_path, events)
        found = values_of(Overview([Live(tmp_path)]).metrics())
        assert found[f'{PREFIX}is_over{{run="x"}}'] == over
        assert found[f'{PREFIX}is_finished{{run="x"}}'] == 0
        assert found[f'{PREFIX}started_timestamp_seconds{{run="x"}}'] == started


@pytest.mark.usefixtures("impatient")
def test_a_finished_run_has_the_numbers_of_its_report(tmp_path: Path) -> None:
    """What the driver logs behind run.finished belongs to no account, and costs nothing, until more
    steps follow. The cost never falls."""
    behind = [worker(15.0, "gone", "a", exit_code=0, reason="finished"),
              event(20.0, "driver.stopped", verdict="finished"),
              event(21.0, "attempt.ended", exit_code=0, verdict="finished"),
              event(90.0, "run.started", options={}), event(90.0, "attempt.started", attempt=2)]
    more = [event(91.0, "driver.host_added", host="a", slots=1, attempt=2),
            worker(91.0, "started", "a", 2, attempt=2), worker(94.0, "ready", "a", 2, attempt=2),
            formed(94.0, 4, "start", "a/0/2", attempt=2),
            event(95.0, "job.described", **JOB | {"steps": 8}, reduce="exact", attempt=2),
            generation(95.0, 4, 6, "checkpoint", 5.0, attempt=2),
            step(96.0, 6, generation=4, attempt=2),
            event(97.0, "run.finished", steps=8, samples=64, loss=0.0, weights_sha256="5a")]
    watched, spent = Overview([Live(tmp_path, PRICES)]), 0.0
    for story in (STORY, [*STORY, *behind], [*STORY, *behind, *more]):
        write(tmp_path, story)
        found, result = values_of(watched.metrics()), summarize(story)
        run = 'run="x"'
        for name in ("goodput", "ettr"):
            assert found[f"{PREFIX}{name}_ratio{{{run}}}"] == result[name] > 0
        for name, seconds in result["books"].items():
            phase = name.removesuffix("_s")
            assert found[f'{PREFIX}run_seconds_total{{phase="{phase}",{run}}}'] == seconds
        for account, seconds in result["host_seconds"].items():
            assert found[f'{PREFIX}host_seconds{{account="{account}",{run}}}'] == seconds
        cost = found[f'{PREFIX}cost_total{{currency="EUR",{run}}}']
        assert cost == costs(result, PRICES)["cost"] >= spent
        spent = cost
        assert found[f"{PREFIX}last_event_timestamp_seconds{{{run}}}"] == story[-1]["time"]
    assert result["books"]["stopped_s"] > 60


def test_runs_that_have_one_name_in_their_logs_have_two_labels(tmp_path: Path) -> None:
    """A copy of a run: Prometheus would refuse two samples with the same labels."""
    for name in ("one", "two"):
        write(tmp_path / name, STORY)
    text = Overview(open_runs([tmp_path / "one", tmp_path / "two"])).metrics()
    assert {*re.findall(r'run="(\w+)"', text)} == {"one", "two"}
    (tmp_path / "two" / "one").mkdir()
    with pytest.raises(ConfigError, match="2 of the folders are named one"):
        open_runs([tmp_path / "one", tmp_path / "two" / "one"])


def test_prometheus_scrapes_a_run(tmp_path: Path, programs: Path) -> None:
    """A real one, with the token in its header, as the documentation configures it."""
    write(tmp_path, STORY)
    port = free_port()
    with served(tmp_path, bind="0.0.0.0:0", token="mine") as server:
        (tmp_path / "prometheus.yml").write_text(json.dumps({"scrape_configs": [{
            "job_name": "elastic-trainer", "scrape_interval": "1s",
            "authorization": {"credentials": "mine"},
            "static_configs": [{"targets": [f"127.0.0.1:{server.server_port}"]}]}]}))
        prometheus = subprocess.Popen(
            [programs / "prometheus", f"--config.file={tmp_path}/prometheus.yml",
             f"--storage.tsdb.path={tmp_path}/data", f"--web.listen-address=127.0.0.1:{port}"],
            stderr=subprocess.PIPE)
        try:
            assert value_in(port, f"{PREFIX}steps") == "6"
            assert value_in(port, f'{PREFIX}workers_lost_total{{reason="crashed"}}') == "1"
        finally:
            prometheus.kill()
            prometheus.wait()


def value_in(port: int, query: str) -> str:
    """Return what Prometheus answers to a query, as soon as it has it."""
    url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(query)}"
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if found := json.load(answer)["data"]["result"]:
                    return str(found[0]["value"][1])
        except OSError:
            pass  # it does not listen yet
        assert time.monotonic() < deadline, query
        time.sleep(0.2)


def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path, programs: Path) -> None:
    """promtool plays tests/data/rules_test.yml, which has each alert."""
    rules = OBSERVE / "rules.yml"
    assert subprocess.run([programs / "promtool", "check", "rules", rules]).returncode == 0
    shutil.copy(rules, tmp_path)
    tests = shutil.copy(ROOT / "tests" / "data" / "rules_test.yml", tmp_path)
    played = subprocess.run([programs / "promtool", "test", "rules", tests], cwd=tmp_path,
                            capture_output=True, text=True)
    assert played.returncode == 0, played.stdout + played.stderr
    alerts = re.findall(r"- alert: (\w+)", rules.read_text())
    assert len(alerts) > 4 and all(f"alertname: {it}" in Path(tests).read_text() for it in alerts)


def test_the_documentation_has_each_metric_and_alert_and_they_are_those_of_a_run() -> None:
    """Rules and dashboard use no other metric."""
    page = (ROOT / "docs" / "guide" / "metrics.md").read_text()
    assert {*re.findall(rf"^\| `{PREFIX}(\w+)` \|", page, re.M)} == {*METRICS}
    assert re.findall(r"^\| `(ElasticTrainer\w+)` \|", page, re.M) == re.findall(
        r"- alert: (\w+)", (OBSERVE / "rules.yml").read_text())
    used = {name for file in ("rules.yml", "dashboard.json")
            for name in re.findall(rf"{PREFIX}(\w+)", (OBSERVE / file).read_text())}
    assert used and used <= {*METRICS}


def test_the_dashboard_has_the_form_of_grafanas_schema() -> None:
    """Grafana's own library builds it, reads it, and writes the same again."""
    pytest.importorskip("grafana_foundation_sdk")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    spec = importlib.util.spec_from_file_location("dashboard", OBSERVE / "dashboard.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (OBSERVE / "dashboard.json").read_text()
    assert module.built() + "\n" == text, (
        "Run: python deploy/observe/dashboard.py > deploy/observe/dashboard.json")
    again: Any = json.loads(JSONEncoder(sort_keys=True).encode(
        Dashboard.from_json(json.loads(text))))
    assert [it["title"] for it in again["panels"]] == [
        it["title"] for it in json.loads(text)["panels"]]
    assert os.path.getsize(OBSERVE / "dashboard.json") < 64_000
