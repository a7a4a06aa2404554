"""The page that follows a run: what it answers and refuses, and what a browser shows of it."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy
import pytest
from browser import chromium, prepare
from cluster import Cluster
from s3_servers import Unavailable
from stories import STORY, event, generation, step, write

from elastic_trainer.__main__ import main
from elastic_trainer.config import ConfigError
from elastic_trainer.events.summary import summarize
from elastic_trainer.views import live as live_module
from elastic_trainer.views.live import Live, Overview, open_runs
from elastic_trainer.views.prices import Price, Prices, costs
from elastic_trainer.views.web import MOST_READERS, Server, address_of, is_own_name


@contextmanager
def served(*run_dirs: Path, bind: str = "127.0.0.1:0", prices: Prices | None = None,
           **options: Any) -> Iterator[Server]:
    server, loop = Server(open_runs(run_dirs, prices), bind, **options), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=[server.serve()], daemon=True)
    thread.start()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(server.stops.set)
        thread.join()
        loop.close()


def ask(server: Server, path: str, method: str = "GET", **headers: str
        ) -> tuple[int, http.client.HTTPMessage, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=300)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, text


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the log for each request."""
    monkeypatch.setattr(live_module, "LEAST_S", 0.0)
    monkeypatch.setattr(live_module, "REST", 0)
    monkeypatch.setattr(live_module, "COSTS_REST", 0)


@pytest.mark.usefixtures("impatient")
def test_a_reader_gets_what_is_newer_than_it_has(tmp_path: Path) -> None:
    """First all sections, then nothing, then those that an event has changed."""
    write(tmp_path, STORY[:12])
    with served(tmp_path) as server:
        first = json.loads(ask(server, "/sections?newer=0")[2])
        assert {*first["sections"]} == {*Live.sections}
        same = json.loads(ask(server, f"/sections?newer={first['version']}")[2])
        assert same == {**first, "sections": {}}
        write(tmp_path, STORY)
        later = json.loads(ask(server, f"/sections?newer={first['version']}")[2])
        assert "checkpoints" not in later["sections"]
        assert "was killed (SIGKILL)" in later["sections"]["events"]
        assert "a worker lost" in later["sections"]["picture"]
        assert "training" in later["sections"]["fleet"]
        assert "finished" in later["sections"]["figures"]


def test_a_page_only_reads_and_no_other_site_reads_it(tmp_path: Path) -> None:
    """Another method, path or name of the server is refused; the policy forbids other sources."""
    write(tmp_path, STORY)
    with served(tmp_path) as server:
        code, headers, text = ask(server, "/")
        assert code == 200 and "<script>" in text and "http://" not in text
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "'unsafe-inline'" not in policy.split(
            "script-src")[1]
        assert headers["Cache-Control"] == "no-store" and "Access-Control" not in str(headers)
        assert ask(server, "/", "HEAD")[2] == ""
        assert ask(server, "/../etc/passwd")[0] == 404
        assert ask(server, "/", "POST")[0] == ask(server, "/", "DELETE")[0] == 501
        port = server.server_port
        assert ask(server, "/sections", Host=f"localhost:{port}")[0] == 200
        assert ask(server, "/sections", Host=f"evil.example:{port}")[0] == 403
        assert ask(server, "/sections?newer=-1&newer=x")[0] == 200


@pytest.mark.parametrize(("host", "is_own"), [
    ("127.0.0.1:8765", True), ("127.0.0.1", True), ("localhost", True), ("LocalHost:80", True),
    ("[::1]", True), ("[::1]:8765", True), ("127.0.0.1:", True), ("", False), (":80", False),
    ("evil.example", False), ("evil.example:80", False), ("10.0.0.5:8765", False), ("[", False),
    ("localhost.evil.example", False), ("127.0.0.1.evil.example:8765", False)])
def test_a_page_has_the_names_of_its_machine_with_and_without_a_port(host: str, is_own: bool
                                                                     ) -> None:
    """A browser leaves out port 80, e.g. that of a tunnel. No other name is one of this machine."""
    assert is_own_name(host) == is_own


def test_a_log_that_cannot_be_read_is_an_answer_with_the_reason(tmp_path: Path) -> None:
    """Each time it is asked, and the page is there again when the log can be read."""
    (tmp_path / "events.jsonl").symlink_to("events.jsonl")
    with served(tmp_path) as server:
        for path in ("/sections?newer=0", "/metrics", "/sections?newer=0"):
            code, _, text = ask(server, path)
            assert code == 503 and "events.jsonl cannot be read: Too many levels" in text
        assert ask(server, "/")[0] == 200
        (tmp_path / "events.jsonl").unlink()
        write(tmp_path, STORY)
        assert "finished" in json.loads(ask(server, "/sections")[2])["sections"]["figures"]


@pytest.mark.usefixtures("impatient")
def test_several_runs_have_a_page_each_and_a_table_of_all(tmp_path: Path) -> None:
    """The table has the cost so far, and where a host has no price, its run's page names it."""
    for name, story in (("one", STORY), ("two 2", STORY[:12]), ("new", [])):
        write(tmp_path / name, story)
    prices = Prices(hosts={name: Price(spot=36.0, on_demand=50.0) for name in "acd"})
    folders = [tmp_path / name for name in ("one", "two 2", "new")]
    with served(*folders, prices=prices) as server:
        assert "3 runs" in ask(server, "/")[2]
        found = json.loads(ask(server, "/sections?newer=0")[2])
        rows = found["sections"]["runs"]
        assert 'href="run/two%202/">two 2<' in rows and "finished" in rows and "booting" in rows
        assert json.loads(ask(server, f"/sections?newer={found['version']}")[2])["sections"] == {}
        code, _, text = ask(server, "/run/two%202/")
        assert code == 200 and "run two 2" in text and "all runs" in text
        fleet = json.loads(ask(server, "/run/two%202/sections")[2])["sections"]["fleet"]
        assert "<th>USD/h</th>" in fleet and "<td>36</td>" in fleet and "<td>-</td>" in fleet
        figures = json.loads(ask(server, "/run/one/sections")[2])["sections"]["figures"]
        assert "neither host b" in figures
        unknown = ("/run/three/", "/run/", "/run/one", "/run/one/../..")
        assert {ask(server, path)[0] for path in unknown} == {404}
    prices.hosts["b"] = prices.hosts["a"]
    with served(folders[0], prices=prices) as server:
        assert "all runs" not in ask(server, "/")[2]
        cost = costs(summarize(STORY), prices)["cost"]
        assert f"{cost:.4g} USD" in json.loads(ask(server, "/sections")[2])["sections"]["figures"]


def test_only_a_page_shows_several_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, remedy in ([], "add --web"), (["--otel"], "add --web"), (
            ["--otel", "--prices", "x"], "Leave out --otel or --prices"):
        assert main(["watch", str(tmp_path), str(tmp_path), *options]) != 0
        assert remedy in capsys.readouterr().err


def test_other_addresses_need_the_token(tmp_path: Path) -> None:
    """It comes in the printed address once, and then in a cookie that scripts do not see; or, for a
    program, in a header."""
    write(tmp_path, STORY)
    with served(tmp_path, bind="0.0.0.0:0") as server:
        token = server.token
        assert len(token) >= 32
        assert ask(server, "/")[0] == ask(server, "/sections")[0] == 403
        assert ask(server, "/?token=wrong")[0] == ask(server, "/", Cookie="x=é;")[0] == 403
        code, headers, _ = ask(server, f"/?token={token}")
        assert code == 303 and headers["Location"] == "/"
        assert "HttpOnly" in headers["Set-Cookie"] and "SameSite=Strict" in headers["Set-Cookie"]
        cookie = headers["Set-Cookie"].split(";")[0]
        assert ask(server, "/", Cookie=cookie)[0] == 200
        assert ask(server, "/sections", Authorization=f"Bearer {token}")[0] == 200
    with served(tmp_path, bind="0.0.0.0:0", token="mine") as server:
        assert ask(server, "/?token=mine")[0] == 303


def test_two_servers_of_one_machine_do_not_shut_each_other_out(tmp_path: Path) -> None:
    """A browser sends all cookies of a machine to each of its ports, also those of servers that
    have ended and of other programs. One right token is enough."""
    write(tmp_path, STORY)
    with served(tmp_path, bind="0.0.0.0:0") as one, served(tmp_path, bind="0.0.0.0:0") as two:
        jar = [ask(it, f"/?token={it.token}")[1]["Set-Cookie"].split(";")[0] for it in (one, two)]
        assert len({it.partition("=")[0] for it in jar}) == 2
        cookies = "; ".join(['odd={"a": "é"}', *jar, "other"])
        for server, mine, stale in ((one, *jar), (two, *reversed(jar))):
            assert ask(server, "/sections", Cookie=cookies)[0] == 200
            assert ask(server, "/sections", Cookie=stale)[0] == 403
            wrong = f"{mine.partition('=')[0]}=wrong"
            assert ask(server, "/sections", Cookie=wrong)[0] == 403
            assert ask(server, "/metrics", Cookie=wrong,
                       Authorization=f"Bearer {server.token}")[0] == 200
            assert ask(server, f"/?token={server.token}", Cookie=wrong)[0] == 303


BEGINNINGS = {
    "nothing": b"", "a letter": b"G", "a line": b"GET / HTTP/1.1\r\n",
    "half a head": b"GET / HTTP/1.1\r\nHost: x\r\nX-A: ",
    "a body that does not come": b"POST / HTTP/1.1\r\nContent-Length: 0\r\n",
}


@contextmanager
def connections(server: Server, count: int, first: bytes, address: str = "127.0.0.1"
                ) -> Iterator[list[socket.socket]]:
    """Open connections that send the beginning of a request."""
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            found.append(stack.enter_context(socket.create_connection(
                ("127.0.0.1", server.server_port), 20, (address, 0))))
            found[-1].sendall(first)
        yield found


def is_closed(connection: socket.socket) -> bool:
    """True if the server has closed a connection. Sends one more byte."""
    try:
        connection.sendall(b"x")
        ready, _, _ = select.select([connection], [], [], 0.02)
        return bool(ready) and connection.recv(1) == b""
    except OSError:
        return True


@pytest.mark.parametrize("first", BEGINNINGS.values(), ids=BEGINNINGS)
@pytest.mark.parametrize("bind", ["127.0.0.1:0", "0.0.0.0:0"])
def test_a_reader_gets_the_page_when_forty_connections_are_slow(
        tmp_path: Path, first: bytes, bind: str) -> None:
    """They have been there before it, send single bytes, and come from one address or from many.
    The reader has its page at once, from the same address and from another one."""
    write(tmp_path, STORY)
    with served(tmp_path, bind=bind) as server, ExitStack() as stack:
        slow = [*stack.enter_context(connections(server, 40, first))]
        for number in range(2, 42):
            slow += stack.enter_context(connections(server, 1, first, f"127.0.0.{number}"))
        for _ in range(3):
            for connection in slow:
                is_closed(connection)
            code, _, text = ask(server, "/sections", Authorization=f"Bearer {server.token}")
            assert code == 200 and "finished" in text
        assert sum(not is_closed(connection) for connection in slow) <= MOST_READERS


def test_a_request_has_one_deadline_however_often_it_sends(tmp_path: Path) -> None:
    """Single bytes do not extend it."""
    write(tmp_path, STORY)
    with served(tmp_path, request_s=0.5) as server, connections(
            server, 8, b"GET / HTTP/1.1\r\nX: ") as slow:
        deadline = time.monotonic() + 60
        while not all([is_closed(connection) for connection in slow]):
            assert time.monotonic() < deadline


def test_a_reader_gets_the_page_when_others_read_no_answer(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many of them as answers are sent at once. The oldest one makes room."""
    write(tmp_path, STORY)
    monkeypatch.setattr(Overview, "metrics", lambda _: "x" * (16 << 20))  # fills every buffer
    asked = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with served(tmp_path, request_s=300) as server, connections(
            server, MOST_READERS, asked) as silent:
        for connection in silent:
            assert connection.recv(8) == b"HTTP/1.1"
        for _ in range(2 * MOST_READERS):
            assert ask(server, "/sections")[0] == 200


def test_a_client_without_the_token_takes_no_readers_place(tmp_path: Path) -> None:
    """It is refused without a thread, also where it reads nothing."""
    write(tmp_path, STORY)
    before = threading.active_count()
    with served(tmp_path, bind="0.0.0.0:0") as server:
        asked = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with connections(server, 4 * MOST_READERS, asked) as clients:
            for client in clients:
                assert client.recv(12) == b"HTTP/1.1 403"
            assert threading.active_count() <= before + 1  # that of `served`
            assert ask(server, f"/sections?token={server.token}")[0] == 200


@pytest.mark.parametrize("package", ["aiohttp", "prometheus_client"])
def test_a_page_without_its_packages_names_the_extra_that_has_them(tmp_path: Path, package: str
                                                                   ) -> None:
    """The terminal view needs neither."""
    write(tmp_path, STORY)
    code = (f"import sys; sys.modules['{package}'] = None; "
            f"from elastic_trainer.__main__ import main; sys.exit(main(sys.argv[1:]))")
    for options, exit_code in (["--web"], 2), ([], 0):
        done = subprocess.run([sys.executable, "-c", code, "watch", str(tmp_path), *options],
                              capture_output=True, text=True)
        assert done.returncode == exit_code, done.stderr
        assert ("pip install 'elastic-trainer[web]'" in done.stderr) == bool(options)


@pytest.mark.parametrize("bind", ["8765", "localhost:8765", "127.0.0.1:x", "127.0.0.1:70000"])
def test_a_wrong_address_is_named(tmp_path: Path, bind: str,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="--bind is .*127.0.0.1:8765"):
        address_of(bind)
    assert main(["watch", str(tmp_path), "--bind", bind]) != 0
    assert "Add --web" in capsys.readouterr().err


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        prepare()
    except Unavailable as error:
        pytest.skip(str(error))
    with chromium() as found:
        yield found


def page_in(browser: Any, width: int, scheme: str, **options: Any) -> Any:
    """Return an empty page of a browser, which has seen nothing yet."""
    return browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme,
                               **options).new_page()


def test_the_network_of_the_browser_is_blocked(tmp_path: Path, browser: Any) -> None:
    """Chromium reaches 127.0.0.1 alone, so a page that is whole here needs nothing else. Another
    address of this machine answers, and is not reached."""
    write(tmp_path, STORY)
    with served(tmp_path) as server, served(tmp_path, bind="127.0.0.2:0") as other:
        for url in (other.url, f"http://localhost:{server.server_port}/", "http://example.org/"):
            with pytest.raises(Exception, match="ERR_NAME_NOT_RESOLVED"):
                page_in(browser, 400, "dark").goto(url)
        assert page_in(browser, 400, "dark").goto(server.url).status == 200


def test_a_browser_follows_two_servers_with_tokens_at_once(tmp_path: Path, browser: Any) -> None:
    """It keeps the cookies of both: ports of one machine share them."""
    write(tmp_path, STORY[:12])
    context = browser.new_context()
    with served(tmp_path, bind="0.0.0.0:0") as one, served(tmp_path, bind="0.0.0.0:0") as two:
        pages = []
        for server in (one, two):
            shown = context.new_page()
            shown.goto(f"http://127.0.0.1:{server.server_port}/?token={server.token}")
            pages.append(shown)
        write(tmp_path, STORY)
        for shown in pages:
            shown.wait_for_selector("#figures :text-is('finished')")
            assert shown.locator("#state").inner_text() == "follows the run"
    context.close()


def test_a_page_follows_a_server_that_is_started_again(tmp_path: Path, browser: Any) -> None:
    """Between two polls another run is served on the same port: the page becomes that run's. Then
    the log cannot be read, the server shows other runs, or there is none: the page says so."""
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, story in ((one, STORY), (two, STORY[:12])):
        write(folder, [item | {"run": folder.name} for item in story])
    shown = page_in(browser, 400, "light")
    with served(one) as server:
        bind = f"127.0.0.1:{server.server_port}"
        shown.goto(server.url)
        shown.wait_for_selector("#figures :text('finished')")
        url = shown.url
    with served(two, bind=bind):
        shown.wait_for_selector("h1:text('run two')")
        shown.wait_for_selector("#figures :text('not finished')")
        (two / "events.jsonl").rename(two / "log")
        (two / "events.jsonl").symlink_to("events.jsonl")
        shown.wait_for_selector("#state:text('cannot be read')")
        (two / "events.jsonl").unlink()
        (two / "log").rename(two / "events.jsonl")
        shown.wait_for_selector("#state:text('follows the run')")
    shown.wait_for_selector("#state:text('has ended')")
    with served(one, two, bind=bind):
        shown.wait_for_selector("h1:text('2 runs')")
        shown.goto(f"{url}run/one/")
        shown.wait_for_selector("h1:text('run one')")
    with served(two, bind=bind):
        shown.wait_for_selector("#state:text('There is no such page')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
def test_a_page_can_be_read_without_colours(tmp_path: Path, browser: Any, scheme: str, width: int
                                            ) -> None:
    """To an eye that sees no colour each group of a lane, each phase and each part of a pause has
    another pattern, and each mark another shape. Without the patterns some would be alike. States
    and levels are words."""
    checkpoint = event(13.2, "state.checkpoint_published", step=5, bytes=1, pause_s=0.2)
    failed = event(13.4, "state.checkpoint_failed", step=5, error="full")
    again = [event(13.3, "driver.host_removed", host="d"), failed,
             event(13.6, "attempt.ended", verdict="failed"),
             event(14.0, "attempt.started", attempt=2),
             generation(16.0, 4, 6, "checkpoint", 1.0, attempt=2),
             step(17.0, 6, generation=4, attempt=2), step(18.0, 7, generation=4, attempt=2)]
    write(tmp_path, [*STORY[:-1], checkpoint, *again])
    shown = page_in(browser, width, scheme, device_scale_factor=4)
    with served(tmp_path) as server:
        shown.goto(server.url)
        shown.wait_for_selector("#picture .rate")
        shown.wait_for_selector("#events td:text-is('warning')")
        shown.context.new_cdp_session(shown).send(
            "Emulation.setEmulatedVisionDeficiency", {"type": "achromatopsia"})
        kinds = {"#hosts .legend rect": 7, "#recoveries .legend rect": 5,
                 "#picture .legend rect": 8}
        for legend, number in kinds.items():
            looks = looks_of(shown, legend)
            assert len(looks) == number and least_difference(looks) > 8, (legend, [*looks])
        lanes = classes_of(shown, "#hosts .chart .fill")
        assert len(lanes) > 4 and lanes <= {*looks_of(shown, "#hosts .legend rect")}
        shapes = {it.get_attribute("class"): it.get_attribute("d")
                  for it in shown.locator("#picture .legend .mark").all()}
        assert len(shapes) > 3 and len({*shapes.values()}) == len(shapes)
        assert classes_of(shown, "#picture .mark") == {*shapes}
        assert shown.locator("#fleet th:text-is('state')").count() == 1
        shown.add_style_tag(content=".hatch, .grain { display: none; }")
        assert any(least_difference(looks_of(shown, legend)) < 8 for legend in kinds)


def classes_of(shown: Any, selector: str) -> set[str]:
    return {it.get_attribute("class") for it in shown.locator(selector).all()}


def looks_of(shown: Any, selector: str) -> dict[str, Any]:
    """Return the pixels of small shapes by their class, as a screen shows them. They are grey."""
    Image = pytest.importorskip("PIL.Image")
    found = {}
    for it in shown.locator(selector).all():
        image = Image.open(io.BytesIO(it.screenshot())).convert("RGB")
        width, height = image.size
        pixels = numpy.asarray(image.crop((6, 6, width - 6, height - 6))).astype(int)
        assert (pixels.max(axis=2) - pixels.min(axis=2)).max() <= 2
        found[it.get_attribute("class")] = pixels[:, :, 0]
    return found


def least_difference(looks: dict[str, Any]) -> float:
    """Return the mean difference of the pixels (0-255) of the two that are most alike."""
    height, width = (min(it.shape[axis] for it in looks.values()) for axis in (0, 1))
    return float(min(abs(one[:height, :width] - two[:height, :width]).mean()
                     for one, two in combinations(looks.values(), 2)))


def test_a_browser_shows_the_mark_of_a_worker_that_is_killed_while_it_looks(
        tmp_path: Path, twin_of: Callable[..., str], browser: Any) -> None:
    """Light and dark, each 400 and 1600 px wide, with heartbeats and the parts of the pause.
    Nothing is asked of another place, and the run goes on to the same bits."""
    job = ("--steps", "160", "--step-s", "0.2")
    with Cluster(tmp_path, job=job) as cluster, served(cluster.run_dir) as server:
        asked: list[str] = []
        pages = {(width, scheme): page_in(browser, width, scheme)
                 for width in (400, 1600) for scheme in ("dark", "light")}
        for shown in pages.values():
            shown.on("request", lambda request: asked.append(request.url))
            shown.on("pageerror", lambda error: asked.append(f"error {error}"))
            shown.goto(server.url)
        cluster.wait_for_step(6)
        for shown in pages.values():
            shown.wait_for_selector("#picture .rate", timeout=60_000)
            assert shown.locator("#picture .marks .lost").count() == 0
        cluster.signal_worker("127.0.0.2", signal.SIGKILL)
        for (width, scheme), shown in pages.items():
            shown.wait_for_selector("#picture .marks .mark.lost", state="attached",
                                    timeout=60_000)
            shown.wait_for_selector("#events td:has-text('was killed (SIGKILL)')")
            shown.wait_for_selector("#fleet th:has-text('heartbeat')")
            shown.wait_for_selector("#picture .fill.redoing", state="attached", timeout=60_000)
            assert shown.evaluate("document.documentElement.scrollWidth") <= width
            paper, ink = (lightness(shown.evaluate(f"getComputedStyle(document.body).{name}"))
                          for name in ("backgroundColor", "color"))
            assert paper > 240 > 60 > ink if scheme == "light" else paper < 40 < 230 < ink
            shown.screenshot(path=str(tmp_path / f"{width}-{scheme}.png"), full_page=True)
        (tmp_path / "hurry").touch()
        pages[400, "dark"].wait_for_selector("#figures :text('finished')", timeout=120_000)
        assert cluster.finish() == 0
        assert all(url.startswith(server.url) for url in asked), asked
        cluster.assert_nothing_lost(twin_of(*job), victims=1)
        for shown in pages.values():
            shown.context.close()


def lightness(colour: str) -> float:
    """Return the mean of the channels of a colour of CSS, from 0 to 255."""
    channels = [int(it) for it in re.findall(r"\d+", colour)][:3]
    return sum(channels) / 3
